"""A double of torch's caching allocator: segments that are split, a pool per stream, a hard cap.

Addresses and sizes only. What is asked for is rounded; a block is cut out of the smallest free one
of its stream's pool that holds it, if the rest is worth keeping; what is freed joins its free
neighbours within its segment. Where no free block is large enough a segment is taken from the
driver, within the cap on *reserved* bytes; where that fails the whole cache is released (which
waits for the device), and the segment is asked for again.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch

from .device_double import LateModule, MetaDevice

GRAIN = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
SEGMENT_GRAIN = 2 << 20


def rounded(nbytes: int, grain: int = GRAIN) -> int:
    return -(-nbytes // grain) * grain


class Piece:
    """A part of a segment, free or not, and its neighbours in it."""

    __slots__ = ("after", "before", "is_free", "nbytes", "pool", "start")

    def __init__(self, pool: Any, start: int, nbytes: int) -> None:
        self.pool, self.start, self.nbytes = pool, start, nbytes
        self.before: Piece | None = None
        self.after: Piece | None = None
        self.is_free = True

    @property
    def key(self) -> tuple[int, int]:
        return self.nbytes, self.start


class CachingAllocator:
    """Gives out addresses as torch's does.

    Attributes
    ----------
    released, refused : int
        How often the whole cache was released, and how often there was nothing all the same.
    """

    def __init__(self, cap_nbytes: int) -> None:
        self.cap_nbytes = cap_nbytes
        self.reserved = self.allocated = self.peak = self.released = self.refused = 0
        self._next = 1 << 40
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self._pieces: dict[int, Piece] = {}  # by start, of all

    def allocate(self, nbytes: int, stream: str) -> int:
        size = rounded(max(nbytes, 1))
        is_small = size <= SMALL
        pool = (stream, is_small)
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, 0))
        if at == len(free):
            at = self._grow(pool, size)
            free = self._free[pool]
        piece = self._pieces[free.pop(at)[1]]
        rest = piece.nbytes - size
        if rest >= GRAIN if is_small else rest > SMALL:
            self._split(piece, size)
        piece.is_free = False
        self.allocated += piece.nbytes
        self.peak = max(self.peak, self.allocated)
        return piece.start

    def free(self, start: int) -> None:
        piece = self._pieces[start]
        assert not piece.is_free, "freed twice"
        piece.is_free = True
        self.allocated -= piece.nbytes
        after, before = piece.after, piece.before
        if after is not None and after.is_free:
            self._forget(after)
            self._join(piece, after)
        if before is not None and before.is_free:
            self._forget(before)
            self._join(before, piece)
            piece = before
        insort(self._free[piece.pool], piece.key)

    def release_cache(self) -> None:
        """Give all segments back to the driver of which nothing is used."""
        for pool, free in self._free.items():
            left = []
            for key in free:
                piece = self._pieces[key[1]]
                if piece.before is None and piece.after is None:
                    self.reserved -= piece.nbytes
                    del self._pieces[piece.start]
                else:
                    left.append(key)
            self._free[pool] = left

    def _grow(self, pool: tuple[str, bool], size: int) -> int:
        if pool[1]:
            nbytes = SMALL_SEGMENT
        else:
            nbytes = LARGE_SEGMENT if size < LARGE_FROM else rounded(size, SEGMENT_GRAIN)
        if self.reserved + nbytes > self.cap_nbytes:
            self.released += 1
            self.release_cache()
            if self.reserved + nbytes > self.cap_nbytes:
                self.refused += 1
                raise torch.OutOfMemoryError("the allocator may reserve no more: out of memory")
        self.reserved += nbytes
        piece = Piece(pool, self._next, nbytes)
        self._next += nbytes + SEGMENT_GRAIN
        self._pieces[piece.start] = piece
        insort(self._free[pool], piece.key)
        return bisect_left(self._free[pool], piece.key)

    def _split(self, piece: Piece, size: int) -> None:
        rest = Piece(piece.pool, piece.start + size, piece.nbytes - size)
        rest.before, rest.after = piece, piece.after
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.nbytes = rest, size
        self._pieces[rest.start] = rest
        insort(self._free[piece.pool], rest.key)

    def _forget(self, piece: Piece) -> None:
        free = self._free[piece.pool]
        del free[bisect_left(free, piece.key)]

    def _join(self, first: Piece, second: Piece) -> None:
        del self._pieces[second.start]
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first


class CachingModule(LateModule):
    """A card's module whose memory is given out by the double of the allocator."""

    def __init__(self, total_nbytes: int) -> None:
        super().__init__(total_nbytes)
        self.allocator = CachingAllocator(total_nbytes)
        self.ours = lambda: self.allocator.reserved

    def set_per_process_memory_fraction(self, fraction: float, index: int = 0) -> None:
        super().set_per_process_memory_fraction(fraction, index)
        self.allocator.cap_nbytes = int(fraction * self.total_nbytes)

    def memory_allocated(self, index: int = 0) -> int:
        return self.allocator.allocated

    def max_memory_allocated(self, index: int = 0) -> int:
        return self.allocator.peak

    def memory_reserved(self, index: int = 0) -> int:
        return self.allocator.reserved

    def reset_peak_memory_stats(self, index: int = 0) -> None:
        self.allocator.peak = self.allocator.allocated

    def memory_stats(self, index: int = 0) -> dict[str, int]:
        allocator = self.allocator
        return {"num_alloc_retries": allocator.released, "num_ooms": allocator.refused}

    def empty_cache(self) -> None:
        super().empty_cache()
        self.allocator.release_cache()


class CachingDevice(MetaDevice):
    """A card without bytes, whose memory is given out, split and joined as on a card.

    Its clock counts what it is given to do, so that a busy machine changes no decision.
    """

    #: What the host takes for an operator or a copy.
    STEP_NS = 100_000

    def __init__(self, total_nbytes: int = 80 << 30) -> None:
        #: By a base's `id`: gives its place back, once; by itself when the base is gone.
        self.freeing: dict[int, weakref.finalize[..., torch.Tensor]] = {}
        self.ns = 0
        self.allocator_of_card = CachingModule(total_nbytes)
        super().__init__(self.allocator_of_card)
        # Nothing is to be read of sources that nobody has written: not even through a ring.
        self._copier.is_page_locked = lambda memory: True  # type: ignore[method-assign]

    def now_ns(self) -> int:
        return self.ns

    def before_operator(
        self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        super().before_operator(reads, writes)
        self.ns += self.STEP_NS

    def refill(self, base: torch.Tensor, nbytes: int) -> None:
        self.ns += self.STEP_NS
        allocator = self.allocator_of_card.allocator
        place = allocator.allocate(nbytes, "copies")
        super().refill(base, nbytes)
        free = self.freeing[id(base)] = weakref.finalize(base, allocator.free, place)
        free.atexit = False

    def empty(self, base: torch.Tensor) -> None:
        super().empty(base)
        free = self.freeing.pop(id(base), None)
        if free is not None:
            free()
