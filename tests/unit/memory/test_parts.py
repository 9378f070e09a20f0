"""Parts of blocks that are kept, and how long."""

import gc

import torch

from torchTensorRef.memory import parts
from torchTensorRef.memory.block import Block
from torchTensorRef.memory.parts import Parts

PLACE = (64, 128)


def kept():
    found, block, base, part = (
        Parts(),
        Block(1024),
        torch.empty(1024, dtype=torch.uint8),
        Block(128),
    )
    assert not found.note(block, base, PLACE, part)
    assert not part.is_persistent
    assert found.note(block, base, PLACE, part)
    assert part.is_persistent
    return found, block, base, part


def test_a_part_is_kept_that_is_read_again():
    found, block, base, part = kept()
    assert found.find(block, base, PLACE) is part
    assert found.find(block, base, (64, 64)) is None
    assert found.find(part, base, PLACE) is None
    assert found.blocks() == {part}


def test_a_part_is_of_the_memory_that_it_was_made_of():
    found, block, base, _ = kept()
    other = base.clone()
    assert found.find(block, other, PLACE) is None
    assert not found.note(block, other, PLACE, Block(128))
    assert not found.blocks()


def test_parts_are_forgotten():
    found, block, base, part = kept()
    found.forget(part)
    assert found.blocks() == {part}
    found.forget(block)
    assert found.find(block, base, PLACE) is None
    assert not found.note(block, base, PLACE, Block(128))
    found.clear()
    assert not found.note(block, base, PLACE, Block(128))


def test_parts_go_with_their_block():
    found, block, _, _ = kept()
    del block
    gc.collect()
    assert not found.blocks()


def test_only_so_many_places_are_remembered(monkeypatch):
    monkeypatch.setattr(parts, "MOST_PLACES", 3)
    found, block, base, part = kept()
    for start in range(2):
        found.note(block, base, (start, 1), Block(1))
    assert found.blocks() == {part}
    found.note(block, base, (2, 1), Block(1))
    assert not found.blocks()
