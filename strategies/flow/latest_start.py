"""When a prefetch has to start at the latest, from the times that operators took before."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from ...strategy import DeviceSnapshot
from .forecaster import Wanted

#: The margin before the latest start: this share of the time until a block is due, and two copies.
MARGIN_SHARE = 0.1


class LatestStart:
    """A record of compute time by position, and the latest start of a queue of copies.

    A copy that starts earlier than it must holds room for longer, so that more has to be evicted
    for it: where compute and not the link is the bottleneck, starting late saves bytes. Without
    times (`compute_ns` is 0) everything starts at once.
    """

    def __init__(self) -> None:
        self._spent_ns = array("q", [0])
        self._start = 0

    def advance(self, device: DeviceSnapshot, start: int, end: int) -> None:
        """Note how much compute the operators before the access at `end` came to."""
        missing = end - self._start - len(self._spent_ns) + 1
        if missing > 0:
            # Positions without a report share its time: the last one carries it.
            self._spent_ns.extend(array("q", [device.compute_ns]) * missing)
        else:
            self._spent_ns[-1] = device.compute_ns
        if start > self._start:
            del self._spent_ns[: start - self._start]
            self._start = start

    def compute_ns(self, cursor: int, distance: int) -> int:
        """Return the compute between the access at the cursor and one so far behind it; else 0."""
        spent_ns, first = self._spent_ns, cursor - self._start
        if not 0 <= first < len(spent_ns):
            return 0
        return spent_ns[min(first + distance, len(spent_ns) - 1)] - spent_ns[first]

    def slack_ns(
        self,
        device: DeviceSnapshot,
        cursor: int,
        missing: Iterable[Wanted],
        bounds_nbytes: tuple[float, float] = (math.inf, math.inf),
    ) -> float:
        """Return how long the first missing block can wait without a stall; 0 if not at all.

        Parameters
        ----------
        missing : iterable of Wanted
            What has to be copied, in the order of use.
        bounds_nbytes : (float, float), optional
            All of it, and the largest of it, come to no more, decisions included. Where even all
            of it would be copied in time from some point on, what follows is not looked at: the
            answer is the same, or where decisions take time, smaller by the largest copy at most.
        """
        first = cursor - self._start
        if not device.compute_ns or first < 0 or first >= len(self._spent_ns):
            return 0.0
        # A copy takes the room of what was used last: it starts no earlier than compute, which the
        # host has run ahead of, is through with it.
        queued_ns = max(0, device.link_free_ns - max(device.now_ns, device.compute_free_ns))
        slack_ns = math.inf
        link_ns = largest_ns = 0.0
        all_ns, one_ns = (nbytes / device.h2d_bytes_per_s * 1e9 for nbytes in bounds_nbytes)
        spent_ns, last = self._spent_ns, len(self._spent_ns) - 1
        for distance, _, nbytes in missing:
            index = first + distance
            due_ns = spent_ns[index if index < last else last] - spent_ns[first]
            copy_ns = (nbytes + device.decision_nbytes) / device.h2d_bytes_per_s * 1e9
            link_ns += copy_ns
            if copy_ns > largest_ns:
                largest_ns = copy_ns
            sure_ns = due_ns * (1 - MARGIN_SHARE)
            if sure_ns - queued_ns - link_ns < slack_ns:
                slack_ns = sure_ns - queued_ns - link_ns
            if slack_ns <= 2 * largest_ns:
                return 0.0  # what is missing later can only make it less
            if sure_ns - queued_ns - all_ns > slack_ns:
                if device.decision_nbytes:
                    largest_ns = max(largest_ns, one_ns)
                if largest_ns >= one_ns:
                    break  # what is missing later is due later, and can not
        return slack_ns - 2 * largest_ns if link_ns else 0.0
