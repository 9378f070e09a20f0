"""Where fetched replicas lie, and what the next copy into the same place has to wait for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..storages import storage_of
from .freed_room import FreedRoom, UseMarks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Rooms"]

#: A mark: operators use it without a note.
UNNOTED = -1
#: Freed ranges that are kept before those that wait for nothing are joined.
SETTLE_ROOM_FROM = 256


class _Room(weakref.ref[Any]):
    """The memory of one fetched replica. A weak reference: its callback gets the whole record."""

    __slots__ = ("after", "is_known", "key", "mark", "nbytes", "start")

    key: int  # id(base)
    start: int
    nbytes: int
    after: list[Any]  # events before which it must not be written,
    is_known: bool  # and whether they are all: else it may have unknown users
    mark: int  # `UseMarks.mark` after the last use


class Rooms:
    """The rooms on the copy stream, which only copies take (the device's lock held).

    Parameters
    ----------
    record : callable
        Makes an event at the end of what compute was given so far.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self.marks = UseMarks(record)
        self.freed = FreedRoom()
        self._settle_at = SETTLE_ROOM_FROM
        self._rooms: dict[int, _Room] = {}
        self.dead: deque[_Room] = deque()

    def take(self, base: Tensor, start: int, nbytes: int) -> None:
        """Note where a base was given its bytes."""
        room = _Room(base, self.dead.append)
        room.key, room.start, room.nbytes, room.mark = id(base), start, nbytes, UNNOTED
        room.after, room.is_known = self.freed.take(start, nbytes)
        self._rooms[room.key] = room

    def leave(self, base: Tensor, leaving: Sequence[Any]) -> bool:
        """Note what the next copy into a base's room has to wait for.

        Parameters
        ----------
        leaving : sequence of events
            Of the device module: of the copies that may still use it.

        Returns
        -------
        bool
            False where the base is in no room of copies.
        """
        room = self._of(base)
        if room is None:
            return False
        del self._rooms[room.key]
        storage = storage_of(base)
        if room.nbytes != storage.nbytes() or room.start != storage.data_ptr():
            return False
        last_use = self.marks.now() if room.mark == UNNOTED else self.marks.after(room.mark)
        events = () if last_use is None else (last_use,)
        # Nobody has waited for what was in the room before if its copy was not issued.
        before = [event for event in room.after if not event.query()]
        self.freed.free(room.start, room.nbytes, (*events, *leaving, *before))
        if len(self.freed) > self._settle_at:
            self.freed.settle()
            self._settle_at = max(SETTLE_ROOM_FROM, 2 * len(self.freed))
        return True

    def waits_of(self, base: Tensor) -> list[Any]:
        """Return the events before which a base's room must not be written."""
        room = self._of(base)
        if room is None:
            return [self.marks.now()]
        waits = [event for event in room.after if not event.query()]
        return waits if room.is_known else [*waits, self.marks.now()]

    def note_copy(self, base: Tensor) -> None:
        """Note that a copy into a base was issued: operators may use it from now on."""
        room = self._of(base)
        if room is not None:
            room.is_known = False

    def mark(self, bases: Sequence[Tensor], mark: int) -> None:
        """Note when operators used bases last: `UseMarks.mark`, or `UNNOTED`."""
        rooms = self._rooms
        for base in bases:
            room = rooms.get(id(base))
            if room is not None and room() is base:
                room.mark = mark

    def settle(self) -> None:
        """Forget the rooms of replicas that died: their last readers are not known."""
        while self.dead:
            room = self.dead.popleft()
            if self._rooms.get(room.key) is room:
                del self._rooms[room.key]

    def _of(self, base: Tensor) -> _Room | None:
        room = self._rooms.get(id(base))
        return room if room is not None and room() is base else None
