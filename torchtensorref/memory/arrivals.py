"""Arrivals: copies that were issued, until their bytes count; and those that fail on their way.

A copy by way of staging buffers may say late that it has failed: when it is waited for, at each
time. Home has what it was to bring all the same, so its replica is given up there and then, and
whoever needs the bytes fetches them again.
"""

from __future__ import annotations

from ..base.errors import TransferError
from . import telling
from .block import Block, Replica
from .bookkeeping import Books
from .filling import Filling
from .holds import Holds
from .leaving import note_failure
from .peers import Peers
from .states import CLEAN, DIRTY, FILLING, READABLE


class Arrivals:
    """Makes replicas readable whose copies have ended."""

    def __init__(self, books: Books, holds: Holds, filling: Filling, peers: Peers) -> None:
        self._books = books
        self._holds = holds
        self._filling = filling
        self._peers = peers

    def wait_for(self, replica: Replica) -> None:
        """Wait for the copy that fills a replica and make it readable (lock not held).

        Raises
        ------
        TransferError
            It has failed; the block is where it was.
        """
        with self._books.lock:
            self._holds.wait_for_issue(replica)
            arrival = replica.arrival
        if arrival is not None and replica.device.is_host:
            try:
                arrival.synchronize()
            except TransferError:
                note_failure(self._books, replica, arrival)
                raise
        with self._books.lock:
            self.arrive(replica)

    def wait_for_home(self, block: Block) -> None:
        """Wait for a copy home that is under way, if any (lock not held)."""
        home = block.replicas.get(self._books.host)
        if home is not None and home.state is FILLING:
            self.wait_for(home)

    def arrive(self, replica: Replica) -> None:
        """Make a replica readable whose copy has ended, or for which compute waits (lock held).

        Raises
        ------
        TransferError
            The copy has failed. On an accelerator the replica is empty: home has the bytes.

        Notes
        -----
        For home `wait_for`, or `is_done`, has seen the end of the copy before.
        """
        if replica.state is not FILLING:
            return
        self._holds.wait_for_issue(replica)
        arrival = replica.arrival
        if replica.state is not FILLING or arrival is None:
            return
        if replica.device is self._books.host:
            arrival.synchronize()
            if replica.arrival is not arrival:
                return  # garbage was collected, whose finalizer has come here
            replica.become(CLEAN, "written back")
            replica.arrival = None
            block = replica.block
            for other in block.replicas.values() if block is not None else ():
                if other.state is DIRTY:
                    other.become(CLEAN, "written back")
            return
        try:
            arrival.wait()
        except TransferError as error:
            telling.failed(self._books, replica, error)
            self._filling.close(replica)
            raise
        if replica.arrival is not arrival:
            return
        self._books.ledgers[replica.device].has_arrived(replica)
        replica.become(CLEAN, "arrived")
        replica.arrival = None
        self._peers.has_arrived(replica)

    def settle(self, replica: Replica) -> bool:
        """`arrive` where it need not have come to an accelerator; False if it is not readable."""
        try:
            self.arrive(replica)
        except TransferError:
            if replica.device.is_host:
                raise  # what is elsewhere may go home again
        return replica.state in READABLE
