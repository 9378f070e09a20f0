"""Room for copies to an accelerator: taken before they are issued, given back if they are not."""

from __future__ import annotations

import threading

import torch

from ..devices.storages import storage_nbytes
from .block import Block, Replica
from .bookkeeping import Books
from .external_pressure import ReleaseWatch, note_shortage
from .holds import Holds
from .ledger import Ledger
from .states import FILLING, INVALID


class RoomTakenError(Exception):
    """Internal: another thread has taken the room that was made. Never reaches the program."""


class Filling:
    """Opens and closes the room of copies (lock of the books held)."""

    def __init__(self, books: Books, holds: Holds) -> None:
        self._books = books
        self._holds = holds
        self._releases = ReleaseWatch()

    def open(self, block: Block, replica: Replica) -> bool:
        """Give an empty replica of a block its bytes; False if it has some already.

        Raises
        ------
        RoomTakenError, torch.OutOfMemoryError
            As `Copier.fetch` does.
        """
        if replica.state is not INVALID:
            return False
        books, device = self._books, replica.device
        block.owned = False  # and so not ready where it may be written unasked
        books.parts.forget(block)  # it may be written here
        ledger = books.ledgers[device]
        if not (self._holds.stale and self._holds.take_stale(replica)):
            self._take_room(replica, ledger)
        self._releases.note_fetch(ledger)
        self._holds.issuing[replica] = threading.get_ident()
        replica.become(FILLING, "fetch issued")
        return True

    def _take_room(self, replica: Replica, ledger: Ledger) -> None:
        if not ledger.add_if_room(replica):
            self._books.bury()  # what has died since room was made
            if not ledger.add_if_room(replica):
                raise RoomTakenError
        try:
            replica.device.refill(replica.base, replica.nbytes)
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                note_shortage(ledger)
            if not storage_nbytes(replica.base):  # else it counts until it is repaired
                self._books.remove(replica)
            raise

    def close(self, replica: Replica) -> None:
        """Take back the bytes of a replica whose copy could not be issued."""
        replica.become(INVALID, "fetch failed")
        replica.arrival = None
        self._holds.give_back(replica)
