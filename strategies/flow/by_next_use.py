"""Blocks by their next use, farthest first, without sorting them at each operator."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

#: Outdated entries tolerated, as a multiple of the living ones.
_SLACK = 4


class Farthest:
    """A heap of blocks by the position of their next use.

    While a forecast holds, that position does not change until the block is used, so one entry per
    use is enough. Outdated entries are dropped when they are met.
    """

    def __init__(self) -> None:
        self._position: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def note(self, block_id: int, position: float) -> None:
        """Say when a block is used next."""
        self._position[block_id] = position
        heappush(self._heap, (-position, block_id))
        if len(self._heap) > _SLACK * len(self._position) + 64:
            self._heap = [(-at, number) for number, at in self._position.items()]
            heapify(self._heap)

    def forget(self, block_id: int) -> None:
        """Leave a block out from now on."""
        self._position.pop(block_id, None)

    def clear(self) -> None:
        """Leave every block out."""
        self._position.clear()
        self._heap.clear()

    def descending(self) -> Iterator[tuple[int, float]]:
        """Yield (block, position), farthest first. Do not note anything meanwhile."""
        heap = self._heap
        seen: list[tuple[float, int]] = []
        try:
            while heap:
                entry = heappop(heap)
                position, block_id = -entry[0], entry[1]
                if self._position.get(block_id) != position:
                    continue
                if seen and seen[-1] == entry:
                    continue
                seen.append(entry)
                yield block_id, position
        finally:
            for entry in seen:
                if self._position.get(entry[1]) == -entry[0]:
                    heappush(heap, entry)
