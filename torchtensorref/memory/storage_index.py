"""From a plain storage to the block that stands for it."""

from __future__ import annotations

import sys
import weakref
from collections import deque

import torch

from . import core
from .block import Block

#: Where a row stops that covers a storage, however large.
WHOLE = sys.maxsize


class _Row(weakref.ref[Block]):
    """A block, as long as it lives, that covers a storage."""

    # There is one for each block: slots, and a callback that all of them share.
    __slots__ = ("key",)

    #: The storage, by its number. It is no other one's until the row is forgotten: a block may
    #: outlive the storage it was adopted from.
    key: int
    start: int = 0
    stop: int = WHOLE


class _PartRow(_Row):
    """One that covers a range."""

    __slots__ = ("start", "stop")


class Table:
    """Weak map from storage objects to blocks, by the range of bytes a block covers.

    A block usually covers a whole storage. Tensors that are parts of one mapped file are blocks of
    their own, each over its part, or a shard of weights would be one block. The lifetime of a block
    belongs to the program; an entry dies with it.
    """

    def __init__(self) -> None:
        #: A row by itself is one; most storages have no more.
        self._blocks: dict[int, _Row | tuple[_Row, ...]] = {}
        #: Filled by callbacks, which run in any thread at any moment and therefore only append.
        self._gone: deque[_Row] = deque()
        self._note_gone = self._gone.append
        weakref.finalize(self, _free_all, self._blocks, self._gone).atexit = False

    def add(self, storage: int, start: int, stop: int, block: Block) -> None:
        """Note that `block` stands for the bytes from `start` to `stop` of a storage, or all.

        The caller holds the lock: only here rows change. The storage is given as the number that
        holds it weakly (`core.hold_weakly`), and is let go of with the block.
        """
        while self._gone:
            self._forget(self._gone.popleft())
        row = (_Row if stop == WHOLE else _PartRow)(block, self._note_gone)
        row.key = storage
        if stop != WHOLE:
            row.start, row.stop = start, stop
        # First: copies share a storage until one of them leaves it to the other.
        self._put(storage, (row, *self._rows(storage)))

    def note_base(self, base: torch.Tensor, block: Block) -> None:
        """Note whose bytes are in a storage that the program may come by (lock held)."""
        found = self.find(core.storage_under(base)[0], 0, 0)
        if found is None or found[0] is not block:
            self.add(core.hold_weakly(base), 0, WHOLE, block)

    def find(self, storage: int, start: int, stop: int) -> tuple[Block, int] | None:
        """Return the block that covers the range, and the byte of the storage where it begins."""
        for row in self._rows(storage):
            block = row()
            if block is not None and row.start <= start and stop <= row.stop:
                return block, row.start
        return None

    def overlaps(self, storage: int, start: int, stop: int) -> bool:
        """Whether a block covers part of the range."""
        return any(
            row() is not None and row.start < stop and start < row.stop
            for row in self._rows(storage)
        )

    def blocks(self) -> list[Block]:
        """Return the living blocks that stand for a plain storage."""
        rows = [row for key in list(self._blocks) for row in self._rows(key)]
        return [block for row in rows if (block := row()) is not None]

    def __len__(self) -> int:
        return len(self.blocks())

    def _rows(self, key: int) -> tuple[_Row, ...]:
        found = self._blocks.get(key, ())
        return (found,) if isinstance(found, _Row) else found

    def _put(self, key: int, rows: tuple[_Row, ...]) -> None:
        self._blocks[key] = rows[0] if len(rows) == 1 else rows

    def _forget(self, gone: _Row) -> None:
        # Once the number is given back the address may be another storage's: the row goes before.
        rows = tuple(row for row in self._rows(gone.key) if row is not gone)
        if rows:
            self._put(gone.key, rows)
        else:
            self._blocks.pop(gone.key, None)
        core.let_go(gone.key)


def _free_all(blocks: dict[int, _Row | tuple[_Row, ...]], gone: deque[_Row]) -> None:
    """Give back what a table holds that has died itself."""
    for found in blocks.values():
        for row in (found,) if isinstance(found, _Row) else found:
            core.let_go(row.key)
    gone.clear()
