"""The blocks that pins keep on the accelerator: each stays until the last pin lets go of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ...base import forking
from ...memory.block import Block
from ...memory.manager import tensorsManager

#: How many pins keep a block; read and written under the lock.
_keepers: weakref.WeakKeyDictionary[Block, int] = weakref.WeakKeyDictionary()
_lock = forking.RLock()


class KeptBlocks:
    """What one pin keeps, and has given up since memory was short; any thread may ask."""

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[Block] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[Block] = weakref.WeakSet()

    def knows(self, block: Block) -> bool:
        """Whether there is nothing to be decided about a block."""
        return block in self._kept or block in self._given_up

    def has_lost(self, block: Block) -> bool:
        """Whether a block that it keeps was let go since memory was short."""
        return not block.is_kept and block in self._kept

    def keep(self, block: Block, pin: object) -> None:
        """Keep a block, unless another thread has taken the pin off the list."""
        with _lock:
            if pin in tensorsManager.middlewares.here() and block not in self._kept:
                block.is_kept = True
                self._kept.add(block)
                _keepers[block] = _keepers.get(block, 0) + 1

    def give_up_lost(self) -> tuple[int, int]:
        """Give up what was let go; return its bytes, and those that stay."""
        with _lock:
            lost = [block for block in self._kept if not block.is_kept]
            self._let_go(lost)
            self._given_up.update(lost)
            return sum(block.nbytes for block in lost), sum(block.nbytes for block in self._kept)

    def clear(self) -> None:
        """Let everything go."""
        with _lock:
            self._let_go(list(self._kept))
            self._given_up.clear()

    def _let_go(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._kept.discard(block)
            _keepers[block] -= 1
            if not _keepers[block]:
                del _keepers[block]
                block.is_kept = False
