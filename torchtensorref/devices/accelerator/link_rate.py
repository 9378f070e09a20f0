"""How fast the link is, measured by pairs of events around some of its copies."""

from __future__ import annotations

from typing import Any

from .events import EventStopwatch
from .vendor import Vendor

__all__ = ["LinkRate"]

#: Until something is measured: PCIe 3.0 x16, or 4.0 x8.
UNMEASURED_BYTES_PER_S = 12e9
#: Only copies so large are measured, one in so many: what a copy takes beside its bytes is not the
#: link's.
LEAST_NBYTES = 4 << 20
ONE_IN = 16
#: Weight of the newest measurement.
NEWEST_WEIGHT = 0.2


class LinkRate:
    """Bytes per second of one direction of the link.

    Parameters
    ----------
    vendor : Vendor
        Has the events; one whose events keep no time measures nothing.

    Attributes
    ----------
    bytes_per_s : float
        As measured so far, on average.
    """

    def __init__(self, vendor: Vendor) -> None:
        self._vendor = vendor
        self.bytes_per_s = UNMEASURED_BYTES_PER_S
        self._copy_count = self._measured_count = 0
        self._waiting: tuple[int, EventStopwatch] | None = None

    def begin(self, nbytes: int, stream: Any) -> EventStopwatch | None:
        """Begin to measure a copy that is issued next on a stream, if it is its turn."""
        if nbytes < LEAST_NBYTES:
            return None
        self._look()
        self._copy_count += 1
        if self._waiting is not None or self._copy_count % ONE_IN != 1:
            return None
        return self._vendor.stopwatch(stream)

    def end(self, nbytes: int, watch: EventStopwatch) -> None:
        """End a measurement with the copy that was issued; nobody waits for it."""
        watch.stop()
        self._waiting = nbytes, watch

    def _look(self) -> None:
        """Learn from the measurement that has ended, if one has."""
        if self._waiting is None:
            return
        nbytes, watch = self._waiting
        took_ns = watch.took_ns()
        if took_ns is None:
            return
        self._waiting = None
        bytes_per_s = nbytes * 1e9 / max(took_ns, 1)
        self._measured_count += 1
        weight = max(NEWEST_WEIGHT, 1 / self._measured_count)
        self.bytes_per_s += weight * (bytes_per_s - self.bytes_per_s)
