"""The blocks that pins keep on the accelerator: each stays until the last pin lets go of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ...base import forking
from ...memory.block import Block
from ...memory.manager import tensorsManager

#: What each pin keeps; read and written under the lock.
_all: weakref.WeakSet[KeptBlocks] = weakref.WeakSet()
_lock = forking.RLock()


class KeptBlocks:
    """What one pin keeps, and has given up since memory was short; any thread may ask."""

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[Block] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[Block] = weakref.WeakSet()
        with _lock:
            _all.add(self)

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
                try:
                    block.is_kept = True
                    self._kept.add(block)
                except BaseException:
                    self._let_go([block])
                    raise

    def give_up_lost(self) -> tuple[int, int]:
        """Give up what was let go; return its bytes, and those that stay."""
        with _lock:
            lost = [block for block in self._kept if not block.is_kept]
            lost_nbytes = sum(block.nbytes for block in lost if block not in self._given_up)
            self._given_up.update(lost)
            self._let_go(lost)
            return lost_nbytes, sum(block.nbytes for block in self._kept)

    def clear(self) -> None:
        """Let everything go."""
        with _lock:
            self._given_up.update(self._kept)  # if an error comes, none of it is said to be lost
            self._let_go(list(self._kept))
            self._given_up.clear()

    def _let_go(self, blocks: Iterable[Block]) -> None:
        others = [other._kept for other in _all if other is not self]
        for block in blocks:
            block.is_kept = any(block in kept for kept in others)
            self._kept.discard(block)  # last: an error may have it done again
