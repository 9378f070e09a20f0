"""Copies home: begun under the lock, issued without it, and waited for by whoever needs them.

Those by way of staging buffers nothing can be told to wait for until they run.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from ..base.errors import TransferError
from ..devices.base import Device, Event
from ..devices.out_of_memory import of_host
from ..devices.storages import empty_bytes
from . import telling
from .block import Block, Replica
from .bookkeeping import Books
from .holds import Holds
from .ledger import given_up
from .states import DIRTY, FILLING, INVALID
from .transfer import Transfer, wait_if_issued


class Leaving:
    """Begins and issues the copies home of dirty replicas."""

    def __init__(self, books: Books, holds: Holds, transfer: Transfer) -> None:
        self._books = books
        self._holds = holds
        self._transfer = transfer
        #: Homes that a copy was issued into and that nobody has seen arrive, in that order.
        self.not_awaited: deque[Replica] = deque()
        #: Copies into homes that nobody wants any more, and that have perhaps not ended.
        self._overtaken: weakref.WeakKeyDictionary[Replica, Event] = weakref.WeakKeyDictionary()

    def begin(self, replica: Replica) -> Replica | None:
        """Have home filled from a dirty replica (lock held); `issue` must follow.

        Whoever chooses a replica begins before he lets go of the lock: an operator that is about to
        write it then waits for the copy, or has announced itself and refuses the choice.

        Returns
        -------
        Replica or None
            That at home, which another thread may be filling already. None for a clean one.
        """
        block = replica.block
        if block is None or replica.state is not DIRTY:
            return None
        block.owned = False
        home = self.home_of(block, replica.device)
        if home.state is not FILLING:
            self._holds.issuing[home] = threading.get_ident()
            home.become(FILLING, "write-back issued")
        return home

    def begin_wanted(self, replica: Replica) -> Replica | None:
        """Do the same where somebody holds the block and waits for it."""
        if replica.block is None:
            raise given_up(replica)
        return self.begin(replica)

    def issue(self, replica: Replica, home: Replica) -> bool:
        """Issue the copy that this thread has begun; False if another one has (lock not held).

        Raises
        ------
        TransferError
            The copy failed; the replica is still dirty, and whole.
        """
        books, holds = self._books, self._holds
        if holds.issuing.get(home) != threading.get_ident():
            return False
        try:
            self.let_land(home)
            home.arrival = self._transfer.write_back(replica, home)
        except BaseException as error:
            wait_if_issued(replica.device, error)
            with books.lock:
                home.become(INVALID, "write-back failed")
            raise
        finally:
            holds.issuing.pop(home, None)
        telling.written_back(books, f"b{replica.block_id}", replica, home)
        return True

    def issue_unawaited(self, replica: Replica, home: Replica) -> None:
        """Issue a copy that nobody waits for (lock not held); raises as `issue` does."""
        if self.issue(replica, home):
            self.not_awaited.append(home)

    def overtake(self, home: Replica) -> None:
        """Let nobody read what a copy brings home: it is stale, and may come yet (lock held)."""
        if home.arrival is not None:
            self._overtaken[home] = home.arrival
        home.state, home.arrival = INVALID, None

    def is_overtaken(self, home: Replica) -> bool:
        """Whether what is stale may still come to a home (lock held)."""
        return home in self._overtaken

    def let_land(self, home: Replica) -> None:
        """Wait for what is stale, before a home is given other bytes (lock not needed).

        Else it would come to lie over those: copies home end one after the other where they use the
        same way from the same device, and no more than that.
        """
        event = self._overtaken.pop(home, None) if self._overtaken else None
        if event is not None:
            with suppress(TransferError):  # then it has not come, and will not
                event.synchronize()

    def home_of(self, block: Block, source: Device | None = None) -> Replica:
        """Return the replica at home, with bytes that may be stale (lock held).

        Raises
        ------
        torch.OutOfMemoryError
            The host has no memory for it; nothing has changed.
        """
        host = self._books.host
        home = block.replicas.get(host)
        if home is None:
            base = (source or self._books.main).home_memory(block.nbytes)
            base = _memory_of(block.nbytes) if base is None else base
            home = block.replicas[host] = Replica(block, host, base, INVALID)
        return home


def _memory_of(nbytes: int) -> Tensor:
    try:
        return empty_bytes(nbytes)
    except RuntimeError as error:
        raise of_host(nbytes) from error


def issue_of(books: Books, block: Block | None) -> Callable[[], None] | None:
    """What waits until the copy home of a block was issued as a whole; None if nothing has to."""
    home = block.replicas.get(books.host) if block is not None else None
    return getattr(home.arrival, "finish_issue", None) if home is not None else None


def finish_issue(books: Books, block: Block | None) -> None:
    """Wait until the copy home of a block is under way (lock not held, so that others may go on).

    Raises
    ------
    TransferError
        It failed. Home is not being filled any more, and the replica that it left is as it was.
    """
    home = block.replicas.get(books.host) if block is not None else None
    arrival = home.arrival if home is not None else None
    finish = getattr(arrival, "finish_issue", None)
    if home is None or finish is None:
        return
    try:
        finish()
    except TransferError:
        note_failure(books, home, arrival)
        raise


def note_failure(books: Books, home: Replica, arrival: Event | None) -> None:
    """Let a copy home that has failed be issued again, by whoever needs it."""
    with books.lock:
        if home.state is FILLING and home.arrival is arrival:
            home.become(INVALID, "write-back failed")
            home.arrival = None
