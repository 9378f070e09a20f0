"""The events of a real accelerator: of copies issued at once, of staged ones, of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ...base.errors import TransferError

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Event
    from .staging import StagedCopy

__all__ = ["AcceleratorEvent", "AllOf", "EventStopwatch", "StagedEvent", "Waits", "events_of"]


class Waits(Protocol):
    """What events need of their device: to hold compute back, and a count of the host's waiting."""

    stall_ns: int

    def hold_compute_back(self, event: Any) -> None:
        """Let operators that are issued from now on wait for an event of the device module."""
        ...


def events_of(event: Event | None) -> tuple[Any, ...]:
    """What a stream has to wait for; what is not of a stream is waited for here."""
    if event is None:
        return ()
    events = getattr(event, "events", None)
    if events is None:
        event.synchronize()
        return ()
    return tuple(events)


class AcceleratorEvent:
    """An event of torch's device module, and what has to live until it fires.

    Notes
    -----
    A copy on a side stream uses memory that the allocator believes to be used by another stream
    only. Holding both ends of the copy here, until it is seen to have fired, takes the place of
    `record_stream`, which would delay every reuse. The device keeps the event as long.
    """

    start_ns = end_ns = 0

    def __init__(self, event: Any, device: Waits, held: tuple[Tensor, ...] = ()) -> None:
        self.event = event
        self.device = device
        self._held = held

    @property
    def events(self) -> tuple[Any, ...]:
        """The events of the device module that a stream has to wait for."""
        return (self.event,)

    def is_done(self) -> bool:
        """Whether it has fired. Never blocks."""
        done = bool(self.event.query())
        if done:
            self._held = ()
        return done

    def wait(self) -> None:
        """Make the compute stream wait for it."""
        self.device.hold_compute_back(self.event)

    def synchronize(self) -> None:
        """Make the host wait for it; the time counts as a stall."""
        began_ns = time.perf_counter_ns()
        self.event.synchronize()
        self.device.stall_ns += time.perf_counter_ns() - began_ns
        self._held = ()

    # A copy out of page-locked memory reads its source until the end.
    has_read = is_done
    finish_reading = synchronize


class EventStopwatch:
    """A pair of events on compute's stream, between which the time is known once both have fired.

    Parameters
    ----------
    began, ended : Any
        Events of the device module that keep the time.
    stream : Any
        The stream that operators of this thread go to.
    """

    def __init__(self, began: Any, ended: Any, stream: Any) -> None:
        self._began, self._ended, self._stream = began, ended, stream
        began.record(stream)

    def stop(self) -> None:
        """Record the second event; nobody waits for it."""
        self._ended.record(self._stream)

    def took_ns(self) -> int | None:
        """How long it took; None while the second event has not fired."""
        if not self._ended.query():
            return None
        return int(self._began.elapsed_time(self._ended) * 1e6)


class StagedEvent:
    """The event of a copy through the staging buffers, which a thread issues slice by slice.

    Notes
    -----
    A stream can only wait for what has been issued. So `wait` waits, on the host, until the last
    slice is under way: never long for a copy that was issued ahead, and as long as the host needs
    to read the source for one that was not.
    """

    start_ns = end_ns = 0

    def __init__(self, copy: StagedCopy, device: Waits) -> None:
        self._copy: StagedCopy | None = copy
        self.device = device

    @property
    def events(self) -> tuple[Any, ...]:
        """The events of the device module that a stream has to wait for, once it is issued."""
        copy = self._copy
        if copy is None:
            return ()
        self._join(copy)
        return () if copy.last is None else (copy.last,)

    def is_done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        copy = self._copy
        if copy is None:
            return True
        if not copy.landed.is_set():
            return False
        if copy.error is not None:
            return True  # `wait` and `synchronize` raise it
        if copy.last is not None and not copy.last.query():
            return False
        self._copy = None
        return True

    def wait(self) -> None:
        """Make the compute stream wait for it."""
        for event in self.events:
            self.device.hold_compute_back(event)

    def synchronize(self) -> None:
        """Make the host wait for it; the time counts as a stall."""
        copy = self._copy
        if copy is None:
            return
        began_ns = time.perf_counter_ns()
        copy.landed.wait()
        copy.join()
        if copy.last is not None:
            copy.last.synchronize()
        self.device.stall_ns += time.perf_counter_ns() - began_ns
        self._copy = None

    def has_read(self) -> bool:
        """Whether the source has been read into the staging buffers."""
        copy = self._copy
        return copy is None or copy.issued.is_set()

    def finish_reading(self) -> None:
        """Make the host wait until the source has been read."""
        copy = self._copy
        if copy is not None:
            copy.issued.wait()

    def finish_issue(self) -> None:
        """Make the host wait until the last slice is under way: then a stream can be told to wait.

        Raises
        ------
        TransferError
            The copy failed.
        """
        copy = self._copy
        if copy is not None:
            self._join(copy)

    def _join(self, copy: StagedCopy) -> None:
        if copy.issued.is_set() and copy.error is None:
            return
        began_ns = time.perf_counter_ns()
        copy.join()
        self.device.stall_ns += time.perf_counter_ns() - began_ns


class UntilItEnds:
    """A staged copy as a reader of the mirror that it fills: its slices are copied from there."""

    def __init__(self, event: StagedEvent) -> None:
        self._event = event
        self.device = event.device

    def has_read(self) -> bool:
        """Whether it needs the mirror no more."""
        return self._event.is_done()

    def finish_reading(self) -> None:
        """Make the host wait until it does not; one that has failed does not either."""
        with suppress(TransferError):
            self._event.synchronize()


class AllOf:
    """Several events of the device module as one."""

    start_ns = end_ns = 0

    def __init__(self, events: Sequence[Any], device: Waits) -> None:
        self.events = tuple(events)
        self.device = device

    def is_done(self) -> bool:
        """Whether all have fired. Never blocks."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Make the compute stream wait for all."""
        for event in self.events:
            self.device.hold_compute_back(event)

    def synchronize(self) -> None:
        """Make the host wait for all."""
        for event in self.events:
            event.synchronize()
