"""The books: which replicas each device holds, described to strategies and to people."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .blocks.block import Block, Replica, graveyard
from .blocks.states import CLEAN, DIRTY, FILLING
from .budget import Budget, Ledger
from .devices.base import Device
from .events import EventLog
from .strategy import BlockSnapshot, DeviceSnapshot, Strategy
from .transfer import Transfer


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
        #: Operands of operators that run on the fast path, by thread: evictors leave them alone.
        self.hazards: dict[int, tuple[Any, ...]] = {}
        #: Blocks by number, for strategies that name blocks which are not on the device.
        self.known: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._pins_by_thread: dict[int, int] = {}
        self._deaths: list[int] = []

    @property
    def main(self) -> Device:
        """The accelerator that operators run on unless a strategy says otherwise."""
        return self.accelerators[0] if self.accelerators else self.host

    def open_ledger(self, device: Device, budget: Budget) -> None:
        """Start counting a device; what it already holds for us goes on being counted."""
        with self.lock:
            ledger = self.ledgers.get(device)
            if ledger is None:
                self.ledgers[device] = Ledger(device, budget)
            else:
                ledger.budget = budget

    # -- snapshots ------------------------------------------------------------------------------

    def bury(self) -> None:
        """Take what the program has let go of out of the ledgers (lock held)."""
        while graveyard:
            death = graveyard.popleft()
            ledger = self.ledgers.get(death.device)
            if ledger is not None and ledger.remove_key(death.key):
                self._deaths.append(death.block_id)

    def tell_deaths(self) -> None:
        """Tell the strategy which blocks are gone (no lock held)."""
        if self._deaths:
            deaths, self._deaths = self._deaths, []
            with self.strategy_lock:
                for block_id in deaths:
                    self.strategy.on_death(block_id)

    def device_snapshot(self, device: Device) -> DeviceSnapshot:
        """Describe a device to a strategy (lock held)."""
        ledger = self.ledgers[device]
        filling = [r for r in ledger.replicas() if r.state is FILLING]
        clocks = device.clocks()
        return DeviceSnapshot(
            name=device.name,
            limit_nbytes=ledger.budget.limit_nbytes,
            resident_nbytes=ledger.resident_nbytes,
            in_flight_nbytes=sum(r.nbytes for r in filling),
            in_flight_count=len(filling),
            now_ns=device.now_ns(),
            link_free_ns=clocks.link_free_ns,
            h2d_bytes_per_s=clocks.h2d_bytes_per_s,
            d2h_bytes_per_s=clocks.d2h_bytes_per_s,
            compute_ns=clocks.compute_ns,
            compute_free_ns=clocks.compute_free_ns,
        )

    def candidates(self, device: Device) -> dict[int, Replica]:
        """Return the replicas on a device that no operator holds, by block number (lock held)."""
        held = self._hazardous_blocks()
        found = {}
        for replica in self.ledgers[device].replicas():
            block = self.block_of(replica)
            if (
                block is not None
                and not replica.pins
                and replica.state in (CLEAN, DIRTY)
                and block not in held
                and not self._held_by_exposure(block, device)
            ):
                found[block.block_id] = replica
        return found

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
            replica.state is DIRTY,
            block.is_persistent,
        )

    def _hazardous_blocks(self) -> set[Block]:
        me = threading.get_ident()
        return {
            operand._b
            for ident, args in list(self.hazards.items())
            if ident != me
            for operand in args
            if hasattr(operand, "_b")
        }

    def _held_by_exposure(self, block: Block, device: Device) -> bool:
        exposure = block.exposure
        return exposure is not None and exposure.device is device and exposure.alive
