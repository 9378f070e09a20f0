"""Copies that were issued ahead of need and that nobody has seen arrive."""

from __future__ import annotations

import weakref
from collections import deque

from ..devices.base import Device, Event
from .block import Replica
from .states import FILLING

#: A replica, and the number of the operator that ran when its copy was issued.
_Issued = tuple[weakref.ref[Replica], int]


class InFlight:
    """The replicas that copies issued ahead will fill, by device (lock of the books held).

    Weak: what the program has let go of must not be held by its own copy.
    """

    def __init__(self) -> None:
        self._coming: dict[Device, list[_Issued]] = {}
        self._arrived: deque[_Issued] = deque()

    def add(self, replica: Replica, tick: int) -> None:
        """Note a replica whose copy was issued while an operator of that number ran."""
        self._coming.setdefault(replica.device, []).append((weakref.ref(replica), tick))

    def later_than(self, device: Device, reached_ns: int) -> list[Replica]:
        """Return what will have arrived on a device only later than that."""
        coming = self._coming.get(device, ())
        if not coming:
            return []
        later: list[Replica] = []
        left: list[_Issued] = []
        for issued in coming:
            replica = issued[0]()
            if replica is None or replica.state is not FILLING:
                continue  # somebody has seen it arrive
            if replica.arrival is None or _ends_after(replica.arrival, reached_ns):
                later.append(replica)
                left.append(issued)
            else:
                self._arrived.append(issued)
        self._coming[device] = left
        return later

    def unused_since(self, tick: int) -> list[Replica]:
        """Return what was issued before an operator, has arrived, and was not used; forget it."""
        unused: list[Replica] = []
        while self._arrived and self._arrived[0][1] < tick:
            replica = self._arrived.popleft()[0]()
            if replica is not None and replica.state is FILLING and replica.arrival is not None:
                unused.append(replica)
        return unused


def _ends_after(arrival: Event, reached_ns: int) -> bool:
    """Whether a copy ends later than that, by its clock or by asking it."""
    return arrival.end_ns > reached_ns if arrival.end_ns else not arrival.is_done()
