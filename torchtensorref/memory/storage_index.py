"""From a plain storage to the block that stands for it."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .block import Block


class Table:
    """Weak map from storage objects to blocks, by the range of bytes a block covers.

    A block usually covers a whole storage. Tensors that are parts of one mapped file are blocks of
    their own, each over its part, or a shard of weights would be one block. The lifetime of a block
    belongs to the program; an entry dies with it.
    """

    def __init__(self) -> None:
        #: The weak hold on the storage keeps its address from being given to another one, as long
        #: as the row is there: a block may outlive the storage it was adopted from.
        self._blocks: dict[int, list[tuple[int, int, weakref.ref[Block], StorageWeakRef]]] = {}
        #: Filled by finalizers, which run in any thread at any moment and therefore only append.
        self._gone: deque[int] = deque()

    def add(self, storage: torch.UntypedStorage, start: int, stop: int, block: Block) -> None:
        """Note that `block` stands for the bytes from `start` to `stop` of a storage.

        The caller holds the lock: only here rows change.
        """
        while self._gone:
            self._forget(self._gone.popleft())
        key = storage._cdata
        rows = [row for row in self._blocks.get(key, ()) if row[2]() is not None]
        rows.append((start, stop, weakref.ref(block), StorageWeakRef(storage)))
        self._blocks[key] = rows
        weakref.finalize(block, self._gone.append, key).atexit = False

    def find(
        self, storage: torch.UntypedStorage, start: int, stop: int
    ) -> tuple[Block, int] | None:
        """Return the block that covers the range, and the byte of the storage where it begins."""
        for row_start, row_stop, reference, _ in self._blocks.get(storage._cdata, ()):
            block = reference()
            if block is not None and row_start <= start and stop <= row_stop:
                return block, row_start
        return None

    def overlaps(self, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        """Whether a block covers part of the range."""
        return any(
            reference() is not None and row_start < stop and start < row_stop
            for row_start, row_stop, reference, _ in self._blocks.get(storage._cdata, ())
        )

    def blocks(self) -> list[Block]:
        """Return the living blocks that stand for a plain storage."""
        rows = [row for rows in list(self._blocks.values()) for row in rows]
        return [block for row in rows if (block := row[2]()) is not None]

    def __len__(self) -> int:
        return sum(row[2]() is not None for rows in self._blocks.values() for row in rows)

    def _forget(self, key: int) -> None:
        rows = [row for row in self._blocks.get(key, ()) if row[2]() is not None]
        if rows:
            self._blocks[key] = rows
        else:
            self._blocks.pop(key, None)
