"""What the strategy is told (births, uses, deaths) and asked, always without the lock of the books.

A fresh result of the ready path is noted in passing and told at the next operator on the slow
path, if it is still there: most are not.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from threading import get_ident
from typing import Any

from ..base.forking import RLock, is_mine
from ..base.options import settings
from ..devices.base import Device
from ..strategy import (
    PERSISTENT_AFTER,
    Access,
    Birth,
    Death,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
)
from ..strategy.answers import CheckedStrategy, mind_of
from ..strategy.choice import make_strategy
from .block import Block, Replica
from .bookkeeping import Books, Doubt
from .copies import Copier
from .leases import Lease, Use, UseLog, struct_of
from .readiness import Readiness
from .resident import Candidates, Resident, SeenDevice, snapshots_of

#: Results remembered until the strategy is told of them; most are dead by then.
UNHEARD_COUNT = 4096


class StrategyFeed:
    """What the strategy is told and asked; what it says is checked in `strategy/answers.py`.

    Attributes
    ----------
    lock : threading.RLock
        Held while it is told or asked anything. Taken before the lock of the books, never after.
    """

    def __init__(
        self, books: Books, copier: Copier, readiness: Readiness, strategy: Strategy
    ) -> None:
        self._books = books
        self._copier = copier
        self._readiness = readiness
        self._checked = CheckedStrategy(strategy)
        self._follow(self._checked)
        self._at_first = mind_of(strategy)
        self.lock = RLock()
        #: (operator, result) of which the strategy has not been told, oldest first; and (operator,
        #: block) from which on those that it was told of count as persistent.
        self._unheard: deque[tuple[int, weakref.ref[Block]]] = deque(maxlen=UNHEARD_COUNT)
        self._young: list[tuple[int, int, weakref.ref[Block]]] = []  # a heap, soonest first
        #: Number of the operator whose access to a persistent block was told last.
        self._told_tick = 0
        #: Who told last of an operator ahead of its being counted: thread, kind, number.
        self._told: tuple[int, int, int] | None = None
        #: Uses that it expects, and is told of together.
        self.lease: Lease | None = None
        self.uses = UseLog()

    @property
    def is_within(self) -> bool:
        """Whether an operator of a finalizer asks, which the collector runs under one of our locks.

        It is told and asked nothing. What has happened is told later, its own uses never.
        """
        return is_mine(self.lock) or is_mine(self._books.lock)

    @property
    def strategy(self) -> Strategy:
        """The one in use."""
        return self._checked.strategy

    def change(self, strategy: Strategy) -> None:
        """Ask another strategy from now on; every block goes by it again before it is ready."""
        checked = CheckedStrategy(strategy)
        # In this order: what a strategy is told can need the lock (a result's first look).
        with self.lock, self._books.lock:
            self._checked = checked
            self._end_lease()
            self._books.departures.clear()
            self._follow(checked)
            self._at_first = mind_of(strategy)
            for device in self._books.ledgers:
                for block in self._books.blocks_on(device):
                    block.ready = None

    def follow_default(self, setting: Any, accelerator_count: int) -> None:
        """Ask the default strategy for so many accelerators, unless the user has chosen one."""
        if setting is None and settings.strategy is None:
            strategy = make_strategy(None, accelerator_count)
            if type(strategy) is not type(self.strategy):
                self.change(strategy)

    def _follow(self, checked: CheckedStrategy) -> None:
        books = self._books
        books.notes_departures, books.is_spread = checked.hears_evictions, checked.spreads
        books.watches_accesses, books.looks_ahead = checked.watches_accesses, checked.looks_ahead

    def repair(self, doubts: Iterable[Doubt]) -> None:
        """Let a strategy that was interrupted while it thought begin anew: it costs time only."""
        if self._at_first is not None and any(__file__ in doubt.files for doubt in doubts):
            with self.lock:
                self.strategy.__dict__ = mind_of(self.strategy, self._at_first)

    @property
    def wants_every_use(self) -> bool:
        """Whether each use of a persistent block has to be told: it takes the slow path then."""
        return self._books.wants_every_use

    # -- told -----------------------------------------------------------------------------------

    def note_birth(self, block: Block) -> None:
        """Remember a fresh result that is not tiny, to be told of if it lives."""
        if self.wants_every_use:
            lease = self.lease
            # If it turns out to stay, its uses are told as those of others.
            if lease is not None and lease.log_result(block):
                self._readiness.close_watched(lease.blocks(), lease.device)
            self._unheard.append((block.born, weakref.ref(block)))

    def catch_up(self) -> None:
        """Tell of what was used unheard since it was expected (no lock held)."""
        if self.lease is None or self.is_within:
            return
        books = self._books
        with self.lock:
            lease = self.lease
            if lease is None:
                return  # another thread has
            self._readiness.close_watched(lease.blocks(), lease.device)
            uses = self._end_lease()
            if lease.device not in books.accelerators:
                return
            books.counts.slow_hit_count += len(uses)
            self._tell_births(before=uses[0][0] if uses else 0)
            for tick, block_id, kind, is_written in uses:
                if self._unheard and self._unheard[0][0] < tick:
                    self._tell_births(before=tick)
                block, nbytes = books.known.get(block_id), lease.nbytes.get(block_id)
                if block is not None and block.is_persistent:
                    books.note_use(block, tick)
                    struct = struct_of(kind, block.nbytes)
                    by = block.accelerator() if nbytes is None else lease.device
                    self.tell_access(block, struct, tick, writes=is_written, by=by)
                elif nbytes is not None:  # it is gone since
                    self._told_tick, struct = tick, struct_of(kind, nbytes)
                    access = Access(
                        block_id, nbytes, struct, True, is_written, True, device=lease.device.name
                    )
                    self._checked.on_access(access)

    def _end_lease(self) -> list[Use]:
        """Let no more uses be noted; return those that were (the feed's lock held)."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.end()
        return self.uses.take()

    def tell_births(self) -> None:
        """Tell of fresh results that are still there (no lock held)."""
        if (self._unheard or self._young) and not self.is_within:
            with self.lock:
                self._tell_births()

    def _tell_births(self, before: int | None = None) -> None:
        """Tell of those of operators before one: what stays is persistent (lock held)."""
        checked, unheard, young = self._checked, self._unheard, self._young
        while unheard and (before is None or unheard[0][0] < before):
            block = unheard.popleft()[1]()
            if block is None:
                continue
            _ = block.replicas  # its death has to be told too
            self._books.known[block.block_id] = block
            place = max(0, block.born - self._told_tick)
            where = (checked.hears_where and block.accelerator()) or self._books.main
            age = checked.on_birth(block.block_id, block.nbytes, place, where.name)
            if age < PERSISTENT_AFTER:
                heappush(young, (block.born + age, block.block_id, weakref.ref(block)))
        while young and young[0][0] <= self._books.tick:
            block = heappop(young)[2]()
            if block is not None:
                with self._books.lock:
                    block.is_persistent = True
                    if self.wants_every_use:
                        block.ready = None

    def _tell_departures(self) -> None:
        """Tell what has left the main accelerator (the feed's lock held)."""
        departures = self._books.departures
        while departures:
            self._checked.on_evict(departures.popleft())

    def tell_deaths(self) -> None:
        """Tell which blocks are gone (no lock held)."""
        deaths = () if self.is_within else self._books.take_deaths()
        if deaths and self._checked.hears_deaths:
            with self.lock:
                for block_id in deaths:
                    self._checked.on_death(block_id)

    def tell_uses(
        self,
        device: Device,
        blocks: Iterable[Block],
        written: Iterable[Block],
        kind: int,
        ahead: int = 0,
        instead_of: Device | None = None,
        parts: Container[int] = (),
    ) -> None:
        """Tell that an operator on a device is about to use blocks (no lock held).

        Parameters
        ----------
        kind : int
            Number of the operator's kind: with a block's size, what the strategy knows its uses by.
        ahead : int, optional
            How many operators from now it is: 1 for one that has not been counted yet.
        instead_of : Device, optional
            The accelerator that would run it, had the strategy not wanted the host to.
        parts : container of int, optional
            Numbers of the blocks of which only parts would move, were they away.
        """
        books, tick, written = self._books, self._books.tick + ahead, set(written)
        if self.is_within:
            for block in blocks:
                books.note_use(block, tick)
            return
        is_at_home = instead_of is not None
        by = instead_of or (device if books.is_spread else None)
        told, this = self._told, (get_ident(), kind, tick)
        self._told = this if ahead else None
        if told == this:
            return  # this very operator, which has taken the slow path after all
        asked = instead_of or (books.main if device.is_host else device)
        if asked.has_virtual_clock:
            asked.note_decision()
        self.catch_up()
        self.tell_births()
        with self.lock:
            self._tell_departures()
            # In this order, whether an operator runs as one or in its parts.
            for block in sorted(blocks, key=attrgetter("block_id")):
                is_first = books.note_use(block, tick)
                if not (is_first or block.is_persistent) and tick - block.born > PERSISTENT_AFTER:
                    block.is_persistent = True
                # The accelerator has no need of what the host uses for reasons of its own.
                if self._checked.hears_uses and (is_at_home or not device.is_host):
                    use = block, struct_of(kind, block.nbytes), tick, block.block_id in parts
                    self.tell_access(*use, writes=block in written, is_at_home=is_at_home, by=by)

    def has_not_run(self, kind: int) -> None:
        """Note that the operator told of last is tried again, perhaps under another number."""
        self._told = (get_ident(), kind, self._books.tick + 1)

    def tell_access(
        self,
        block: Block,
        struct: int,
        tick: int,
        in_part: bool = False,
        *,
        writes: bool,
        is_at_home: bool = False,
        by: Device | None = None,
    ) -> None:
        """Tell of one use by an accelerator, or in its stead (the feed's lock held).

        Parameters
        ----------
        by : Device, optional
            The main one, where the strategy does not spread.
        """
        persists, by = block.is_persistent, by or self._books.main
        there = block.is_on(by)
        in_part = in_part and there
        if persists and not in_part:
            self._told_tick = tick
        use = block.block_id, block.nbytes, struct, persists, writes, there, is_at_home, by.name
        self._checked.on_access(Access(*use, in_part))

    def tell_foretold(self, events: Sequence[Access | Birth | Death]) -> None:
        """Tell what the program is about to use, make and let go of (the feed's lock held)."""
        self._checked.on_foretold(events)

    def tell_prefetches(self, blocks: Sequence[Block]) -> None:
        """Tell that copies which the strategy asked for have been issued (no lock held)."""
        with self.lock:
            for block in blocks:
                self._checked.on_prefetch(block.block_id, block.nbytes)

    # -- asked ----------------------------------------------------------------------------------

    @property
    def places(self) -> bool:
        """Whether the strategy says which operators run at home that lack an operand."""
        checked = self._checked
        if not checked.places or settings.placement == "accelerator":
            return False
        if checked.mixes_devices:
            return settings.placement == "hybrid" or self._books.main.knows_host
        return not checked.spreads

    @property
    def spreads(self) -> bool:
        """Whether the strategy chooses among several accelerators, as there are."""
        return self._books.spreads

    def place(self, snapshot: OpSnapshot, default: Device) -> Device:
        """Ask where an operator runs, unless on the default device (no lock held)."""
        books = self._books
        if self.is_within:
            return default
        by_name = {d.name: d for d in (books.host, *books.accelerators, default)}
        with self.lock:
            return by_name[self._checked.place(snapshot, by_name)]

    def victims(
        self, device: Device, candidates: Candidates, need_nbytes: int, *, may_fail: bool
    ) -> list[int]:
        """Ask what goes first where room is needed (no lock held).

        Parameters
        ----------
        may_fail : bool
            The operator that needs the room has not run yet: an error may end it.
        """
        if may_fail:
            self.catch_up()
        if not self._checked.names_victims or self.is_within:
            return []
        seen = self.device_snapshot(device)
        with self.lock:
            if self.lease is None:  # else what has gone may have been used before
                self._tell_departures()
            count = len(self._books.known)
            return self._checked.victims(
                seen, candidates, need_nbytes, count, candidates.nbytes_of, may_fail=may_fail
            )

    @property
    def gives_back(self) -> bool:
        """Whether the strategy evicts what an operator has used as soon as it has ended."""
        return self._checked.gives_back

    def given_back(self, device: Device, used: Sequence[Replica]) -> set[int]:
        """Ask which of the blocks that an operator has used go at once (no lock held)."""
        if self.is_within:
            return set()
        with self._books.lock:
            snapshots = snapshots_of(self._books, used)
        with self.lock:
            return set(self._checked.after_operator(self.device_snapshot(device), snapshots))

    def wishes(self, device: Device) -> tuple[list[int], list[Prefetch]]:
        """Ask what to write back and what to fetch ahead of need (no lock held)."""
        if self.is_within:
            return [], []
        resident = Resident(self._books, device)
        with self._books.lock:
            self._books.bury()
            self._copier.note_arrivals()
        seen = self.device_snapshot(device)
        with self.lock:
            self._tell_departures()
            checked, count = self._checked, len(self._books.known)
            leaving = checked.write_back(seen, resident, count)
            return leaving, checked.prefetch(seen, resident, count)

    def begin_lease(self, device: Device) -> None:
        """Open what the strategy expects to be used next, and need not hear of (no lock held)."""
        checked = self._checked
        is_wanted = checked.expects_uses and device.decision_nbytes and self.wants_every_use
        if self.lease is not None or not is_wanted or self.is_within:
            return
        with self.lock:
            if self.lease is None:  # else another thread has begun one
                expected = checked.expects(self.device_snapshot(device), len(self._books.known))
                self.lease = self._readiness.lease(device, expected)

    def device_snapshot(self, device: Device) -> DeviceSnapshot:
        """Describe a device, as it is when somebody looks at the description."""
        return SeenDevice.of(self._books, self._copier.in_flight, device)
