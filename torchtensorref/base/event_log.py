"""The event log: what happened lately, always on, read as the story of one block."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from .text import Lines

__all__ = ["EventLog", "EventRecord"]

#: (step, block name, event, cause). A plain tuple: a named one takes twice as long to make.
EventRecord = tuple[int, str, str, str]


class EventLog:
    """The last events, in order. Writing is cheap; reading filters.

    Parameters
    ----------
    capacity : int
        How many events are kept; the oldest are forgotten first.

    Attributes
    ----------
    sink : Callable or None
        Called with each record as it is written, for a trace. It runs in the thread that
        notes, possibly under the manager's lock: it must be quick, and call nothing of ours.

    Notes
    -----
    Any thread may write and read at any time without a lock. Steps grow by one per event;
    records of two threads may stand in another order than their steps.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.sink: Callable[[EventRecord], None] | None = None
        self._events: deque[EventRecord] = deque(maxlen=capacity)
        self._next_step = itertools.count(1).__next__

    def __len__(self) -> int:
        return len(self._events)

    def note(self, block_name: str, event: str, cause: str) -> None:
        """Write one event down.

        Parameters
        ----------
        block_name : str
            The short name of the block it happened to, such as ``b7``.
        event : str
            What happened, a verb first: ``fetch cuda:0``.
        cause : str
            Why it happened: ``aten.mm reads it``.
        """
        record = (self._next_step(), block_name, event, cause)
        self._events.append(record)
        if self.sink is not None:
            self.sink(record)

    def records(self) -> list[EventRecord]:
        """Give all events that are still kept, oldest first."""
        while True:
            try:
                return list(self._events)
            except RuntimeError:
                # Another thread noted something while the ring was read: read it again.
                continue

    def story(self, block_name: str) -> Lines:
        """Tell what happened to one block, oldest first.

        Parameters
        ----------
        block_name : str
            Its short name.

        Returns
        -------
        list of str
            A line for each event: step, event, cause. It is shown one below the other.

        Examples
        --------
        >>> log = EventLog()
        >>> log.note("b7", "fetch cuda:0", "aten.mm reads it")
        >>> log.note("b8", "drop cuda:0", "lru: 40 bytes needed")
        >>> log.story("b7")
             1 fetch cuda:0 (aten.mm reads it)
        """
        return Lines(
            f"{step:>6} {event} ({cause})"
            for step, name, event, cause in self.records()
            if name == block_name
        )

    def tail(self, count: int = 20) -> Lines:
        """Tell the last events of all blocks, oldest first.

        Parameters
        ----------
        count : int
            How many at most.

        Returns
        -------
        list of str
            A line for each event: step, block, event, cause.
        """
        last = self.records()[-count:] if count > 0 else []
        return Lines(f"{step:>6} {name} {event} ({cause})" for step, name, event, cause in last)

    def clear(self) -> None:
        """Forget every event; steps go on counting."""
        self._events.clear()
