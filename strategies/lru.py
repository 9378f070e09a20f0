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


class LeastRecentlyUsed(Strategy):
    """Evict what has waited longest; among equals, the largest."""

    name = "lru"

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the least recently used blocks, as many as are needed."""
        return until_freed(candidates, need_nbytes)
