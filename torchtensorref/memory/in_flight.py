"""Copies that were issued ahead of need and that nobody has seen arrive."""

from __future__ import annotations

import weakref

from ..devices.base import Device, Event
from .block import Replica
from .states import FILLING


class InFlight:
    """The replicas that copies issued ahead will fill, by device (lock of the books held).

    Weak: what the program has let go of must not be held by its own copy.
    """

    def __init__(self) -> None:
        self._coming: dict[Device, list[weakref.ref[Replica]]] = {}

    def add(self, replica: Replica) -> None:
        """Note a replica whose copy was issued."""
        self._coming.setdefault(replica.device, []).append(weakref.ref(replica))

    def later_than(self, device: Device, reached_ns: int) -> list[Replica]:
        """Return what will have arrived on a device only later than that; forget the others."""
        coming = self._coming.get(device, ())
        if not coming:
            return []
        left = [
            replica
            for reference in coming
            if (replica := reference()) is not None
            and replica.state is FILLING
            and (replica.arrival is None or _ends_after(replica.arrival, reached_ns))
        ]
        self._coming[device] = [weakref.ref(replica) for replica in left]
        return left


def _ends_after(arrival: Event, reached_ns: int) -> bool:
    """Whether a copy ends later than that, by its clock or by asking it."""
    return arrival.end_ns > reached_ns if arrival.end_ns else not arrival.is_done()
