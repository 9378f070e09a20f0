"""Moving house: blocks at home in a heap move to page-locked memory that a copy has filled."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from ..devices.host.mirrors import Mirror
from ..devices.host.readers import host_readers
from ..devices.storages import bytes_of
from . import core
from .block import Replica
from .bookkeeping import Books
from .holds import Holds
from .states import CLEAN

#: Looked at before each fetch: so few that nobody feels it, so many that they do not pile up.
AT_A_TIME = 4


class Rehousing:
    """Gives blocks the memory of their mirrors, where nobody can see the difference.

    Notes
    -----
    Memory that a heap has given out cannot be page-locked where it lies: its first and last pages
    belong to others, too. So a copy fills page-locked memory on its way, and afterwards the block
    is at home there and the heap's memory is free again. Until then, and where somebody is in the
    way for good, the two exist side by side, as with mapped files.
    """

    def __init__(self, books: Books, holds: Holds) -> None:
        self._books = books
        self._holds = holds
        #: Homes whose mirrors copies fill, or have filled, and their mirrors. Weak: what the
        #: program lets go of, or writes, is not held by its own move.
        self.waiting: deque[tuple[weakref.ref[Replica], weakref.ref[Mirror]]] = deque()

    def note_copy(self, home: Replica) -> None:
        """See whether the copy just issued from a home fills memory that it could move to."""
        mirror = host_readers.mirrors.being_filled(home.base)
        if mirror is not None and mirror.may_be_home:
            mirror.may_be_home = False  # once
            self.waiting.append((weakref.ref(home), weakref.ref(mirror)))

    def move_some(self) -> None:
        """Move those whose memory is full, if nobody is in the way (lock not held)."""
        for _ in range(min(len(self.waiting), AT_A_TIME)):
            try:
                weakly = self.waiting.popleft()
            except IndexError:
                return  # another thread does the same
            home, mirror = weakly[0](), weakly[1]()
            if home is None or mirror is None or not mirror.is_of(bytes_of(home.base)):
                continue
            with self._books.lock:
                is_moved = mirror.is_filled and self._move(home, mirror)
            if not is_moved:
                self.waiting.append(weakly)

    def _move(self, home: Replica, mirror: Mirror) -> bool:
        """Exchange the memory under a home; False where somebody may hold it (lock held)."""
        if home.handed_out is not None:
            return True  # its storage object may be known by its `id`: it stays
        if home.state is not CLEAN or home.pins or not self._is_alone():
            return False
        blocks = [block for reference in home.holders if (block := reference()) is not None]
        for block in blocks:
            # Exposed bytes are seen from outside; and whoever uses it at home asks nobody.
            if block.exposure is not None or block.ready is self._books.host or block.users:
                return False
        if host_readers.mirrors.of(bytes_of(home.base)) is not mirror:
            return True  # it has been written since, or has died: nothing is left to be done
        for block in blocks:
            block.is_rehoused = True
            self._books.parts.forget(block)
        old, home.base = home.base, mirror.memory
        host_readers.mirrors.drop(mirror.address)
        del old
        return True

    def _is_alone(self) -> bool:
        """Whether no other operator runs, which could hold a plain tensor over the old memory."""
        holds, me = self._holds, threading.get_ident()
        busy = {*holds.in_flight, *holds.announced, *holds.native_entries} - {me}
        return not busy and holds.in_flight.get(me, 0) <= 1 and not core.running_elsewhere()
