"""The streams that a program computes on: one, until it uses more."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .vendor import Vendor

__all__ = [
    "ComputeStreams",
    "begin_capture",
    "captures_under_way",
    "end_capture",
    "note_streams",
]

#: One for each graph of kernels that the program is capturing.
captures_under_way: list[None] = []

_log = logging.getLogger("torchTensorRef")


def is_of_others(stream: Any) -> bool:
    """Whether another library has made a stream, which may destroy it once nobody is on it.

    `current_stream` says nothing of `ExternalStream`. But torch numbers its own streams, and the
    number of another one is its handle.
    """
    handle = getattr(stream, "cuda_stream", 0) or getattr(stream, "sycl_queue", 0)
    return bool(handle) and getattr(stream, "stream_id", None) == handle


class _Place:
    """The stream that a thread is on, as far as is known; it goes with the thread."""

    stream: Any = None
    number: Any = None


class ComputeStreams:
    """What of a device a program computes on, so that copies keep clear of all of it.

    Parameters
    ----------
    vendor : Vendor
        Has the streams, and the thread's current one.
    lock : threading.RLock
        The device's: under it replicas get their bytes and lose them.

    Notes
    -----
    Operators of one thread go to its current stream. Whoever evicts may be another thread, with
    another stream, on which nothing runs: what was issued so far is therefore asked of the streams
    that operators were seen on. Streams are seen before operators on the slow path, and whenever a
    program makes another one current (a patch of `set_stream`), so before the ready path uses it.

    With one stream, its own order is all there is. From the second on, a stream that is seen first
    waits for the others once, since it missed the copies they have waited for; copies that arrive
    later hold all of them back; and what is freed is freed for all.

    A stream of another library (`torch.cuda.ExternalStream`: CuPy, RAPIDS) lives as long as a
    thread is on it, and no longer. So it is followed until the last thread leaves it: then an event
    takes its place, and no stream of the program waits for that by itself. Who comes to it again
    waits for the others once more.

    A replica in a pool of compute's (`keep`) belongs to the stream of whoever has fetched it. When
    it dies torch gives its bytes out again in that stream's order; so torch is told of all streams
    that may read it (`record_stream`), of those that come later, too. Not of those of others, which
    may be gone by then: who leaves one has all streams wait for it.

    Nor may a stream be followed while it captures a graph: an event that another thread records on
    it is part of the capture, and draws in who waits for it. It is followed again from the end on.
    """

    def __init__(self, vendor: Vendor, lock: threading.RLock) -> None:
        self._vendor = vendor
        self._lock = lock
        self._seen: list[Any] = []
        self._last: Any = None  # its number is compared, which costs no object of torch's
        self._join: Any = None
        self._here = threading.local()
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        #: What streams that were left may still do: the last event of each, until it has fired.
        self._left: list[Any] = []
        #: Replicas in pools of compute's, by their id.
        self._kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        if vendor.has_streams:
            _followers.add(self)

    def note(self) -> None:
        """See the current stream of this thread."""
        number = self._vendor.current_stream_number()
        if number != self._last and not self._vendor.is_on_side_stream:
            self._note(number)

    def follow(self) -> None:
        """See the current stream of this thread, and that it has left the one before."""
        if self._vendor.is_on_side_stream:
            return
        number = self._vendor.current_stream_number()
        place = getattr(self._here, "place", None)
        if place is None or (number, number) != (self._last, place.number):
            self._note(number)

    def _note(self, number: Any) -> None:
        if captures_under_way and self._vendor.is_capturing():
            return
        stream = self._vendor.current_stream()
        with self._lock:
            if stream not in self._seen:
                default = None if self._seen else self._vendor.default_stream()
                if default is not None and default != stream:
                    self._add(default)  # other threads are on it until they say otherwise
                self._each(lambda other: stream.wait_event(self._vendor.record(other)))
                self._add(stream)
            self._last = number
            self._move_to(stream, number)

    def _add(self, stream: Any) -> None:
        self._seen.append(stream)
        if not is_of_others(stream):
            for base in list(self._kept.values()):
                self._vendor.record_use(base, stream)

    def keep(self, base: Tensor) -> None:
        """Have torch keep a base's bytes, which it has just allocated, for all streams (locked)."""
        self.note()
        self._kept[id(base)] = base
        here = self._vendor.current_stream()
        for stream in self._seen:
            if stream != here and not is_of_others(stream):
                self._vendor.record_use(base, stream)

    def _move_to(self, stream: Any, number: Any) -> None:
        """Note where this thread is (lock held)."""
        place = getattr(self._here, "place", None)
        if place is None:
            place = self._here.place = _Place()
            self._places.add(place)
        before, place.stream, place.number = place.stream, stream, number
        if before not in self._seen or not is_of_others(before):
            return
        if all(other.stream != before for other in self._places):
            self._leave(before)

    def _leave(self, stream: Any) -> None:
        """Let go of a stream; an event says when it has done what it was given."""
        try:
            event = self._vendor.record(stream)
        except RuntimeError as error:
            self._drop(stream, error)
            return
        self._seen.remove(stream)
        self._left = [*self._unfired(), event]
        if self._kept:
            self._each(lambda other: other.wait_event(event))

    def _unfired(self) -> list[Any]:
        if captures_under_way:
            return self._left  # to ask an event would spoil them
        return [event for event in self._left if not event.query()]

    def begin_capture(self) -> None:
        """Follow this thread's stream no more; events say what all were given until now."""
        with self._lock:
            self.note()
            if self._join is None:
                self._join = self._vendor.new_stream()
            events: list[Any] = []
            self._each(lambda stream: events.append(self._vendor.record(stream)))
            self._left = [*self._unfired(), *events]
            self._forget([self._vendor.current_stream()])

    def _forget(self, streams: list[Any]) -> None:
        self._seen = [stream for stream in self._seen if stream not in streams]
        self._last = None

    def _each(self, act: Callable[[Any], None]) -> None:
        """Do something with each stream that is followed (lock held).

        One of others may have been destroyed while a thread was on it.
        """
        for stream in list(self._seen):
            try:
                if captures_under_way and self._vendor.is_capturing(stream):
                    self._forget([stream])
                else:
                    act(stream)
            except RuntimeError as error:
                if not is_of_others(stream) or len(self._seen) == 1:
                    raise
                self._drop(stream, error)

    def _drop(self, stream: Any, error: RuntimeError) -> None:
        """Forget a stream that no event can be asked of: the host waits for what it was given."""
        self._forget([stream])
        self._vendor.synchronize()
        _log.warning(
            "torchTensorRef: a stream of another library is followed no more (%s). It was "
            "destroyed while a thread was on it, or had ended on it.",
            error,
        )

    @property
    def are_several(self) -> bool:
        """Whether operators ran on more than one stream."""
        return len(self._seen) > 1 or bool(self._left)

    def record(self) -> Any:
        """Make an event at the end of all that compute was given so far."""
        with self._lock:
            if not captures_under_way:
                self._left = self._unfired()
                if not self.are_several:
                    alone = self._seen[0] if self._seen else self._vendor.current_stream()
                    return self._vendor.record(alone)
            if self._join is None:
                self._join = self._vendor.new_stream()
            self._each(lambda stream: self._join.wait_event(self._vendor.record(stream)))
            for event in self._left:
                self._join.wait_event(event)
            return self._vendor.record(self._join)

    def hold_back(self, event: Any) -> None:
        """Let operators that are issued from now on wait for an event of the device."""
        with self._lock:
            if not self._seen:
                self.note()
            self._each(lambda stream: stream.wait_event(event))

    def fence(self) -> None:
        """Let each stream wait for the others: what one of them frees, another may still use."""
        if self.are_several:
            with self._lock:
                self.hold_back(self.record())

    def current(self) -> Any:
        """The stream that operators of this thread go to."""
        return self._vendor.current_stream()


#: Those that follow what streams a program makes current.
_followers: weakref.WeakSet[ComputeStreams] = weakref.WeakSet()


def note_streams() -> None:
    """A program has made another stream current in this thread."""
    for follower in list(_followers):
        follower.follow()


def begin_capture() -> None:
    """A program is about to capture a graph of kernels on this thread's stream."""
    for follower in list(_followers):
        follower.begin_capture()
    captures_under_way.append(None)


def end_capture() -> None:
    """It has ended: what this thread issues runs at once again."""
    if captures_under_way:
        captures_under_way.pop()
    note_streams()
