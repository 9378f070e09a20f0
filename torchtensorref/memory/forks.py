"""What a forked child has of the blocks: the accelerators are the parent's.

The runtime of a real accelerator works in no forked child. So what is newer there is copied home
before the fork, and the child leaves the accelerators without a word to them: it computes at home.
Simulated ones are memory of the process, and go on.
"""

from __future__ import annotations

from ..base import forking
from ..base.errors import TransferError
from ..devices.base import Device
from .block import Replica
from .bookkeeping import Books
from .copies import Copier
from .eviction import Evictor
from .states import DIRTY, FILLING, INVALID

#: What the parent's replicas are made of: to free it in a child, torch may ask the runtime.
_of_parents: list[Replica] = []


class Forks:
    """Sees to it that a forked child finds all bytes at home."""

    def __init__(self, books: Books, copier: Copier, evictor: Evictor) -> None:
        self._books = books
        self._copier = copier
        self._evictor = evictor
        forking.before.add(self)
        forking.in_child.add(self)

    def before_fork(self) -> None:
        """Copy home what is newer on a real accelerator; it stays there, too."""
        for device in self._real():
            for replica in self._books.ledgers[device].replicas():
                with self._books.lock:
                    self._copier.arrivals.settle(replica)
                if replica.state is DIRTY:
                    self._evictor.try_write_back(replica)
        try:
            self._copier.settle_home()
        except TransferError as error:  # it is there still, and the child is told when it reads
            self._books.log.note("-", "fork", str(error)[:80])

    def begin_in_child(self, *, was_held: bool) -> None:
        """Leave the real accelerators, and what is on its way between them and home."""
        left, books = self._real(), self._books
        if not left:
            return
        books.use([device for device in books.accelerators if device not in left])
        for device in left:
            for replica in books.ledgers[device].replicas():
                block = replica.block
                _of_parents.append(replica)
                replica.state = INVALID
                if block is not None:
                    block.replicas.pop(device, None)
                    if block.exposure is not None and block.exposure.device is device:
                        block.exposure = None
                    home = block.replicas.get(books.host)
                    if home is not None and home.state is FILLING:
                        home.state, home.arrival = INVALID, None
            del books.ledgers[device]

    def _real(self) -> list[Device]:
        ledgers = self._books.ledgers
        return [device for device in ledgers if device.shares_memory and not device.is_host]
