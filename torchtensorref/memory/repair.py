"""Repair: what an error has left halfway that may come at any instruction.

Signals never do that (`base/interrupts.py`). `MemoryError`, `RecursionError` and what another
thread sends with `PyThreadState_SetAsyncExc` can. Whoever lets an error pass into the program
notes its thread in `Books.doubts`; then nothing is ready, and the next operator repairs.

That can be done because of the order in which everything is written: a replica is invalid before
its bytes go, is counted before they come, and replicas elsewhere are stale before a kernel writes.
So what a state says is current is current, and only what says nothing is in doubt: copies that
nobody waits for. The one exception is what an operator overwrites at home, which counts there once
nothing elsewhere does (`overwriting.py`). Sums and pins are counted again from what they are sums
of.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from ..base import forking
from ..devices.base import Device
from ..devices.storages import storage_nbytes
from . import core, strategy_feed
from .block import Block, Replica
from .bookkeeping import Books
from .copies import Copier
from .holds import Holds
from .states import CLEAN, DIRTY, FILLING, INVALID
from .strategy_feed import StrategyFeed
from .transfer import wait_if_issued


class Repair:
    """Makes the books true again."""

    def __init__(self, books: Books, holds: Holds, copier: Copier, feed: StrategyFeed) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier
        self._feed = feed
        forking.in_child.add(self)

    def begin_in_child(self, *, was_held: bool) -> None:
        """Note in a forked child that an error has ended the other threads wherever they were."""
        me, gone = threading.get_ident(), self._holds.threads()
        if was_held:
            gone.add(0)  # one that held nothing but a lock
        core.begin_anew()
        self._books.doubt_threads(gone - {me}, strategy_feed.__file__)

    def run(self, keep: Collection[int] = ()) -> None:
        """Repair what interrupted threads have left; what others are doing stays as it is.

        Parameters
        ----------
        keep : collection of int
            Threads that go on with what they were doing before: they keep what they hold, and are
            repaired again later.

        Notes
        -----
        It may itself be interrupted, and then begins again with the next operator.
        """
        books = self._books
        me = {threading.get_ident()}.difference(keep)
        noted = [doubt for doubt in books.doubts if doubt.ident not in keep]
        for device in list(books.ledgers):
            if self._has_lost_copies(device, me | {doubt.ident for doubt in noted}):
                wait_if_issued(device)  # nobody knows their events, so all there is
        self._feed.repair(noted)  # first: it waits for who is just telling or asking
        with books.lock:
            books.parts.clear()
            # Another thread may have repaired meanwhile what it has left, and hold operands again.
            found = [doubt for doubt in books.doubts if any(doubt is one for one in noted)]
            written = set(self._holds.forget_threads(me | {doubt.ident for doubt in found}))
            for device in list(books.ledgers):
                self._mend(device, written)
            books.doubts[:] = [d for d in books.doubts if not any(d is one for one in found)]
            books.log.note("-", "repair", "an error came halfway")
            books.tell_release()

    def _has_lost_copies(self, device: Device, idents: set[int]) -> bool:
        with self._books.lock:
            return any(
                replica.state is FILLING
                and replica.arrival is None
                and self._holds.issuing.get(replica, 0) in {0, *idents}
                for block in self._books.blocks_on(device)
                for replica in block.replicas.values()
            )

    def _mend(self, device: Device, written: set[Block]) -> None:
        """Make the states, the ledger and the device's own count of one device true again."""
        books = self._books
        ledger = books.ledgers[device]
        ledger.recount()
        there = ledger.replicas()
        blocks = [block for replica in there if (block := replica.block) is not None]
        self._holds.recount_pins(r for block in blocks for r in block.replicas.values())
        for block in blocks:
            block.ready = None
            block.births = block.adopted = None  # it has its replicas
            self._mend_states(block, block in written)
        self._holds.stale = [r for r in self._holds.stale if r.device is not device]
        device.recover([(replica.base, replica.state is not INVALID) for replica in there])
        for replica in there:
            if replica.state is INVALID:
                if storage_nbytes(replica.base):
                    self._holds.give_back(replica)
                else:
                    books.remove(replica)
        ledger.recount()

    def _mend_states(self, block: Block, is_written: bool) -> None:
        """Decide which replicas of a block are current (lock held)."""
        host = self._books.host
        replicas = list(block.replicas.values())
        for replica in replicas:
            if replica.state is not FILLING:
                replica.arrival = None
            elif replica.arrival is None and replica not in self._holds.issuing:
                replica.state = INVALID
            elif replica.device is not host and replica.arrival is not None:
                self._copier.arrivals.settle(replica)
            if replica.device is not host and replica.state in (CLEAN, DIRTY) and _is_gone(replica):
                replica.state = INVALID
        home = block.replicas.get(host)
        away = [r for r in replicas if r.device is not host and r.state in (CLEAN, DIRTY)]
        if is_written and home is not None and away:
            self._copier.leaving.overtake(home)
        is_home_current = home is not None and home.state is CLEAN
        is_going_home = home is not None and home.state is FILLING
        _agree(away, is_home_current, is_going_home)


def _agree(away: Iterable[Replica], is_home_current: bool, is_going_home: bool) -> None:
    """Let the only current copy be dirty, and no other."""
    for number, replica in enumerate(sorted(away, key=lambda r: r.state is not DIRTY)):
        if is_home_current:
            replica.state = CLEAN
        elif not is_going_home:
            replica.state = INVALID if number else DIRTY


def _is_gone(replica: Replica) -> bool:
    return bool(replica.nbytes) and not storage_nbytes(replica.base)
