"""A pool of page-locked host memory for the results of kernels, when they are first copied home."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from typing import TYPE_CHECKING

from ...base import forking
from .limits import has_spare_ram
from .page_lock import LEAST_NBYTES, PageLocks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PageLockedPool"]


class PageLockedPool:
    """Page-locked memory of the sizes that were wanted before.

    Notes
    -----
    What a kernel has made has no memory at home until it is copied there, and page-locking takes
    too long then. So the first copy of a size goes to pageable memory, and one more piece of that
    size is made in the background for the next: a program that repeats itself finds enough of them
    after one round. A piece comes back when nothing refers to its memory any more.
    """

    def __init__(self, locks: PageLocks) -> None:
        self._locks = locks
        self._lock = forking.Lock()
        self._free: dict[int, list[Tensor]] = {}
        #: Appended to by finalizers, which take no lock.
        self._returned: deque[Tensor] = deque()

    def take(self, nbytes: int) -> Tensor | None:
        """Return page-locked memory of exactly so many bytes, as a base; None if there is none."""
        if nbytes < LEAST_NBYTES:
            return None
        with self._lock:
            self._settle()
            free = self._free.get(nbytes)
            piece = free.pop() if free else None
        if piece is None:
            self._locks.later(functools.partial(self._make, nbytes))
            return None
        return self._hand_out(piece)

    def _hand_out(self, piece: Tensor) -> Tensor:
        import torch

        owner = (ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr())
        # The storage over it keeps the owner, and the finalizer keeps the piece.
        weakref.finalize(owner, self._returned.append, piece).atexit = False
        base: Tensor = torch.frombuffer(owner, dtype=torch.uint8)
        return base

    def _make(self, nbytes: int) -> None:
        if not has_spare_ram(nbytes):
            return
        piece = self._locks.allocate(nbytes)
        if piece is None:
            with self._lock:
                self._settle()
                self._free.clear()  # of sizes that were wanted once
            piece = self._locks.allocate(nbytes)
        if piece is not None:
            self._returned.append(piece)

    def _settle(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._free.setdefault(piece.numel(), []).append(piece)
