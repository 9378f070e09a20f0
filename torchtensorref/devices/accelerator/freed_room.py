"""When the room of an evicted replica may be written again, to the last reader and not later.

An error that comes at any line (an interrupt) costs what is known of a range, which counts as used
until now then; so what belongs together is changed in one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import itemgetter
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
        self._events: dict[int, Any] = {}  # by number, oldest first
        self._fired_until = 0  # events before this number have fired
        self.mark = 0

    def now(self) -> Any:
        """Record an event at the end of what compute was given so far."""
        # Before recording: a use noted meanwhile may come after this event, and waits for the next.
        number, self.mark = self.mark, self.mark + 1
        event = self._events[number] = self._record()
        while len(self._events) > 1:
            oldest = next(iter(self._events))
            if not self._events[oldest].query():
                break
            self._fired_until = oldest + 1
            del self._events[oldest]
        return event

    def after(self, mark: int) -> Any | None:
        """Return the first event recorded after `mark` was read; None if such a one has fired."""
        if mark < self._fired_until:
            return None
        for number in range(mark, self.mark):
            if number in self._events:  # else an error came before it was recorded
                return self._events[number]
        return self.now()

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
        self._pieces: list[tuple[int, int, tuple[Any, ...]]] = []  # start, stop, events; in order

    def free(self, start: int, nbytes: int, events: tuple[Any, ...]) -> None:
        """Note that a range was freed, to be written once the events have fired."""
        stop = start + _in_grains(nbytes)
        at = self._place_of(start)
        if not self._is_apart(at, start, stop):
            self.take(start, nbytes)
            at = self._place_of(start)
        if at and self._pieces[at - 1][1:] == (start, events):
            self._pieces[at - 1] = (self._pieces[at - 1][0], stop, events)  # grows what is before
        else:
            self._pieces.insert(at, (start, stop, events))

    def take(self, start: int, nbytes: int) -> tuple[list[Any], bool]:
        """Take a range out that was allocated.

        Returns
        -------
        list of events
            What to wait for before it is written.
        bool
            Whether they are all: False if part of the range may have unknown users.
        """
        pieces, stop = self._pieces, start + _in_grains(nbytes)
        at = self._place_of(start)
        if at < len(pieces) and pieces[at][:2] == (start, stop):  # as it was freed
            return list(pieces.pop(at)[2]), True
        if at and pieces[at - 1][1] > start:
            at -= 1
        first, reached = at, start
        events: list[Any] = []
        rest: list[tuple[int, int, tuple[Any, ...]]] = []
        is_covered = True
        while at < len(pieces) and pieces[at][0] < stop:
            begin, end, waits = pieces[at]
            is_covered = is_covered and begin <= reached
            reached = max(reached, end)
            events += [event for event in waits if event not in events]
            if begin < start:
                rest.append((begin, start, waits))
            if end > stop:
                rest.append((stop, end, waits))
            at += 1
        pieces[first:at] = rest
        return events, is_covered and reached >= stop

    def _place_of(self, start: int) -> int:
        return bisect_left(self._pieces, start, key=itemgetter(0))

    def _is_apart(self, at: int, start: int, stop: int) -> bool:
        """Whether a range has no byte of those that stand before and behind a place."""
        begins_after = at == len(self._pieces) or self._pieces[at][0] >= stop
        return begins_after and (not at or self._pieces[at - 1][1] <= start)

    def settle(self) -> None:
        """Forget events that have fired, and join what waits for nothing any more."""
        kept: list[tuple[int, int, tuple[Any, ...]]] = []
        for start, stop, events in self._pieces:
            left = tuple(event for event in events if not event.query())
            if kept and kept[-1][1:] == (start, left):
                kept[-1] = (kept[-1][0], stop, left)
            else:
                kept.append((start, stop, left))
        self._pieces = kept

    def __len__(self) -> int:
        return len(self._pieces)


def _in_grains(nbytes: int) -> int:
    return -(-nbytes // GRAIN_NBYTES) * GRAIN_NBYTES
