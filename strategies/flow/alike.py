"""Victims of the size that is needed, where an allocator gives room out in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ...strategy import BlockSnapshot, DeviceSnapshot

#: On a real accelerator so many of the next victims are looked at for one of the size needed.
ALIKE_COUNT = 16
#: What is no larger gets room among others as small, in segments that they share: torch's caching
#: allocator does so up to 1 MiB. One of these is as good as another.
SHARED_NBYTES = 2**20


class Alike:
    """The next victims; on a real accelerator those of the size that is needed first.

    Its allocator gives room out in pieces. What is fetched into the room of a block of its own size
    fits as it is; between others it may find none, though there are bytes enough: then all that the
    allocator keeps goes back to the driver, which takes milliseconds (`docs/real-accelerators.md`).
    Small blocks share what they lie in: for one of them the next victim will do, if it is small.
    """

    def __init__(
        self, device: DeviceSnapshot, victims: Iterator[tuple[float, BlockSnapshot]]
    ) -> None:
        self._victims = victims
        self._count = 1 if device.knows_compute_end else ALIKE_COUNT
        self._next: list[tuple[float, BlockSnapshot]] = []

    def take(self, nbytes: int, distance: float) -> BlockSnapshot | None:
        """Return the next victim that is used after so many accesses; None if there is none."""
        for at, (next_use, block) in enumerate(self._looked_at()):
            if block.nbytes == nbytes and next_use > distance:
                del self._next[at]
                return block
            if not at and max(block.nbytes, nbytes) <= SHARED_NBYTES:
                break
        if not self._next or self._next[0][0] <= distance:
            return None
        return self._next.pop(0)[1]

    def _looked_at(self) -> Iterator[tuple[float, BlockSnapshot]]:
        """Yield the next victims, each described when its turn comes: that takes a while."""
        yield from self._next
        for victim in islice(self._victims, self._count - len(self._next)):
            self._next.append(victim)
            yield victim
