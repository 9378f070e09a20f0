"""From storages to blocks: rows die with their blocks, and change under the lock only."""

import gc

import torch

from torchTensorRef.memory.block import Block
from torchTensorRef.memory.storage_index import Table


def storage(nbytes=16):
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def test_a_range_is_found_by_whoever_covers_it():
    table, whole = Table(), storage()
    block = Block(8)
    table.add(whole, 4, 12, block)
    assert table.find(whole, 4, 12) == (block, 4)
    assert table.find(whole, 6, 8) == (block, 4)
    assert table.find(whole, 0, 8) is None
    assert table.overlaps(whole, 0, 5)
    assert not table.overlaps(whole, 0, 4)
    assert not table.overlaps(whole, 12, 16)
    assert table.find(storage(), 4, 12) is None
    assert table.blocks() == [block]


def test_a_finalizer_changes_no_row():
    """It runs in any thread at any moment: also where another one is just adding a row."""
    table, whole = Table(), storage()
    first, second = Block(4), Block(4)
    table.add(whole, 0, 4, first)
    table.add(whole, 4, 8, second)
    rows = table._blocks[whole._cdata]
    del first
    gc.collect()
    assert table._blocks[whole._cdata] is rows
    assert table.find(whole, 0, 4) is None
    assert not table.overlaps(whole, 0, 4)
    assert len(table) == 1
    third = Block(4)
    table.add(whole, 0, 4, third)
    assert len(table._blocks[whole._cdata]) == 2
    assert table.find(whole, 0, 4) == (third, 0)
    assert table.find(whole, 4, 8) == (second, 4)


def test_rows_of_storages_that_are_gone_do_not_pile_up():
    table = Table()
    for _ in range(100):
        table.add(storage(), 0, 16, Block(16))
    gc.collect()
    assert len(table) == 0
    assert len(table._blocks) <= 2
