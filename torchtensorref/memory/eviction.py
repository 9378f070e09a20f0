"""Eviction: room is made on a device, one replica at a time."""

from __future__ import annotations

from itertools import chain

from ..devices.base import Device
from . import telling
from .block import Replica
from .bookkeeping import Books
from .budget import SHORTAGES, OutOfBudgetError
from .copies import Copier
from .holds import PATIENCE_ROUNDS, Holds, is_exposed_on
from .leaving import finish_issue, issue_of
from .resident import Candidates
from .states import CLEAN, DIRTY, FILLING, INVALID
from .strategy_feed import StrategyFeed


class HeldByOthersError(Exception):
    """Internal: room is lacking because other threads hold it. Never reaches the program."""


class Evictor:
    """Makes room on devices; the strategy says what goes first.

    Strategies, callbacks and copies run without the lock: a decision is taken on a snapshot and
    checked again before it is carried out.
    """

    def __init__(self, books: Books, holds: Holds, copier: Copier, feed: StrategyFeed) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier
        self._feed = feed

    # -- room -----------------------------------------------------------------------------------

    def make_room(
        self, device: Device, need_nbytes: int, why: str, *, may_fail: bool = False
    ) -> None:
        """Evict until `need_nbytes` fit on a device (no lock held).

        Parameters
        ----------
        may_fail : bool, optional
            The operator that needs them has not run yet: an error of the strategy's may end it.

        Raises
        ------
        OutOfBudgetError
            They cannot fit, whatever is evicted. What was evicted on the way stays evicted.
        HeldByOthersError
            They do not fit as long as other threads' operators run.
        """
        books = self._books
        for _ in range(10_000):
            with books.lock:
                books.bury()
                self._holds.give_back_stale()
                ledger = books.ledgers[device]
                resident_nbytes = ledger.resident_nbytes
                if resident_nbytes + need_nbytes <= ledger.high_nbytes:
                    return
                excess_nbytes = ledger.budget.excess_nbytes(resident_nbytes, need_nbytes)
                if not books.is_pressed:
                    self._note_pressure()
                limit_nbytes = ledger.most_nbytes
                must_nbytes = resident_nbytes + need_nbytes - limit_nbytes
                can_fit = resident_nbytes - self._holds.pinned_nbytes(device) >= must_nbytes
            if can_fit and self._evict_enough(device, excess_nbytes, why, may_fail=may_fail):
                continue
            if must_nbytes <= 0:
                return
            if not (self._settle_in_flight(device) or self._give_up_kept(device, must_nbytes)):
                break
        self._raise_no_room(device, need_nbytes, limit_nbytes)

    def make_room_patiently(
        self, device: Device, need_nbytes: int, why: str, *, may_fail: bool = False
    ) -> None:
        """`make_room`, waiting a bounded time for what other threads hold."""
        for _ in range(PATIENCE_ROUNDS):
            try:
                return self.make_room(device, need_nbytes, why, may_fail=may_fail)
            except HeldByOthersError:
                self._holds.wait_a_little()
                # This thread holds its operands while it waits, pinned or announced: it must give
                # up soon, or two threads could wait for each other.
                if self._holds.several_threads_hold():
                    break
        ledger = self._books.ledgers[device]
        raise OutOfBudgetError(
            device.name, need_nbytes, ledger.budget.limit_nbytes, ledger.resident_nbytes
        )

    def fit_budget(self, device: Device) -> None:
        """Evict down to a budget that was lowered, as other threads let go of what they hold.

        Raises
        ------
        OutOfBudgetError
            More than that is exposed there. The budget holds all the same.

        Notes
        -----
        Where others hold more for longer than one can wait, the next operators evict it.
        """
        books = self._books
        for _ in range(PATIENCE_ROUNDS):
            with books.lock:
                books.bury()
                self._holds.give_back_stale()
                ledger = books.ledgers[device]
                excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
                if excess_nbytes <= 0:
                    ledger.lowered_from_nbytes = 0
                    return
                for block in books.blocks_on(device):
                    block.ready = None  # the slow path looks at the budget
            # What nobody holds just now, little as it may be: what is fetched again must fit.
            self.evict_some(device, excess_nbytes)
            with books.lock:
                if excess_nbytes == ledger.resident_nbytes - ledger.budget.limit_nbytes:
                    if self._settle_in_flight(device) or self._give_up_kept(device, excess_nbytes):
                        continue
                    if any(is_exposed_on(block, device) for block in books.blocks_on(device)):
                        break
                    self._holds.wait_a_little()
        else:
            books.log.note("-", "budget lowered", "others hold more; the next operators evict")
            return
        self.make_room_patiently(device, 0, "the budget was lowered")

    def evict_some(self, device: Device, need_nbytes: int, *, may_fail: bool = False) -> None:
        """Evict at least so much although the ledger sees room: the device says otherwise."""
        why = f"{device.name} refused to allocate"
        self._evict_enough(device, need_nbytes, why, may_fail=may_fail)

    def _note_pressure(self) -> None:
        """From now on the strategy wants to see each use of what stays (lock held)."""
        self._books.is_pressed = True
        self._books.short_at = self._books.tick
        if self._books.watches_accesses:
            for device in self._books.ledgers:
                for block in self._books.blocks_on(device):
                    if block.is_persistent:
                        block.ready = None

    def _raise_no_room(self, device: Device, need: int, limit: int) -> None:
        if need <= limit and not self._holds.is_alone():
            raise HeldByOthersError
        with self._books.lock:
            held = self._holds.held_nbytes(device)
        raise OutOfBudgetError(device.name, need, limit, held)

    def _settle_in_flight(self, device: Device) -> bool:
        """Let copies arrive that nobody has asked for yet, so that they can be victims."""
        with self._books.lock:
            filling = [
                replica
                for replica in self._books.ledgers[device].replicas()
                if replica.state is FILLING and not replica.pins
            ]
            for replica in filling:
                self._copier.arrivals.settle(replica)
        return bool(filling)

    def _give_up_kept(self, device: Device, need_nbytes: int) -> bool:
        """Let the blocks go that the program wants to stay, as many as are needed, last used first.

        Whoever has asked for that sees it: `is_kept` is no longer set.
        """
        with self._books.lock:
            announced = self._holds.announced_blocks()
            kept = [
                (block, replica)
                for block in self._books.blocks_on(device)
                if block.is_kept and (replica := block.readable_on(device)) is not None
                if not (replica.pins or block in announced or is_exposed_on(block, device))
            ]
            kept.sort(key=lambda pair: -pair[0].last_use)
            for block, replica in kept:
                if need_nbytes <= 0:
                    break
                block.is_kept = False
                need_nbytes -= replica.nbytes
        return bool(kept)

    def _evict_enough(self, device: Device, need_nbytes: int, why: str, *, may_fail: bool) -> int:
        """Evict what the strategy names, then the least recently used; return the bytes freed."""
        candidates = Candidates(self._books, self._holds, device)
        chosen = self._feed.victims(device, candidates, need_nbytes, may_fail=may_fail)
        freed_nbytes = leaving_nbytes = 0
        leaving: list[Replica] = []
        why = f"{self._feed.strategy.name}: {why}"
        for replica in chain(map(candidates.replica, chosen), candidates.replicas()):
            if replica is not None:
                freed_nbytes += self._begin_to_evict(replica, why, leaving)
            if leaving:
                leaving_nbytes = sum(gone.nbytes for gone in leaving)
            if freed_nbytes + leaving_nbytes >= need_nbytes:
                break
        for replica in leaving:
            freed_nbytes += self._end_of_evicting(replica, why)
        return freed_nbytes

    # -- one replica ----------------------------------------------------------------------------

    def evict(self, replica: Replica, why: str) -> int:
        """Free the bytes of a replica, writing them back first if they are the only ones.

        Returns
        -------
        int
            The bytes freed; 0 if the replica is held, or holds nothing.

        Raises
        ------
        TransferError
            The copy home failed; the replica is as it was.
        """
        leaving: list[Replica] = []
        freed_nbytes = self._begin_to_evict(replica, why, leaving)
        for one in leaving:
            freed_nbytes += self._end_of_evicting(one, why)
        return freed_nbytes

    def _begin_to_evict(self, replica: Replica, why: str, leaving: list[Replica]) -> int:
        """Evict, but for what has to be copied home by way of staging buffers: that is leaving.

        It keeps its bytes and its room, and is counted, until `_end_of_evicting`: nothing can be
        told to wait for its copy before, and other threads need the locks meanwhile.
        """
        block = replica.block
        if block is not None and block.exposure is not None:
            self._copier.refresh(block)  # who has let go of it may have written it before
        with self._books.lock:
            if not self._holds.seize(replica):
                return 0
            self._copier.note_arrivals()
            if replica.state is CLEAN:
                return self._drop(replica, why)
            home = self._copier.leaving.begin(replica)  # first: the host may have no memory for it
            self._holds.pin([replica])
        try:
            if home is not None:
                self._copier.leaving.issue_unawaited(replica, home)
        finally:
            self._holds.unpin([replica])
        if issue_of(self._books, replica.block) is not None:
            leaving.append(replica)
            return 0
        with self._books.lock:
            return self._let_go(replica, why)

    def _end_of_evicting(self, replica: Replica, why: str) -> int:
        """Let a replica go whose copy home was begun, once that is under way (no lock held)."""
        finish_issue(self._books, replica.block)
        with self._books.lock:
            return self._let_go(replica, why)

    def _let_go(self, replica: Replica, why: str) -> int:
        """Drop a replica whose bytes are at home or on their way there (lock held).

        Notes
        -----
        Nobody waits for the copy: home is filling until it has arrived, and who reads it waits
        then. What is written meanwhile ends the copy first, so a copy in flight is current.
        """
        block = replica.block
        home = block.replicas.get(self._books.host) if block is not None else None
        if home is None or not self._holds.seize(replica):
            return 0
        if replica.state is DIRTY:
            if home.state is not FILLING or home.arrival is None:
                return 0
            if not replica.device.keeps_leaving_bytes:
                home.arrival.wait()
            replica.become(CLEAN, "on its way home")
        return self._drop(replica, why, was_written_back=True)

    def try_evict(self, replica: Replica, why: str) -> None:
        """`evict` where nobody waits for the room: bytes that cannot be copied home stay."""
        try:
            self.evict(replica, why)
        except SHORTAGES as error:
            self._copier.note_failure(replica, error)

    def try_write_back(self, replica: Replica) -> None:
        """Issue a copy home of what nobody holds; if it fails, nothing is lost."""
        try:
            self._write_back(replica)
        except SHORTAGES as error:
            self._copier.note_failure(replica, error)

    def _write_back(self, replica: Replica) -> None:
        with self._books.lock:
            if not self._holds.seize(replica):
                return
            home = self._copier.leaving.begin(replica)  # first: the host may have no memory for it
            self._holds.pin([replica])
        try:
            if home is not None:
                self._copier.leaving.issue_unawaited(replica, home)
        finally:
            self._holds.unpin([replica])

    def _drop(self, replica: Replica, why: str, *, was_written_back: bool = False) -> int:
        # In this order: bytes that are about to go no longer count as current.
        books = self._books
        replica.become(INVALID, why)
        replica.device.empty(replica.base)
        books.counts.evict_count += 1
        books.short_at = books.tick
        books.counts.dropped_nbytes += replica.nbytes
        telling.given_up(books, replica, why, was_written_back=was_written_back)
        return books.remove(replica)

    def clear(self, device: Device) -> None:
        """Evict what nobody holds on a device that is out of use."""
        with self._books.lock:
            self._holds.give_back_stale()
        for replica in self._books.ledgers[device].replicas():
            with self._books.lock:
                self._copier.arrivals.settle(replica)
            self.try_evict(replica, f"{device.name} is out of use")
        self._books.close_ledger(device)

    def leave(self, device: Device) -> None:
        """Clear a device, as other threads let go of what they hold there.

        Notes
        -----
        Who holds something for longer than one can wait clears it when he lets go.
        """
        for _ in range(PATIENCE_ROUNDS):
            self.clear(device)
            with self._books.lock:
                if device not in self._books.ledgers or self._holds.is_alone():
                    return
                if any(is_exposed_on(block, device) for block in self._books.blocks_on(device)):
                    return
            self._holds.wait_a_little()

    def evict_all(self) -> None:
        """Evict every replica on every accelerator, dirty ones written back first."""
        for ledger in list(self._books.ledgers.values()):
            for replica in ledger.replicas():
                with self._books.lock:
                    self._copier.arrivals.settle(replica)
                self.evict(replica, "everything home")
        self._copier.settle_home()
