"""Blocks by number, for as long as they live."""

from __future__ import annotations

from torchTensorRef.memory.block import Block
from torchTensorRef.memory.known import KnownBlocks


def test_blocks_that_have_died_are_not_there_and_take_no_room():
    known, blocks = KnownBlocks(), [Block(8) for _ in range(3)]
    for block in blocks:
        known[block.block_id] = block
    assert known.alive() == blocks
    kept, number = blocks[0], blocks[1].block_id
    del blocks, block
    assert known.alive() == [kept]
    assert len(known) == 1
    assert number not in known
    assert known.get(number) is None
    known[kept.block_id] = kept
    assert len(known._references) == 1
