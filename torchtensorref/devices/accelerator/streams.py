"""The streams that a program computes on: one, until it uses more."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ...base import forking

if TYPE_CHECKING:
    from .vendor import Vendor

__all__ = ["ComputeStreams", "note_streams"]


class ComputeStreams:
    """What of a device a program computes on, so that copies keep clear of all of it.

    Notes
    -----
    Operators of one thread go to its current stream. Whoever evicts may be another thread, with
    another stream, on which nothing runs: what was issued so far is therefore asked of the streams
    that operators were seen on. Streams are seen before operators on the slow path, and whenever a
    program makes another one current (a patch of `set_stream`), so before the ready path uses it.

    With one stream, its own order is all there is. From the second on, a stream that is seen first
    waits for the others once, since it missed the copies they have waited for; copies that arrive
    later hold all of them back; and what is freed is freed for all.
    """

    def __init__(self, vendor: Vendor) -> None:
        self._vendor = vendor
        self._lock = forking.RLock()
        self._seen: list[Any] = []
        self._last: Any = None  # its number is compared, which costs no object of torch's
        self._join: Any = None
        if vendor.has_streams:
            _followers.add(self)

    def note(self) -> None:
        """See the current stream of this thread."""
        number = self._vendor.current_stream_number()
        if number != self._last and not self._vendor.is_on_side_stream:
            self._note(number)

    def _note(self, number: Any) -> None:
        stream = self._vendor.current_stream()
        with self._lock:
            if stream not in self._seen:
                default = None if self._seen else self._vendor.default_stream()
                if default is not None and default != stream:
                    self._seen.append(default)  # other threads are on it until they say otherwise
                for other in self._seen:
                    stream.wait_event(self._vendor.record(other))
                self._seen.append(stream)
            self._last = number

    @property
    def are_several(self) -> bool:
        """Whether operators ran on more than one stream."""
        return len(self._seen) > 1

    def record(self) -> Any:
        """Make an event at the end of all that compute was given so far."""
        with self._lock:
            if not self._seen:
                return self._vendor.record(self._vendor.current_stream())
            if len(self._seen) == 1:
                return self._vendor.record(self._seen[0])
            if self._join is None:
                self._join = self._vendor.new_stream()
            for stream in self._seen:
                self._join.wait_event(self._vendor.record(stream))
            return self._vendor.record(self._join)

    def hold_back(self, event: Any) -> None:
        """Let operators that are issued from now on wait for an event of the device."""
        with self._lock:
            if not self._seen:
                self.note()
            for stream in self._seen:
                stream.wait_event(event)

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
        follower.note()
