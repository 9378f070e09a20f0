"""From a plain storage to the block that stands for it."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .block import Block


class _Row(weakref.ref[Block]):
    """A block, as long as it lives, and the range of a storage that it covers."""

    # There is one for each block: slots, and a callback that all of them share.
    __slots__ = ("hold", "start", "stop")

    start: int
    stop: int
    #: Keeps the address of the storage from being given to another one, as long as the row is
    #: there: a block may outlive the storage it was adopted from.
    hold: StorageWeakRef


class Table:
    """Weak map from storage objects to blocks, by the range of bytes a block covers.

    A block usually covers a whole storage. Tensors that are parts of one mapped file are blocks of
    their own, each over its part, or a shard of weights would be one block. The lifetime of a block
    belongs to the program; an entry dies with it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[_Row, ...]] = {}
        #: Filled by callbacks, which run in any thread at any moment and therefore only append.
        self._gone: deque[_Row] = deque()
        self._note_gone = self._gone.append

    def add(self, storage: torch.UntypedStorage, start: int, stop: int, block: Block) -> None:
        """Note that `block` stands for the bytes from `start` to `stop` of a storage.

        The caller holds the lock: only here rows change.
        """
        while self._gone:
            self._forget(self._gone.popleft())
        row = _Row(block, self._note_gone)
        row.start, row.stop, row.hold = start, stop, StorageWeakRef(storage)
        key = row.hold.cdata
        self._blocks[key] = (*self._living(key), row)

    def find(
        self, storage: torch.UntypedStorage, start: int, stop: int
    ) -> tuple[Block, int] | None:
        """Return the block that covers the range, and the byte of the storage where it begins."""
        for row in self._blocks.get(storage._cdata, ()):
            block = row()
            if block is not None and row.start <= start and stop <= row.stop:
                return block, row.start
        return None

    def overlaps(self, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        """Whether a block covers part of the range."""
        return any(
            row() is not None and row.start < stop and start < row.stop
            for row in self._blocks.get(storage._cdata, ())
        )

    def blocks(self) -> list[Block]:
        """Return the living blocks that stand for a plain storage."""
        rows = [row for rows in list(self._blocks.values()) for row in rows]
        return [block for row in rows if (block := row()) is not None]

    def __len__(self) -> int:
        return sum(row() is not None for rows in self._blocks.values() for row in rows)

    def _living(self, key: int) -> tuple[_Row, ...]:
        return tuple(row for row in self._blocks.get(key, ()) if row() is not None)

    def _forget(self, gone: _Row) -> None:
        key = gone.hold.cdata
        rows = self._living(key)
        if rows:
            self._blocks[key] = rows
        else:
            self._blocks.pop(key, None)
