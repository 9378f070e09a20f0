"""The copies of a real accelerator: from page-locked memory at once, from other memory staged."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ...base.errors import TransferError
from ...base.options import settings
from ..base import DONE, Device, Event, bytes_of, move_bytes
from ..host.limits import share_of_ram
from ..host.page_lock import Locker, PageLocks, RegisteringLocker, TorchLocker
from ..host.page_locked_pool import HomePool
from ..host.readers import home_bytes
from .events import AcceleratorEvent, StagedEvent
from .staging import Copier, StagedCopy, StagingRing
from .vendor import Vendor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AcceleratorCopies", "StreamLane"]

#: Smaller sources are not worth a staging buffer.
STAGED_FROM_NBYTES = 64 << 10


class StreamLane:
    """One direction of the link: a stream, and copies on it."""

    def __init__(self, vendor: Vendor) -> None:
        self._vendor = vendor
        self.stream: Any = vendor.new_stream()

    def hold_back(self, event: Any) -> None:
        """Let the stream wait for an event of the device."""
        self.stream.wait_event(event)

    def issue(self, source: Tensor, destination: Tensor) -> Any:
        """Issue a copy; return its event."""
        with self._vendor.on(self.stream):
            move_bytes(source, destination, non_blocking=True)
            return self._vendor.record(self.stream)


class AcceleratorCopies(Device):
    """The part of a real accelerator that copies. `AcceleratorDevice` has the docs."""

    vendor: Vendor
    #: What is page-locked for this device.
    page_locks: PageLocks
    _lock: threading.RLock
    #: Copies that may still run, with the bases they touch; see `_retire`.
    _in_flight: deque[tuple[int, Event]]

    def _open_copies(self) -> None:
        """Make what copies need; no thread is started and no memory page-locked yet."""
        self._in_flight = deque()
        self.page_locks = PageLocks(self._locker(), share_of_ram(settings.page_lock))
        self._homes = HomePool(self.page_locks)
        if not self.vendor.has_streams:
            return
        self.in_lane, self.out_lane = self._new_lane(), self._new_lane()
        copier, make_slot = Copier(), self.page_locks.allocate
        self._in_ring = StagingRing(self.in_lane, into=True, make_slot=make_slot, copier=copier)
        self._out_ring = StagingRing(self.out_lane, into=False, make_slot=make_slot, copier=copier)

    def _new_lane(self) -> StreamLane:
        return StreamLane(self.vendor)

    def _locker(self) -> Locker | None:
        if not self.vendor.has_streams:
            return None  # copies are in the order of compute anyway
        runtime = self.vendor.host_runtime()
        return TorchLocker() if runtime is None else RegisteringLocker(runtime)

    def compute_stream(self) -> Any:
        """The stream that operators of this thread go to."""
        return self.vendor.current_stream()

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        target = bytes_of(base)
        self._check_sizes(source, target, "cpu", self.name)
        if not self.vendor.has_streams:
            return self._copy_in_order(source, target, after)
        waits = self._events_of(after)
        mirror = home_bytes.mirror(source)
        if mirror is not None:
            return self._keep(base, self._issue(self.in_lane, mirror, target, waits))
        if source.numel() < STAGED_FROM_NBYTES:
            # A copy of its own: nobody has to be careful with the source then.
            return self._keep(base, self._issue(self.in_lane, source.clone(), target, waits))
        event: AcceleratorEvent | StagedEvent
        if self._is_page_locked(source):
            event = self._issue(self.in_lane, source, target, waits)
        else:
            event = self._stage_in(source, target, waits)
        home_bytes.note_reader(source, event)
        return self._keep(base, event)

    def copy_out(self, base: Tensor, destination: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        source = bytes_of(base)
        self._check_sizes(source, destination, self.name, "cpu")
        if not self.vendor.has_streams:
            return self._copy_in_order(source, destination, after)
        # Without an order of the caller's, what compute was given so far may write these bytes.
        waits = self._events_of(self.record() if after is None else after)
        home_bytes.about_to_be_filled(destination, self)
        if self._is_page_locked(destination):
            return self._keep(base, self._issue(self.out_lane, source, destination, waits))
        # Also small ones: into pageable memory the driver would make the host wait for compute.
        copy = StagedCopy(source, destination, waits)
        return self._keep(base, StagedEvent(self._out_ring.submit(copy), self))

    def _stage_in(self, source: Tensor, target: Tensor, waits: tuple[Any, ...]) -> StagedEvent:
        mirror = self.page_locks.take_prepared(source)
        when_filled = None
        if mirror is not None:
            when_filled = functools.partial(home_bytes.set_mirror, source, mirror)
        copy = StagedCopy(source, target, waits, mirror=mirror, when_filled=when_filled)
        return StagedEvent(self._in_ring.submit(copy), self)

    def _issue(
        self, lane: StreamLane, source: Tensor, destination: Tensor, waits: tuple[Any, ...]
    ) -> AcceleratorEvent:
        """Copy on a side stream; the event holds both ends until it is seen to have fired."""
        for event in waits:
            lane.hold_back(event)
        return AcceleratorEvent(lane.issue(source, destination), self, (source, destination))

    def _is_page_locked(self, memory: Tensor) -> bool:
        return self.page_locks.is_locked(memory) or memory.is_pinned()

    def home_memory(self, nbytes: int) -> Tensor | None:
        """Page-locked memory for what is about to be copied home, if there is some ready."""
        return self._homes.take(nbytes) if self.vendor.has_streams else None

    def wish_page_locked(self, base: Tensor, *, may_mirror: bool) -> None:
        """Note that a block was copied from home; if it recurs, its memory is page-locked."""
        if self.vendor.has_streams and not self._is_page_locked(bytes_of(base)):
            self.page_locks.wish(base, may_mirror=may_mirror)

    @property
    def page_locked_nbytes(self) -> int:
        """Host memory that is page-locked for this device."""
        return self.page_locks.locked_nbytes

    @staticmethod
    def _events_of(event: Event | None) -> tuple[Any, ...]:
        """What a stream has to wait for; what is not of a stream is waited for here."""
        if event is None:
            return ()
        events = getattr(event, "events", None)
        if events is None:
            event.synchronize()
            return ()
        return tuple(events)

    def _keep(self, base: Tensor, event: Event) -> Event:
        """Hold a copy's ends until it has fired, even if the caller forgets its event."""
        with self._lock:
            self._retire()
            self._in_flight.append((id(base), event))
        return event

    def _retire(self) -> None:
        """Let go of the copies that have fired."""
        in_flight = self._in_flight
        for _ in range(len(in_flight)):
            entry = in_flight.popleft()
            if not entry[1].is_done():
                in_flight.append(entry)

    def _copy_in_order(self, source: Tensor, destination: Tensor, after: Event | None) -> Event:
        if after is not None:
            after.synchronize()
        move_bytes(source, destination)
        return DONE

    @staticmethod
    def _check_sizes(source: Tensor, destination: Tensor, here: str, there: str) -> None:
        nbytes = source.numel() * source.element_size()
        wanted = destination.numel() * destination.element_size()
        if nbytes != wanted:
            raise TransferError(
                f"A copy from {here} to {there} has {nbytes:,} bytes to give and room for "
                f"{wanted:,}; nothing was copied.",
                source=here,
                destination=there,
                nbytes=nbytes,
            )
