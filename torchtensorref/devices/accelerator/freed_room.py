"""When the room of an evicted replica may be written again, to the last reader and not later."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["FreedRoom", "UseMarks"]

#: Torch's allocators give room out in multiples of this.
GRAIN_NBYTES = 512


class UseMarks:
    """Events of the compute stream, in their order, and a number for each moment between them.

    Notes
    -----
    `mark` is the number of the next event. Read after a kernel was issued, it says that every
    event from that number on fires after the kernel. So the last use of a replica costs one
    integer, and an event is recorded only when a copy has to wait.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record
        self._events: deque[Any] = deque()
        self._first = 0  # the number of the oldest event kept; those before it have fired
        self.mark = 0

    def now(self) -> Any:
        """Record an event at the end of what compute was given so far."""
        # Before recording: a use noted meanwhile may come after this event, and waits for the next.
        self.mark += 1
        event = self._record()
        self._events.append(event)
        while self._events[0].query() and len(self._events) > 1:
            self._events.popleft()
            self._first += 1
        return event

    def after(self, mark: int) -> Any | None:
        """Return the first event recorded after `mark` was read; None if such a one has fired."""
        if mark < self._first:
            return None
        if mark >= self.mark:
            return self.now()
        return self._events[mark - self._first]

    def __len__(self) -> int:
        return len(self._events)


class FreedRoom:
    """The room that only copies take: what was freed there, and what each part waits for.

    Notes
    -----
    Torch's allocator has one pool of room per stream. Nothing but fetched replicas is allocated on
    the copy stream, so room of that pool can only have been used by a replica that is known; its
    last users are the events kept here. What is not covered (fresh from the driver, or of a replica
    that died with its TensorRef) has unknown users.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, tuple[Any, ...]]] = []  # stop, events

    def free(self, start: int, nbytes: int, events: tuple[Any, ...]) -> None:
        """Note that a range was freed, to be written once the events have fired."""
        stop = start + _in_grains(nbytes)
        at = bisect_left(self._starts, start)
        if not self._is_apart(at, start, stop):
            self.take(start, nbytes)
            at = bisect_left(self._starts, start)
        if at and self._pieces[at - 1] == (start, events):
            self._pieces[at - 1] = (stop, events)  # grows the range before it
            return
        self._starts.insert(at, start)
        self._pieces.insert(at, (stop, events))

    def take(self, start: int, nbytes: int) -> tuple[list[Any], bool]:
        """Take a range out that was allocated.

        Returns
        -------
        list of events
            What to wait for before it is written.
        bool
            Whether they are all: False if part of the range may have unknown users.
        """
        stop = start + _in_grains(nbytes)
        at = bisect_left(self._starts, start)
        if self._starts[at : at + 1] == [start] and self._pieces[at][0] == stop:  # as it was freed
            del self._starts[at]
            return list(self._pieces.pop(at)[1]), True
        if at and self._pieces[at - 1][0] > start:
            at -= 1
        first, reached = at, start
        events: list[Any] = []
        rest: list[tuple[int, tuple[int, tuple[Any, ...]]]] = []
        is_covered = True
        while at < len(self._starts) and self._starts[at] < stop:
            begin, (end, waits) = self._starts[at], self._pieces[at]
            is_covered = is_covered and begin <= reached
            reached = max(reached, end)
            events += [event for event in waits if event not in events]
            if begin < start:
                rest.append((begin, (start, waits)))
            if end > stop:
                rest.append((stop, (end, waits)))
            at += 1
        self._starts[first:at] = [begin for begin, _ in rest]
        self._pieces[first:at] = [piece for _, piece in rest]
        return events, is_covered and reached >= stop

    def _is_apart(self, at: int, start: int, stop: int) -> bool:
        """Whether a range has no byte of those that stand before and behind a place."""
        begins_after = at == len(self._starts) or self._starts[at] >= stop
        return begins_after and (not at or self._pieces[at - 1][0] <= start)

    def settle(self) -> None:
        """Forget events that have fired, and join what waits for nothing any more."""
        starts, pieces = self._starts, self._pieces
        self._starts, self._pieces = [], []
        for start, (stop, events) in zip(starts, pieces, strict=True):
            left = tuple(event for event in events if not event.query())
            if self._pieces and self._pieces[-1] == (start, left):
                self._pieces[-1] = (stop, left)
            else:
                self._starts.append(start)
                self._pieces.append((stop, left))

    def __len__(self) -> int:
        return len(self._starts)


def _in_grains(nbytes: int) -> int:
    return -(-nbytes // GRAIN_NBYTES) * GRAIN_NBYTES
