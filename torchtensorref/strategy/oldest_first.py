"""The order that the manager keeps anyway: what was used least recently goes first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .contract import BlockSnapshot, DeviceSnapshot, Strategy


def until_freed(blocks: Iterable[BlockSnapshot], need_nbytes: int) -> Iterator[int]:
    """Yield block numbers in the order given, until they add up to `need_nbytes`."""
    freed_nbytes = 0
    for block in blocks:
        if freed_nbytes >= need_nbytes:
            return
        yield block.block_id
        freed_nbytes += block.nbytes


class OldestFirst(Strategy):
    """Base of strategies that name what has waited longest; among equals, the largest.

    That is what the manager does where nobody names anything, so it need not ask these.
    """

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the least recently used blocks, as many as are needed."""
        return until_freed(candidates, need_nbytes)
