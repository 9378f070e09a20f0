"""How many copies are queued ahead of need: the fewer, the less is given up for them.

What is queued has room that nothing else has, so that a longer queue means more bytes for each
period. A shorter one means that something has to be decided more often, and that the link idles
while the host is busy with that, or with the program. So the queue may take a share of the budget
that grows with how much the link idles: bytes are cheap then, and the host's time is not.
"""

from __future__ import annotations

from ...strategy import DeviceSnapshot

MIB = 2**20

#: Copies queued ahead of need: the first always may, others while they are small.
QUEUE_COUNT = 4
QUEUE_NBYTES = 256 * MIB
QUEUE_SHARE = 1 / 64
#: While the host computes, or small blocks are heard of together, it may be longer.
LONG_QUEUE_COUNT = 16
LONG_QUEUE_SHARE = 1 / 8
#: This part of the time that the link idles, as a share of the budget, up to a most.
SHARE_OF_IDLE = 1 / 2
MOST_OF_IDLE = 1 / 16
#: What counts as small then is at the most so many times what does where the link is busy.
MOST_BRIEF = 16
#: How much it idles is seen once in so many accesses, and this part of a change is believed.
SEEN_EVERY = 64
BELIEVED = 1 / 4
#: Longer by this factor, it may be of as many copies.
GROWN = 5 / 4


class LinkQueue:
    """What may be on its way to the device and has not been asked for yet.

    Parameters
    ----------
    count : int
        The most copies in flight, unless the link idles or small blocks are heard of together.

    Attributes
    ----------
    is_brief : bool
        Several uses are heard of at once: more has to be there before.
    next_nbytes : int
        Size of what comes next, if it did not fit into the queue; else 0.
    """

    def __init__(self, count: int = QUEUE_COUNT) -> None:
        self._least_count = count
        self.is_brief = False
        self.next_nbytes = 0
        self._share = QUEUE_SHARE
        self._idle_nbytes = 0.0  # what the link could have copied besides, by use
        self._seen_at = self._seen_ns = self._moved_nbytes = 0

    def moved(self, nbytes: int) -> None:
        """Note a copy to the device."""
        self._moved_nbytes += nbytes

    def look_at(self, device: DeviceSnapshot, end: int) -> None:
        """See now and then how much the link idles, where the device has no clock of its own."""
        if device.knows_compute_end:
            self._share, self._idle_nbytes = QUEUE_SHARE, 0.0  # what was seen was another's link
            return
        if end < self._seen_at + SEEN_EVERY:
            return
        took_ns = device.now_ns - self._seen_ns
        if self._seen_at and took_ns > 0:
            idle_ns = max(0.0, took_ns - self._moved_nbytes / device.h2d_bytes_per_s * 1e9)
            share = min(MOST_OF_IDLE, idle_ns / took_ns * SHARE_OF_IDLE)
            self._share += (max(QUEUE_SHARE, share) - self._share) * BELIEVED
            idle_nbytes = idle_ns / (end - self._seen_at) * device.h2d_bytes_per_s / 1e9
            idle_nbytes = min(idle_nbytes, MOST_BRIEF * device.decision_nbytes)
            self._idle_nbytes += (idle_nbytes - self._idle_nbytes) * BELIEVED
        self._seen_at, self._seen_ns, self._moved_nbytes = end, device.now_ns, 0

    def brief_nbytes(self, device: DeviceSnapshot) -> float:
        """Return up to what size blocks are small: not worth a decision about each."""
        return max(device.decision_nbytes, self._idle_nbytes)

    @property
    def count(self) -> int:
        """The most copies in flight."""
        is_long = self.is_brief or self._share > QUEUE_SHARE * GROWN
        return max(LONG_QUEUE_COUNT, self._least_count) if is_long else self._least_count

    def nbytes(self, device: DeviceSnapshot) -> float:
        """Return the most bytes in flight, but for one copy that always may be."""
        nbytes = device.limit_nbytes * self._share
        if self.is_brief:  # no more than the link copies meanwhile
            meanwhile_nbytes = LONG_QUEUE_COUNT * self.brief_nbytes(device)
            nbytes = max(nbytes, min(device.limit_nbytes * LONG_QUEUE_SHARE, meanwhile_nbytes))
        return min(QUEUE_NBYTES, nbytes)

    def is_open(self, device: DeviceSnapshot) -> bool:
        """Whether another copy may be queued."""
        if not device.in_flight_count:
            return True
        left_nbytes = self.nbytes(device) - device.in_flight_nbytes
        return device.in_flight_count < self.count and 0 < left_nbytes >= self.next_nbytes

    def busy_ns(self, device: DeviceSnapshot) -> float:
        """Return how long the link will need for half of what is queued, in ns."""
        return device.in_flight_nbytes / device.h2d_bytes_per_s * 1e9 / 2
