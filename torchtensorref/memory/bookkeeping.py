"""The books: which devices are in use, what they hold, what has happened. Changes no block."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.event_log import EventLog
from ..devices.base import Device
from .block import Block, Replica, graveyard
from .budget import Budget
from .ledger import Ledger


@dataclass
class Counts:
    """What has happened since the counts were last reset."""

    #: Operators that took the slow path, and those inside of regions that ran natively.
    slow_op_count: int = 0
    native_op_count: int = 0
    #: Operands that were there already, of the slow path and of regions; operands that were not.
    slow_hit_count: int = 0
    miss_count: int = 0
    evict_count: int = 0
    dropped_nbytes: int = 0
    #: Of those on the slow path.
    host_op_count: int = 0
    #: Operators that the accelerator should have run and the host ran, by reason.
    host_fallbacks: dict[str, int] = field(default_factory=dict)


class Books:
    """Devices, ledgers and counts, and the one lock under which blocks change.

    Notes
    -----
    Nobody waits for a copy, and no strategy is asked, while the lock is held.
    """

    def __init__(self, host: Device, accelerators: Sequence[Device], log: EventLog) -> None:
        self.host = host
        self.accelerators = list(accelerators)
        #: Where operators run that need no decision; nowhere while every operator is to be seen.
        self.ready_device: Any = self.main
        self.ready_host: Any = host
        #: Whether anything ever had to be evicted: until then strategies need not watch.
        self.is_pressed = False
        #: A real accelerator is in use: plain tensors lie on devices of their own, so that what a
        #: call says of a device differs from where its operands are.
        self.labels_differ = False
        self.log = log
        self.lock = threading.RLock()
        #: Told when a hold ends, or a copy has been issued.
        self.released = threading.Condition(self.lock)
        self.ledgers: dict[Device, Ledger] = {}
        self.counts = Counts()
        #: Number of the operator that runs; the clock of recency.
        self.tick = 0
        #: Blocks by number, for strategies that name blocks which are not on the device.
        self.known: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._deaths: list[int] = []

    @property
    def main(self) -> Device:
        """The accelerator that operators run on unless a strategy says otherwise."""
        return self.accelerators[0] if self.accelerators else self.host

    def use(self, accelerators: Sequence[Device]) -> None:
        """Use these accelerators, whose ledgers are still to be opened, and no others."""
        self.ledgers.clear()
        self.accelerators[:] = accelerators
        self.ready_device = self.main
        self.is_pressed = False

    def open_ledger(self, device: Device, budget: Budget) -> None:
        """Start counting a device; what it already holds for us goes on being counted."""
        with self.lock:
            ledger = self.ledgers.get(device)
            if ledger is None:
                self.ledgers[device] = Ledger(device, budget)
            else:
                ledger.budget = budget

    def bury(self) -> None:
        """Take what the program has let go of out of the ledgers (lock held)."""
        while graveyard:
            death = graveyard.popleft()
            ledger = self.ledgers.get(death.device)
            if ledger is not None:
                ledger.remove_number(death.number)
            # Also of what was not on an accelerator; a living block may have lost one replica.
            if death.block_id not in self.known:
                self._deaths.append(death.block_id)
        for ledger in self.ledgers.values():
            if ledger.dead:
                ledger.bury()

    def take_deaths(self) -> list[int]:
        """Return the numbers of the blocks that have died since the last time."""
        deaths, self._deaths = self._deaths, []
        return deaths

    def block_of(self, replica: Replica) -> Block | None:
        """Return the living block whose views over this replica are kept."""
        for reference in replica.holders:
            block = reference()
            if block is not None:
                return block
        return None

    def blocks_on(self, device: Device) -> list[Block]:
        """Return the living blocks with bytes on a device."""
        found = (self.block_of(replica) for replica in self.ledgers[device].replicas())
        return [block for block in found if block is not None]
