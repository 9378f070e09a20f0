"""The books: which replicas each device holds, described to strategies and to people."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, overload

from ..base.event_log import EventLog
from ..devices.base import Device
from ..strategy import PERSISTENT_AFTER, Access, BlockSnapshot, DeviceSnapshot, Strategy
from .block import Block, Replica, graveyard
from .budget import Budget, Ledger
from .states import CLEAN, DIRTY, FILLING, INVALID
from .transfer import Transfer

#: Results remembered until the strategy is told of them; most are dead by then.
UNHEARD_COUNT = 4096


@dataclass
class Counts:
    """What has happened since the counts were last reset."""

    op_count: int = 0
    hit_count: int = 0
    miss_count: int = 0
    evict_count: int = 0
    dropped_nbytes: int = 0
    host_op_count: int = 0
    #: Operators that the accelerator should have run and the host ran, by reason.
    host_fallbacks: dict[str, int] = field(default_factory=dict)


class Books:
    """Ledgers, counts and snapshots, under one lock. Changes no block."""

    def __init__(
        self, host: Device, accelerators: Sequence[Device], strategy: Strategy, log: EventLog
    ) -> None:
        self.host = host
        self.accelerators = list(accelerators)
        #: Where operators run that need no decision.
        self.fast_device: Any = self.main
        self.fast_host: Any = host
        #: Whether anything ever had to be given back: until then strategies need not watch.
        self.is_pressed = False
        self.strategy = strategy
        self.log = log
        self.lock = threading.RLock()
        self.unpinned = threading.Condition(self.lock)
        self.strategy_lock = threading.RLock()
        self.ledgers: dict[Device, Ledger] = {}
        self.transfer = Transfer()
        self.counts = Counts()
        #: Number of the operator that runs; the clock of recency.
        self.tick = 0
        #: Who writes down what a module's call does while it is learned (`regions.py`).
        self.recorder: Any = None
        #: Operands of operators that run on the fast path, by thread: evictors leave them alone.
        self.hazards: dict[int, tuple[Any, ...]] = {}
        #: Blocks that run natively, by thread; and the regions themselves.
        self.native_blocks: dict[int, Iterable[Block]] = {}
        self.native_entries: dict[int, Any] = {}
        #: Replicas whose copy a thread is just issuing, without the lock.
        self.issuing: set[Replica] = set()
        #: Blocks by number, for strategies that name blocks which are not on the device.
        self.known: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        #: Replicas that a copy was issued into and that nobody has seen arrive, by device.
        #: Weak: what the program has let go of must not be held by its own copy.
        self._coming: dict[Device, list[weakref.ref[Replica]]] = {}
        #: Homes that a copy was issued into and that nobody has seen arrive, in that order.
        self._going: deque[Replica] = deque()
        self._pins_by_thread: dict[int, int] = {}
        self._deaths: list[int] = []
        #: While memory is short: results that the strategy has not been told of, oldest first; and
        #: (operator, block) from which on those that it was told of count as persistent.
        self.unheard: deque[weakref.ref[Block]] = deque(maxlen=UNHEARD_COUNT)
        self.young: list[tuple[int, int, weakref.ref[Block]]] = []  # a heap, soonest first
        #: Number of the operator whose access to a persistent block was told last.
        self.told_tick = 0

    @property
    def main(self) -> Device:
        """The accelerator that operators run on unless a strategy says otherwise."""
        return self.accelerators[0] if self.accelerators else self.host

    def open_ledger(self, device: Device, budget: Budget) -> None:
        """Start counting a device; what it already holds for us goes on being counted."""
        with self.lock:
            ledger = self.ledgers.get(device)
            if ledger is None:
                self.ledgers[device] = Ledger(device, budget, self.lock, self.bury)
            else:
                ledger.budget = budget

    # -- snapshots ------------------------------------------------------------------------------

    def bury(self) -> None:
        """Take what the program has let go of out of the ledgers (lock held)."""
        while graveyard:
            death = graveyard.popleft()
            ledger = self.ledgers.get(death.device)
            if ledger is not None:
                ledger.remove_key(death.key)
            # Also of what was not on an accelerator; a living block may have lost one replica.
            if death.block_id not in self.known:
                self._deaths.append(death.block_id)
        for ledger in self.ledgers.values():
            if ledger.dead:
                ledger.bury()

    def tell_deaths(self) -> None:
        """Tell the strategy which blocks are gone (no lock held)."""
        if self._deaths:
            deaths, self._deaths = self._deaths, []
            with self.strategy_lock:
                for block_id in deaths:
                    self.strategy.on_death(block_id)

    def tell_births(self) -> None:
        """Tell the strategy of fresh results that are still there (no lock held).

        What it expects to stay, and what has stayed for long, counts as persistent from then on.
        """
        with self.strategy_lock:
            strategy, unheard, young = self.strategy, self.unheard, self.young
            while unheard:
                block = unheard.popleft()()
                if block is None:
                    continue
                _ = block.replicas  # its death has to be told too
                self.known[block.block_id] = block
                place = max(0, block.born - self.told_tick)
                age: int | None = strategy.on_birth(block.block_id, block.nbytes, place)
                if age is not None and age < PERSISTENT_AFTER:
                    heappush(young, (block.born + age, block.block_id, weakref.ref(block)))
            while young and young[0][0] <= self.tick:
                block = heappop(young)[2]()
                if block is not None:
                    self._count_as_persistent(block)

    def _count_as_persistent(self, block: Block) -> None:
        with self.lock:
            block.is_persistent = True
            if self.is_pressed and self.strategy.watches_accesses:
                block.ready = None

    def device_snapshot(self, device: Device) -> DeviceSnapshot:
        """Describe a device to a strategy (lock held)."""
        ledger = self.ledgers[device]
        clocks = device.clocks()
        now_ns = device.now_ns()
        # What compute gets to before it is through with what it has been given is no longer ahead.
        reached_ns = max(now_ns, clocks.compute_free_ns)
        filling = self._still_coming(device, reached_ns)
        return DeviceSnapshot(
            name=device.name,
            limit_nbytes=ledger.budget.limit_nbytes,
            resident_nbytes=ledger.resident_nbytes,
            in_flight_nbytes=sum(r.nbytes for r in filling),
            in_flight_count=len(filling),
            now_ns=now_ns,
            link_free_ns=clocks.link_free_ns,
            h2d_bytes_per_s=clocks.h2d_bytes_per_s,
            d2h_bytes_per_s=clocks.d2h_bytes_per_s,
            compute_ns=clocks.compute_ns,
            compute_free_ns=clocks.compute_free_ns,
            d2h_free_ns=clocks.d2h_free_ns,
        )

    def _still_coming(self, device: Device, reached_ns: int) -> list[Replica]:
        """Return the replicas that copies issued ahead will fill later than that (lock held)."""
        coming = self._coming.get(device, ())
        if not coming:
            return []
        left = [
            replica
            for reference in coming
            if (replica := reference()) is not None
            and replica.state is FILLING
            and (
                (arrival := replica.arrival) is None
                or (arrival.end_ns > reached_ns if arrival.end_ns else not arrival.is_done())
            )
        ]
        self._coming[device] = [weakref.ref(replica) for replica in left]
        return left

    def candidates(self, device: Device) -> dict[int, Replica]:
        """Return the replicas on a device that no operator holds, by block number (lock held)."""
        held = self._hazardous_blocks()
        found = {}
        for replica in self.ledgers[device].replicas():
            block = self.block_of(replica)
            if block is not None and self._is_free(replica, block, held):
                found[block.block_id] = replica
        return found

    def chosen(self, device: Device, block_ids: Sequence[int]) -> list[Replica]:
        """Return those of the named blocks' replicas on a device that no operator holds."""
        held = self._hazardous_blocks()
        found = {}
        for block_id in block_ids:
            block = self.known.get(block_id)
            replica = block.replicas.get(device) if block is not None else None
            if block is not None and replica is not None and self._is_free(replica, block, held):
                found[id(replica)] = replica
        return list(found.values())

    def held_nbytes(self, device: Device) -> int:
        """Return the bytes on a device that operators or outsiders hold there (lock held)."""
        held = self._hazardous_blocks()
        return sum(
            replica.nbytes
            for replica in self.ledgers[device].replicas()
            if (block := self.block_of(replica)) is not None
            and (replica.pins or block in held or self._held_by_exposure(block, device))
        )

    def _is_free(self, replica: Replica, block: Block, held: set[Block]) -> bool:
        return (
            not replica.pins
            and replica.state in (CLEAN, DIRTY)
            and block not in held
            and not self._held_by_exposure(block, replica.device)
        )

    def block_of(self, replica: Replica) -> Block | None:
        """Return the living block whose views over this replica are kept."""
        for reference in replica.holders:
            block = reference()
            if block is not None:
                return block
        return None

    def snapshot_of(self, replica: Replica) -> BlockSnapshot | None:
        """Describe one block to a strategy (lock held)."""
        block = self.block_of(replica)
        if block is None:
            return None
        return BlockSnapshot(
            block.block_id,
            replica.nbytes,
            block.last_use,
            self._is_newer_than_home(block, replica),
            block.is_persistent,
        )

    def _is_newer_than_home(self, block: Block, replica: Replica) -> bool:
        """Whether giving a replica back takes a copy home that nobody has issued yet."""
        if replica.state is not DIRTY:
            return False
        home = block.replicas.get(self.host)
        return home is None or home.state is not FILLING

    def _hazardous_blocks(self) -> set[Block]:
        me = threading.get_ident()
        held = {
            operand._ttr_block
            for ident, args in list(self.hazards.items())
            if ident != me
            for operand in args
            if hasattr(operand, "_ttr_block")
        }
        # Of this thread's regions too: an operator inside one can need room.
        for blocks in list(self.native_blocks.values()):
            held.update(blocks)
        return held

    def _held_by_exposure(self, block: Block, device: Device) -> bool:
        exposure = block.exposure
        return exposure is not None and exposure.device is device and exposure.alive

    # -- operators ------------------------------------------------------------------------------

    def note_operator(
        self, device: Device, blocks: Sequence[Block], written: Sequence[Block], number: int
    ) -> None:
        """Count an operator that is about to run on a device, and the uses of its operands.

        The strategy is told of those that the accelerator needs (no lock held). `number` is the
        operator's own: uses by the same operator look alike to a strategy.
        """
        self.tick += 1
        self.counts.op_count += 1
        strategy, tick = self.strategy, self.tick
        if self.unheard or self.young:
            self.tell_births()
        with self.strategy_lock:
            for block in blocks:
                block.last_use = tick
                block.use_count += 1
                if block.use_count == 1:
                    self.known[block.block_id] = block
                elif not block.is_persistent and tick - block.born > PERSISTENT_AFTER:
                    block.is_persistent = True
                if device.is_host:
                    continue  # the accelerator does not need it for this
                if block.is_persistent:
                    self.told_tick = tick
                replica = block.replicas.get(self.main)
                strategy.on_access(
                    Access(
                        block.block_id,
                        block.nbytes,
                        hash((number, block.nbytes)),
                        block.is_persistent,
                        block in written,
                        replica is not None and replica.state is not INVALID,
                    )
                )


class Resident(Sequence[BlockSnapshot]):
    """What a device holds, described when somebody looks: strategies seldom ask for all of it."""

    def __init__(self, books: Books, device: Device) -> None:
        self._books = books
        self._device = device
        self._all: list[BlockSnapshot] | None = None
        #: Number of the last operator.
        self.newest = books.tick

    def get(self, block_id: int) -> BlockSnapshot | None:
        """Describe one block; None if the device does not hold it."""
        block = self._books.known.get(block_id)
        replica = block.replicas.get(self._device) if block is not None else None
        if block is None or replica is None or replica.state is INVALID:
            return None
        return BlockSnapshot(
            block_id,
            replica.nbytes,
            block.last_use,
            self._books._is_newer_than_home(block, replica),
            block.is_persistent,
        )

    def _look(self) -> list[BlockSnapshot]:
        if self._all is None:
            books = self._books
            with books.lock:
                replicas = books.ledgers[self._device].replicas()
                self._all = [s for r in replicas if (s := books.snapshot_of(r)) is not None]
        return self._all

    def __len__(self) -> int:
        return len(self._look())

    def __iter__(self) -> Iterator[BlockSnapshot]:
        return iter(self._look())

    @overload
    def __getitem__(self, index: int) -> BlockSnapshot: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockSnapshot]: ...

    def __getitem__(self, index: int | slice) -> BlockSnapshot | list[BlockSnapshot]:
        return self._look()[index]
