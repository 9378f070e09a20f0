"""The copies of a real accelerator: from page-locked memory at once, from other memory staged."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...base.errors import TransferError
from ..base import DONE, Event
from ..host.page_lock import PageLocks
from ..host.readers import host_readers
from ..out_of_memory import is_out_of_memory
from ..storages import as_bytes, bytes_of, move_bytes, part_of
from .events import AcceleratorEvent, StagedEvent, UntilItEnds, events_of
from .landing import PIECE_NBYTES, Landing, Pieces
from .link_rate import LinkRate
from .staging import HostCopier, StagedCopy, StagingRing
from .streams import ComputeStreams
from .vendor import Vendor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinkCopier", "StreamLane"]

#: Smaller sources are not worth a staging buffer, nor have they to wait behind those that are:
#: they pass them, on a stream of their own.
STAGED_FROM_NBYTES = 64 << 10


class StreamLane:
    """One direction of the link: a stream, and copies on it.

    Parameters
    ----------
    vendor : Vendor
        Has the streams.
    is_urgent : bool
        Whether its copies are to be preferred, where the vendor has priorities.
    """

    def __init__(self, vendor: Vendor, *, is_urgent: bool = False) -> None:
        self._vendor = vendor
        self.stream: Any = vendor.new_stream(is_urgent=is_urgent)

    def hold_back(self, event: Any) -> None:
        """Let the stream wait for an event of the device."""
        self.stream.wait_event(event)

    def issue(self, source: Tensor, destination: Tensor) -> Any:
        """Issue a copy; return its event."""
        with self._vendor.on(self.stream):
            move_bytes(source, destination, non_blocking=True)
            return self._vendor.record(self.stream, blocking=True)


class Queue(enum.Enum):
    """Copies that end in the order they were given in."""

    IN, URGENT_IN, STAGED_IN, OUT, STAGED_OUT, ACROSS = range(6)

    __hash__ = object.__hash__  # there is one object of each; Python's own takes the name


class CopiesInFlight:
    """Copies that may still run, and what they touch (the device's lock held).

    Notes
    -----
    To ask an event costs a call of the driver, and there can be hundreds. The copies of one queue
    end one after the other, so each look begins with the oldest and stops at the first that runs.
    """

    def __init__(self) -> None:
        self._queues: dict[Queue, deque[tuple[int, Event]]] = {queue: deque() for queue in Queue}
        self._by_key: dict[int, list[Event]] = {}

    def add(self, key: int, event: Event, queue: Queue) -> None:
        """Note a copy behind those of its queue; forget those that have ended."""
        copies = self._queues[queue]
        self._retire(copies)
        self._by_key.setdefault(key, []).append(event)
        copies.append((key, event))

    def forget_ended(self) -> None:
        """Forget the copies that have ended."""
        for copies in self._queues.values():
            self._retire(copies)

    def of(self, key: int) -> list[Event]:
        """Return the copies that run, or may, of what has a key."""
        if key in self._by_key:
            self.forget_ended()
        # After an error one may stand here that is in no queue.
        return [event for event in self._by_key.get(key, ()) if not event.is_done()]

    def all(self) -> list[Event]:
        """Return all that may still run."""
        return [event for copies in self._queues.values() for _, event in copies]

    def _retire(self, copies: deque[tuple[int, Event]]) -> None:
        while copies and copies[0][1].is_done():
            key, event = copies[0]
            left = [other for other in self._by_key.get(key, ()) if other is not event]
            if left:
                self._by_key[key] = left
            else:
                self._by_key.pop(key, None)
            copies.popleft()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


class LinkCopier:
    """Copies between the host and one accelerator.

    Parameters
    ----------
    vendor : Vendor
        Has the accelerator's streams, or none: then copies are in the order of compute.
    page_locks : PageLocks
        What host memory is page-locked for it.
    compute : ComputeStreams
        What operators run on.
    lock : threading.RLock
        The device's: finalizers may run under it and need it.
    new_lane : callable
        Makes one direction of the link.

    Attributes
    ----------
    in_lane, out_lane : StreamLane
        The two directions, where there are streams.
    urgent_lane : StreamLane
        Small copies to the accelerator, which pass those that are queued on `in_lane`.
    stall_ns : int
        How long the host waited for the accelerator's events.
    staged_nbytes : int
        Bytes that went through the staging buffers, to and from the accelerator.

    Notes
    -----
    No thread is started and no memory is page-locked before a copy needs it.

    The two lanes to the accelerator write into one pool of room. Neither waits for the other as
    such: a copy waits for the events of what was in its room before (`after`), which are those of
    readers and of copies that had not ended when it was emptied, on whatever lane they are.
    """

    def __init__(
        self,
        vendor: Vendor,
        page_locks: PageLocks,
        compute: ComputeStreams,
        *,
        lock: threading.RLock,
        new_lane: Callable[..., StreamLane],
    ) -> None:
        self._vendor = vendor
        self._page_locks = page_locks
        self._compute = compute
        self._lock = lock
        self._in_flight = CopiesInFlight()
        self.stall_ns = 0
        self.staged_nbytes = 0
        self.rate_in, self.rate_out = LinkRate(vendor), LinkRate(vendor)
        self._new_lane = new_lane
        if not vendor.has_streams:
            return
        self.in_lane, self.out_lane = new_lane(vendor), new_lane(vendor)
        self.urgent_lane = new_lane(vendor, is_urgent=True)
        copier, make_slot = HostCopier(), page_locks.allocate
        self._pieces = Pieces(make_slot)
        self._in_ring = StagingRing(self.in_lane, into=True, make_slot=make_slot, copier=copier)
        self._out_ring = StagingRing(self.out_lane, into=False, make_slot=make_slot, copier=copier)

    def hold_compute_back(self, event: Any) -> None:
        """Let operators that are issued from now on wait for an event of the device module."""
        self._compute.hold_back(event)

    def copy_in(self, source: Tensor, base: Tensor, after: Event | None) -> Event:
        """Issue a copy to the accelerator, as `Device.copy_in` does."""
        target = as_bytes(base)
        _check_sizes(source, target)
        if not self._vendor.has_streams:
            return self._copy_in_order(source, target, after)
        waits = events_of(after)
        event: AcceleratorEvent | StagedEvent
        mirror = host_readers.mirrors.of(source)
        if source.numel() < STAGED_FROM_NBYTES:
            # From a clone: the source may be written at once.
            memory = source.clone() if mirror is None else mirror.memory
            event = self._issue(self.urgent_lane, memory, target, waits)
            if mirror is not None:
                host_readers.note_reader(memory, event)
            return self._keep(base, event, Queue.URGENT_IN)
        if mirror is not None:
            event = self._issue_timed(self.in_lane, mirror.memory, target, waits, self.rate_in)
            host_readers.note_reader(mirror.memory, event)  # the block may be at home there soon
            return self._keep(base, event, Queue.IN)
        if self.is_page_locked(source):
            event = self._issue_timed(self.in_lane, source, target, waits, self.rate_in)
            queue = Queue.IN
        else:
            event, queue = self._stage_in(source, target, waits), Queue.STAGED_IN
        host_readers.note_reader(source, event)
        return self._keep(base, event, queue, source.nbytes)

    def copy_out(
        self, base: Tensor, destination: Tensor, after: Event | None, start: int | None = None
    ) -> Event:
        """Issue a copy to the host, as `Device.copy_out` does."""
        source = as_bytes(base) if start is None else part_of(base, start, destination.nbytes)
        _check_sizes(source, destination)
        if not self._vendor.has_streams:
            return self._copy_in_order(source, destination, after)
        # Without an order of the caller's, what compute was given so far may write these bytes.
        waits = (self._compute.record(),) if after is None else events_of(after)
        host_readers.about_to_be_filled(destination, self)
        if self.is_page_locked(destination):
            event = self._issue_timed(self.out_lane, source, destination, waits, self.rate_out)
            return self._keep(base, event, Queue.OUT)
        # Into pageable memory the driver would make the host wait for compute.
        piece = self._pieces.take() if source.numel() <= PIECE_NBYTES else None
        if piece is not None:
            return self._keep(base, self._land(source, piece, destination, waits), Queue.OUT)
        copy = StagedCopy(source, destination, waits)
        staged = StagedEvent(self._out_ring.submit(copy), self)
        return self._keep(base, staged, Queue.STAGED_OUT, source.nbytes)

    @functools.cached_property
    def peer_lane(self) -> StreamLane:
        """Copies from other accelerators and to them: made when the first one is."""
        return self._new_lane(self._vendor)

    def copy_across(
        self, giver: LinkCopier, source: Tensor, base: Tensor, after: Event | None
    ) -> Event:
        """Issue a copy from another accelerator, as `Device.copy_across` does."""
        with giver._issuing(source, base):
            waits = (giver._compute.record(), *events_of(after))
            # Torch copies on the stream that the giver is on, and lets the one that we are on wait.
            with giver._vendor.on(giver.peer_lane.stream):
                event = self._issue(self.peer_lane, bytes_of(source), bytes_of(base), waits)
        giver._keep(source, event, Queue.ACROSS)
        return self._keep(base, event, Queue.ACROSS)

    def end_copies_across(self, base: Tensor) -> None:
        """Let compute wait until no other accelerator reads a base."""
        for event in self.copies_of(base):
            if isinstance(event, AcceleratorEvent) and event.device is not self:
                self._compute.hold_back(event.event)

    def _stage_in(self, source: Tensor, target: Tensor, waits: tuple[Any, ...]) -> StagedEvent:
        mirror = host_readers.mirrors.take(source)
        copy = StagedCopy(source, target, waits, mirror=mirror)
        event = StagedEvent(self._in_ring.submit(copy), self)
        if mirror is not None:
            host_readers.note_reader(mirror.memory, UntilItEnds(event))
        return event

    def _issue(
        self, lane: StreamLane, source: Tensor, destination: Tensor, waits: tuple[Any, ...]
    ) -> AcceleratorEvent:
        """Copy on a side stream; the event holds both ends until it is seen to have fired."""
        with self._issuing(source, destination):
            for event in waits:
                lane.hold_back(event)
            return self._given(lane, source, destination)

    def _given(self, lane: StreamLane, source: Tensor, destination: Tensor) -> AcceleratorEvent:
        return AcceleratorEvent(lane.issue(source, destination), self, (source, destination))

    def _issue_timed(
        self,
        lane: StreamLane,
        source: Tensor,
        destination: Tensor,
        waits: tuple[Any, ...],
        rate: LinkRate,
    ) -> AcceleratorEvent:
        """Copy as `_issue` does, and learn from it how fast the link is."""
        with self._issuing(source, destination):
            for event in waits:
                lane.hold_back(event)
            nbytes = source.numel()
            watch = rate.begin(nbytes, lane.stream)
            issued = self._given(lane, source, destination)
            if watch is not None:
                rate.end(nbytes, watch)
            return issued

    def _land(
        self, source: Tensor, piece: Tensor, destination: Tensor, waits: tuple[Any, ...]
    ) -> Landing:
        """Copy home through a piece that was taken for it."""
        try:
            with self._issuing(source, destination):
                for event in waits:
                    self.out_lane.hold_back(event)
                event = self.out_lane.issue(source, piece[: source.numel()])
        except BaseException:
            self._pieces.give_back(piece)
            raise
        return Landing(event, self, source, piece, destination, self._pieces)

    @contextlib.contextmanager
    def _issuing(self, source: Tensor, destination: Tensor) -> Iterator[None]:
        """Say what the driver refuses as a copy that may be tried again, if the device works on.

        A kernel's own error comes at whatever call is next, and at each one from then on.
        """
        try:
            yield
        except RuntimeError as error:
            is_known = isinstance(error, TransferError) or is_out_of_memory(error)
            if is_known or not self._works():
                raise
            nbytes, here, there = source.nbytes, source.device, destination.device
            raise TransferError(
                f"A copy of {nbytes:,} bytes from {here} to {there} failed: {error}. Its source is "
                "untouched.",
                source=str(here),
                destination=str(there),
                nbytes=nbytes,
            ) from error

    def _works(self) -> bool:
        """Whether the device answers, after all that it was given: also what may be under way."""
        try:
            self._vendor.synchronize()
        except RuntimeError:
            return False
        return True

    def is_page_locked(self, memory: Tensor) -> bool:
        """Whether copies from host memory need no staging."""
        return self._page_locks.is_locked(memory) or self._vendor.is_pinned(memory)

    def _keep(self, base: Tensor, event: Event, queue: Queue, nbytes: int = 0) -> Event:
        """Hold a copy's ends until it has fired, even if the caller drops its event."""
        with self._lock:
            self._in_flight.add(id(base), event, queue)
            if queue in (Queue.STAGED_IN, Queue.STAGED_OUT):
                self.staged_nbytes += nbytes
        return event

    def finish(self) -> None:
        """Wait for all copies, and let those home land."""
        with self._lock:
            copies = self._in_flight.all()
        for event in copies:
            with contextlib.suppress(TransferError):  # whoever waits for it is told
                event.synchronize()

    def forget_ended(self) -> None:
        """Let go of the ends of copies that have fired: of dead tensors, they are room."""
        with self._lock:
            self._in_flight.forget_ended()

    def copies_of(self, base: Tensor) -> list[Event]:
        """The copies that may still read or write the bytes of a base."""
        with self._lock:
            return self._in_flight.of(id(base))

    def _copy_in_order(self, source: Tensor, destination: Tensor, after: Event | None) -> Event:
        if after is not None:
            after.synchronize()
        move_bytes(source, destination)
        return DONE


def _check_sizes(source: Tensor, destination: Tensor) -> None:
    if source.nbytes != destination.nbytes:
        here, there = source.device, destination.device
        raise TransferError(
            f"A copy from {here} to {there} has {source.nbytes:,} bytes to give and room for "
            f"{destination.nbytes:,}; nothing was copied.",
            source=str(here),
            destination=str(there),
            nbytes=source.nbytes,
        )
