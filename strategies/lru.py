"""Give back what the program has left alone the longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..strategy import BlockSnapshot, DeviceSnapshot, Strategy


def until_freed(blocks: Iterable[BlockSnapshot], need_nbytes: int) -> Iterator[int]:
    """Yield block numbers in the order given, until they add up to `need_nbytes`."""
    freed_nbytes = 0
    for block in blocks:
        if freed_nbytes >= need_nbytes:
            return
        yield block.block_id
        freed_nbytes += block.nbytes


def by_age(candidates: Iterable[BlockSnapshot]) -> list[BlockSnapshot]:
    """Sort blocks: least recently used first, among equals the largest."""
    return sorted(candidates, key=lambda block: (block.last_use, -block.nbytes))


class LeastRecentlyUsed(Strategy):
    """Evict what has waited longest; among equals, the largest."""

    name = "lru"

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the least recently used blocks, as many as are needed."""
        return list(until_freed(by_age(candidates), need_nbytes))
