"""The books: which devices are in use, what they hold, what has happened. Changes no block."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NamedTuple

from ..base.event_log import EventLog
from ..devices.base import Device
from .block import Block, Replica, graveyard, next_death
from .budget import Budget
from .ledger import Ledger


@dataclass
class Counts:
    """What has happened since the counts were last reset."""

    #: Operators that took the slow path, and those inside of regions that ran natively.
    slow_op_count: int = 0
    native_op_count: int = 0
    hit_count: int = 0
    miss_count: int = 0
    evict_count: int = 0
    dropped_nbytes: int = 0
    #: Of those on the slow path.
    host_op_count: int = 0
    #: Operators that the accelerator should have run and the host ran, by reason.
    host_fallbacks: dict[str, int] = field(default_factory=dict)


class Doubt(NamedTuple):
    """An error that may have come halfway through something: in which thread, and which files."""

    ident: int
    files: frozenset[str]


class _Nowhere:
    """A device on which no block is ever ready."""


NOWHERE: Any = _Nowhere()


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
        #: A module's calls are being recorded: every operator takes the slow path meanwhile.
        self.sees_all = False
        #: What errors have left halfway: the next operator repairs.
        self.doubts: list[Doubt] = []
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

    def doubt(self) -> None:
        """Note, while an error is handled, that it came halfway: from now on nothing is ready."""
        self.ready_device = self.ready_host = NOWHERE
        files = [frame.f_code.co_filename for frame, _ in walk_tb(sys.exc_info()[2])]
        self.doubts.append(Doubt(threading.get_ident(), frozenset(files)))

    @property
    def is_in_doubt(self) -> bool:
        """Whether something has to be repaired before it is used."""
        return bool(self.doubts) or (self.ready_device is NOWHERE and not self.sees_all)

    def reopen(self) -> None:
        """Let operators take the ready path, unless all of them have to be seen."""
        is_closed = self.sees_all or bool(self.doubts)
        self.ready_device = NOWHERE if is_closed else self.main
        self.ready_host = NOWHERE if is_closed else self.host

    @property
    def main(self) -> Device:
        """The accelerator that operators run on unless a strategy says otherwise."""
        return self.accelerators[0] if self.accelerators else self.host

    def use(self, accelerators: Sequence[Device]) -> None:
        """Use these accelerators, whose ledgers are still to be opened, and no others."""
        self.ledgers.clear()
        self.accelerators[:] = accelerators
        self.is_pressed = False
        self.reopen()

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
            death = next_death()
            ledger = None if death.device is None else self.ledgers.get(death.device)
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
