"""The books: which devices are in use, what they hold, what has happened. Changes no block."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import NamedTuple

from ..base import forking
from ..base.event_log import EventLog
from ..devices.base import Device
from . import core
from .block import Block, Replica, next_death
from .budget import Budget
from .costs import Costs
from .known import KnownBlocks
from .ledger import Ledger
from .parts import Parts

#: Operators for which all has to fit before memory is no longer short; twice as many each time that
#: was wrong.
CALM_COUNT = 4096


@dataclass
class Counts:
    """What has happened since the counts were last reset."""

    #: Operators that took the slow path.
    slow_op_count: int = 0
    #: Calls of what torch.compile has made that ran on plain tensors, and the operators inside.
    native_call_count: int = 0
    native_op_count: int = 0
    #: Operands that were there already, of the slow path; operands that were not.
    slow_hit_count: int = 0
    miss_count: int = 0
    evict_count: int = 0
    dropped_nbytes: int = 0
    #: Of those on the slow path.
    host_op_count: int = 0
    #: Of these, computed at home because the strategy wanted that: how many, the bytes that were
    #: not fetched for it, and how much sooner they ended by its estimate.
    at_home_count: int = 0
    at_home_nbytes: int = 0
    at_home_saved_ns: int = 0
    #: Operators that the accelerator should have run and the host ran, by reason.
    host_fallbacks: dict[str, int] = field(default_factory=dict)
    #: And by operator; and how many of them for want of room.
    host_fallback_operators: dict[str, int] = field(default_factory=dict)
    out_of_budget_count: int = 0
    #: Operators that ran in blocks, the blocks, those of them that add in another order than the
    #: whole; and how often by operator.
    blocked_op_count: int = 0
    blocked_tile_count: int = 0
    reordered_op_count: int = 0
    blocked_operators: dict[str, int] = field(default_factory=dict)
    #: Operators that ran on the accelerator with the part that they read of a block at home.
    parts_op_count: int = 0
    #: What single blocks and operators have cost.
    costs: Costs = field(default_factory=Costs)


class Doubt(NamedTuple):
    """An error that may have come halfway through something: in which thread, and which files."""

    ident: int
    files: frozenset[str]


class Ledgers(dict[Device, Ledger]):
    """The ledgers by device: of those in use, and of those that were and still hold something.

    An operator that was in flight when its device went out of use may ask for it later: then it is
    here again, the same one, until `Books.close_ledger` finds it empty.
    """

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__()
        self._lock = lock

    def __missing__(self, device: Device) -> Ledger:
        ledger: Ledger | None = device.ledger
        if ledger is None:
            raise KeyError(device)
        with self._lock:
            self[device] = ledger
        return ledger


def labels_differ_on(accelerators: Sequence[Device]) -> bool:
    """Whether torch itself tells one of them from the host."""
    return any(device.torch_device.type != "cpu" for device in accelerators)


class Books:
    """Devices, ledgers and counts, and the one lock under which blocks change.

    Notes
    -----
    Nobody waits for a copy, and no strategy is asked, while the lock is held.
    """

    def __init__(self, host: Device, accelerators: Sequence[Device], log: EventLog) -> None:
        self.host = host
        self._take_into_use(accelerators)
        #: Where operators run that need no decision; nowhere while every operator is to be seen.
        self.ready_on: tuple[Device, ...] = ()
        #: A module's calls are being recorded: every operator takes the slow path meanwhile.
        self.sees_all = False
        #: The thread that exchanges the devices in use: no other one's operators begin meanwhile.
        self.changed_by: int | None = None
        #: What errors have left halfway: the next operator repairs.
        self.doubts: list[Doubt] = []
        self.reopen()
        #: Whether memory is short: until something has to be evicted strategies need not watch.
        self.is_pressed = False
        #: Number of the operator at which that was last to be seen: something was evicted, or left
        #: at home on purpose. After so many without it memory is no longer short.
        self.short_at = 0
        self.calm_count = CALM_COUNT
        #: A real accelerator is in use: plain tensors lie on devices of their own, so that what a
        #: call says of a device differs from where its operands are.
        self.labels_differ = labels_differ_on(accelerators)
        self.log = log
        self.lock = forking.shared
        self._released = threading.Condition(self.lock)
        self._waiting_count = 0
        self.ledgers = Ledgers(self.lock)
        self.counts = Counts()
        #: Parts of blocks at home that operators have read.
        self.parts = Parts()
        #: Number of the operator that runs; the clock of recency.
        self.tick = 0
        #: Blocks by number, for strategies that name blocks which are not on the device.
        self.known = KnownBlocks()
        self._deaths: list[int] = []
        #: Blocks that have left the main accelerator, for a strategy that wants to hear of it; any
        #: accelerator, for one that spreads.
        self.departures: deque[int] = deque()
        self.notes_departures = self.is_spread = False
        #: The strategy wants to be told each use of what stays, once memory is short.
        self.watches_accesses = False
        #: The strategy fetches ahead of need.
        self.looks_ahead = False
        #: Called with a block whose bytes are only promised, and asked for; the first promise
        #: brings who can answer (`promises/`).
        self.asked: Callable[[Block], None]

    def doubt(self) -> None:
        """Note, while an error is handled, that it came halfway: from now on nothing is ready."""
        self.ready_on = ()
        if self.changed_by == threading.get_ident():
            self.changed_by = None  # it has left the exchange, wherever it was
        files = [frame.f_code.co_filename for frame, _ in walk_tb(sys.exc_info()[2])]
        self.doubts.append(Doubt(threading.get_ident(), frozenset(files)))

    def doubt_threads(self, idents: Collection[int], file: str) -> None:
        """Note that threads are gone, which may have been halfway through something in a file."""
        if idents:
            self.ready_on = ()
            self.doubts += [Doubt(ident, frozenset({file})) for ident in idents]
        if self.changed_by in idents:
            self.changed_by = None

    @property
    def spreads(self) -> bool:
        """Whether the strategy chooses among several accelerators, as there are."""
        return self.is_spread and len(self.accelerators) > 1

    @property
    def wants_every_use(self) -> bool:
        """Whether each use of a persistent block has to be told: it takes the slow path then."""
        return self.is_pressed and self.watches_accesses

    def wait_for_release(self, seconds: float) -> None:
        """Wait until a hold ends or a copy has been issued, or for a time (lock held)."""
        self._waiting_count += 1
        try:
            self._released.wait(seconds)
        finally:
            self._waiting_count -= 1

    def tell_release(self) -> None:
        """Tell those who wait that a hold has ended, or a copy has been issued (lock held)."""
        if self._waiting_count:
            self._released.notify_all()

    def note_use(self, block: Block, tick: int) -> bool:
        """Count a use of a block that is not ready, or was not; True if it is the first."""
        block.last_use = tick
        block.use_count += 1
        is_first = block.use_count == 1
        if is_first:
            self.known[block.block_id] = block
        return is_first

    @property
    def is_in_doubt(self) -> bool:
        """Whether something has to be repaired before it is used."""
        return bool(self.doubts) or not (self.ready_on or self._is_closed)

    @property
    def _is_closed(self) -> bool:
        """Whether the ready path is closed on purpose."""
        # The ready path goes by views that are kept.
        keeps_views = not self.main.exchanges_storages
        return self.sees_all or self.changed_by is not None or not keeps_views

    def reopen(self) -> None:
        """Let operators take the ready path, unless all of them have to be seen."""
        is_closed = self._is_closed or bool(self.doubts)
        self.ready_on = () if is_closed else (*self.accelerators, self.host)

    def _take_into_use(self, accelerators: Sequence[Device]) -> None:
        self.accelerators = list(accelerators)
        #: The one that operators run on unless a strategy says otherwise.
        self.main: Device = self.accelerators[0] if self.accelerators else self.host

    def use(self, accelerators: Sequence[Device]) -> list[Device]:
        """Use these accelerators, whose ledgers are open, and no others; return those left.

        Operators that are in flight on one of those end there; what begins later goes to the new
        ones. From here on no block is ready on a device that was left.
        """
        with self.lock:
            self._take_into_use(accelerators)
            self.labels_differ = labels_differ_on(accelerators)
            self.is_pressed, self.calm_count = False, CALM_COUNT
            self.reopen()
            left = [device for device in self.ledgers if device not in self.accelerators]
            for device in left:
                for block in self.blocks_on(device):
                    block.ready = None
        return left

    def note_calm(self) -> None:
        """Let operators go unwatched again once memory was not short for long (no lock held).

        Blocks become ready as the slow path meets them. Should memory be short again, the strategy
        has missed uses and learns anew: after that it takes twice as long.
        """
        with self.lock:
            if self.is_pressed and self.tick - self.short_at > self.calm_count:
                self.is_pressed = False
                self.calm_count *= 2

    def is_left(self, device: Device) -> bool:
        """Whether a device is not in use, or not any more."""
        return not device.is_host and device not in self.accelerators

    def open_ledger(self, device: Device, budget: Budget) -> None:
        """Start counting a device; what it already holds for us goes on being counted."""
        with self.lock:
            if device.ledger is None:
                device.ledger = Ledger(device, budget)
            device.ledger.budget = budget
            self.ledgers[device] = device.ledger

    def close_ledger(self, device: Device) -> bool:
        """Leave out the ledger of a device that is out of use; False while it holds something."""
        with self.lock:
            self.bury()
            if self.is_left(device) and self.ledgers[device].resident_nbytes == 0:
                del self.ledgers[device]
            return device not in self.ledgers

    def bury(self) -> None:
        """Take what the program has let go of out of the ledgers (lock held)."""
        if self.host.graveyard:
            self._bury_replicas()
        for ledger in self.ledgers.values():
            if ledger.dead:
                ledger.bury()

    def _bury_replicas(self) -> None:
        while self.host.graveyard:
            death = next_death(self.host)
            ledger = None if death.device is None else self.ledgers.get(death.device)
            if ledger is not None:
                ledger.remove_number(death.number)
            # Also of what was not on an accelerator; a living block may have lost one replica.
            if death.block_id not in self.known:
                self._deaths.append(death.block_id)

    def remove(self, replica: Replica) -> int:
        """Take a replica that has given its bytes back out of its ledger; return its bytes."""
        if self.notes_departures and (self.is_spread or replica.device is self.main):
            self.departures.append(replica.block_id)
        return self.ledgers[replica.device].remove_number(replica.number)

    def take_deaths(self) -> list[int]:
        """Return the numbers of the blocks that have died since the last time."""
        deaths, self._deaths = self._deaths, []
        return deaths

    def where(self, block: Block) -> Device:
        """Return the device where operators find a block's bytes now; it may change at once."""
        found = (one for one in self.accelerators if block.readable_on(one) is not None)
        return next(found, self.host)

    def blocks_on(self, device: Device) -> list[Block]:
        """Return the living blocks with bytes on a device."""
        found = (replica.block for replica in self.ledgers[device].replicas())
        return [block for block in found if block is not None]


class LiveBooks(Books, core.BooksBase):  # type: ignore[misc]
    """Those of the program that runs, which operators in C++ read: there is one at a time.

    Forecasts and replays have books of their own beside them, which no operator reads.
    """
