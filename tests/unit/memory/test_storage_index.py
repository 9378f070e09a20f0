"""From storages to blocks: rows die with their blocks, and change under the lock only."""

import gc

import torch

from torchTensorRef.memory import core
from torchTensorRef.memory.block import Block
from torchTensorRef.memory.storage_index import WHOLE, Table


def plain(nbytes=16):
    return torch.empty(nbytes, dtype=torch.uint8)


def add(table, tensor, start, stop, block):
    table.add(core.hold_weakly(tensor), start, stop, block)
    return core.storage_under(tensor)[0]


def test_a_range_is_found_by_whoever_covers_it():
    table, block = Table(), Block(8)
    tensor = plain()
    whole = add(table, tensor, 4, 12, block)
    assert table.find(whole, 4, 12) == (block, 4)
    assert table.find(whole, 6, 8) == (block, 4)
    assert table.find(whole, 0, 8) is None
    assert table.overlaps(whole, 0, 5)
    assert not table.overlaps(whole, 0, 4)
    assert not table.overlaps(whole, 12, 16)
    assert table.find(core.storage_under(plain())[0], 4, 12) is None
    assert table.blocks() == [block]


def test_a_block_of_a_whole_storage_covers_what_it_grows_to():
    table, block = Table(), Block(16)
    whole = add(table, plain(), 0, WHOLE, block)
    assert table.find(whole, 0, 16) == (block, 0)
    assert table.find(whole, 8, 64) == (block, 0)
    assert table.overlaps(whole, 100, 101)


def test_a_finalizer_changes_no_row():
    """It runs in any thread at any moment: also where another one is just adding a row."""
    table, tensor = Table(), plain()
    first, second = Block(4), Block(4)
    whole = add(table, tensor, 0, 4, first)
    add(table, tensor, 4, 8, second)
    rows = table._blocks[whole]
    del first
    gc.collect()
    assert table._blocks[whole] is rows
    assert table.find(whole, 0, 4) is None
    assert not table.overlaps(whole, 0, 4)
    assert len(table) == 1
    third = Block(4)
    add(table, tensor, 0, 4, third)
    assert len(table._blocks[whole]) == 2
    assert table.find(whole, 0, 4) == (third, 0)
    assert table.find(whole, 4, 8) == (second, 4)


def test_rows_of_storages_that_are_gone_do_not_pile_up():
    table = Table()
    for _ in range(100):
        add(table, plain(), 0, 16, Block(16))
    gc.collect()
    assert len(table) == 0
    assert len(table._blocks) <= 2


def test_no_other_storage_gets_the_number_of_one_whose_block_lives():
    table, kept = Table(), []
    for _ in range(200):
        tensor, block = plain(), Block(16)
        number = core.storage_under(tensor)[0]
        assert table.find(number, 0, 16) is None
        add(table, tensor, 0, 16, block)
        kept.append(block)
    assert len(table) == 200


def test_whose_bytes_a_storage_has_now_is_found_first():
    table, base, first, second = Table(), plain(), Block(16), Block(16)
    for block in (first, first, second):
        table.note_base(base, block)
    number = core.storage_under(base)[0]
    assert len(table._blocks[number]) == 2
    assert table.find(number, 0, 16) == (second, 0)
    del second, block
    assert table.find(number, 0, 16) == (first, 0)
