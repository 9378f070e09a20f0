"""Who holds which bytes: fetch, evict, write back, pin, commit. The part of the manager that acts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .blocks.block import Block, Exposure, Replica, graveyard
from .blocks.states import CLEAN, DIRTY, FILLING, INVALID
from .budget import Budget, Ledger, OutOfBudgetError
from .devices.base import Device, bytes_of, empty_bytes, storage_nbytes
from .events import EventLog
from .strategy import BlockSnapshot, DeviceSnapshot, Strategy
from .transfer import Transfer, copy_of

#: How long a thread waits for others to let go of bytes before it looks again, in seconds.
PATIENCE_S = 0.02
#: Rounds of waiting before a thread takes the way to the host: others may wait for this one.
PATIENCE_ROUNDS = 500


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


class HeldByOthersError(Exception):
    """Internal: room is lacking because other threads hold it. Never reaches the program."""


class Residency:
    """The blocks' bytes on all devices, under one lock.

    Strategies, callbacks and copies run without the lock: a decision is taken on a snapshot and
    checked again before it is carried out.
    """

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
        link = device.link() if hasattr(device, "link") else None
        return DeviceSnapshot(
            name=device.name,
            limit_nbytes=ledger.budget.limit_nbytes,
            resident_nbytes=ledger.resident_nbytes,
            in_flight_nbytes=sum(r.nbytes for r in filling),
            in_flight_count=len(filling),
            now_ns=device.now_ns(),
            link_free_ns=link.free_ns if link else 0,
            h2d_bytes_per_s=link.h2d_bytes_per_s if link else 1e10,
            d2h_bytes_per_s=link.d2h_bytes_per_s if link else 1e10,
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

    # -- room -----------------------------------------------------------------------------------

    def make_room(self, device: Device, need_nbytes: int, why: str) -> None:
        """Evict until `need_nbytes` fit on a device (no lock held).

        Raises
        ------
        OutOfBudgetError
            They cannot fit, whatever is evicted. What was evicted on the way stays evicted.
        HeldByOthersError
            They do not fit as long as other threads' operators run.
        """
        for _ in range(10_000):
            with self.lock:
                self.bury()
                ledger = self.ledgers[device]
                limit_nbytes = ledger.budget.limit_nbytes
                excess_nbytes = ledger.budget.excess_nbytes(ledger.resident_nbytes, need_nbytes)
                if excess_nbytes <= 0:
                    return
                candidates = self.candidates(device)
                evictable_nbytes = sum(r.nbytes for r in candidates.values())
                held_nbytes = ledger.resident_nbytes - evictable_nbytes
                must_nbytes = ledger.resident_nbytes + need_nbytes - limit_nbytes
                snapshots = [s for r in candidates.values() if (s := self.snapshot_of(r))]
                seen = self.device_snapshot(device)
            if evictable_nbytes < must_nbytes:
                if self._settle_in_flight(device):
                    continue
                self._raise_no_room(device, need_nbytes, limit_nbytes, held_nbytes)
            self._evict_enough(device, seen, snapshots, candidates, excess_nbytes, why)
        self._raise_no_room(device, need_nbytes, limit_nbytes, held_nbytes)

    def _raise_no_room(self, device: Device, need: int, limit: int, held: int) -> None:
        me = threading.get_ident()
        others = any(count for ident, count in self._pins_by_thread.items() if ident != me)
        if need <= limit and (others or len(self.hazards) > (me in self.hazards)):
            raise HeldByOthersError
        raise OutOfBudgetError(device.name, need, limit, held)

    def _settle_in_flight(self, device: Device) -> bool:
        """Wait for copies nobody has asked for yet, so that they can be victims; True if any."""
        with self.lock:
            filling = [
                r for r in self.ledgers[device].replicas() if r.state is FILLING and not r.pins
            ]
            for replica in filling:
                self._arrive(replica)
        return bool(filling)

    def _evict_enough(
        self,
        device: Device,
        seen: DeviceSnapshot,
        snapshots: Sequence[BlockSnapshot],
        candidates: dict[int, Replica],
        need_nbytes: int,
        why: str,
    ) -> None:
        """Evict what the strategy names, then the least recently used, until enough is free."""
        with self.strategy_lock:
            chosen = list(self.strategy.victims(seen, snapshots, need_nbytes))
        rest = [s.block_id for s in sorted(snapshots, key=lambda s: (s.last_use, -s.nbytes))]
        freed_nbytes = 0
        for block_id in dict.fromkeys([*chosen, *rest]):
            if freed_nbytes >= need_nbytes:
                return
            replica = candidates.get(block_id)
            if replica is not None:
                freed_nbytes += self.evict(replica, f"{self.strategy.name}: {why}")

    def evict(self, replica: Replica, why: str) -> int:
        """Give back the bytes of a replica, writing them back first if they are the only ones.

        Returns
        -------
        int
            The bytes freed; 0 if the replica is held, or holds nothing.

        Raises
        ------
        TransferError
            The copy home failed; the replica is as it was.
        """
        with self.lock:
            if not self._seize(replica):
                return 0
            dirty = replica.state is DIRTY
            if not dirty:
                return self._drop(replica, why)
            replica.pins += 1
        try:
            self.write_back(replica)
        finally:
            with self.lock:
                replica.pins -= 1
        with self.lock:
            if replica.state is CLEAN and self._seize(replica):
                return self._drop(replica, why)
            return 0

    def _seize(self, replica: Replica) -> bool:
        """Close the fast path to a replica; False if somebody holds it (lock held)."""
        block = self.block_of(replica)
        if replica.pins or replica.state not in (CLEAN, DIRTY) or block is None:
            return False
        ready, block.ready = block.ready, None
        # The order matters: close first, look second. A thread on the fast path announces its
        # operands first and looks at `ready` second, so one of the two sees the other.
        if block in self._hazardous_blocks() or self._held_by_exposure(block, replica.device):
            block.ready = ready
            return False
        return True

    def _drop(self, replica: Replica, why: str) -> int:
        replica.become(INVALID, why)
        replica.device.empty(replica.base)
        self.counts.evict_count += 1
        self.counts.dropped_nbytes += replica.nbytes
        self.log.note(f"b{replica.block_id}", f"drop {replica.device.name}", why)
        return self.ledgers[replica.device].remove(replica)

    # -- copies ---------------------------------------------------------------------------------

    def write_back(self, replica: Replica, *, wait: bool = True) -> None:
        """Copy dirty bytes home; afterwards the replica is clean.

        Raises
        ------
        TransferError
            The copy failed; the replica is still dirty, and whole.
        """
        with self.lock:
            block = self.block_of(replica)
            if block is None or replica.state is not DIRTY:
                return
            block.owned = False
            home = self._home_replica(block)
            if home.state is FILLING:
                if wait:
                    self._arrive(home)
                return
            home.become(FILLING, "write-back issued")
        try:
            home.arrival = self.transfer.write_back(replica, home)
        except BaseException:
            with self.lock:
                home.become(INVALID, "write-back failed")
            raise
        self.log.note(block.name, "write back", f"from {replica.device.name}")
        if wait:
            with self.lock:
                self._arrive(home)

    def _home_replica(self, block: Block) -> Replica:
        """Return the replica at home, with bytes that may be stale (lock held)."""
        home = block.replicas.get(self.host)
        if home is None:
            base = empty_bytes(block.nbytes)
            home = block.replicas[self.host] = Replica(block, self.host, base, INVALID)
        return home

    def _arrive(self, replica: Replica) -> None:
        """Wait for the copy that fills a replica and make it readable (lock held)."""
        if replica.state is not FILLING or replica.arrival is None:
            return
        arrival, replica.arrival = replica.arrival, None
        if replica.device is self.host:
            arrival.synchronize()
            replica.become(CLEAN, "written back")
            block = self.block_of(replica)
            for other in block.replicas.values() if block is not None else ():
                if other.state is DIRTY:
                    other.become(CLEAN, "written back")
        else:
            arrival.wait()
            replica.become(CLEAN, "arrived")

    def bring_home(self, block: Block) -> Replica:
        """Make the bytes at home current; return that replica."""
        with self.lock:
            self.refresh(block)
            home = block.readable_on(self.host)
            if home is not None:
                return home
            source = self._readable_source(block)
        if source is not None:
            self.write_back(source)
        with self.lock:
            home = self._home_replica(block)
            self._arrive(home)
            return home

    def _readable_source(self, block: Block) -> Replica | None:
        for replica in block.replicas.values():
            if replica.device is not self.host:
                self._arrive(replica)
                if replica.state is DIRTY:
                    return replica
        return None

    def _replica_on(self, block: Block, device: Device) -> Replica:
        """Return the replica on an accelerator, an empty one if there was none (lock held)."""
        replica = block.replicas.get(device)
        if replica is None:
            base = device.allocate(0)
            device.empty(base)
            replica = block.replicas[device] = Replica(block, device, base, INVALID)
        return replica

    def fetch(self, block: Block, device: Device, *, ahead: bool = False) -> None:
        """Issue the copy that makes a block readable on an accelerator; room must be there.

        Raises
        ------
        torch.OutOfMemoryError
            The device refused the allocation; nothing has changed.
        TransferError
            The copy failed; the block is where it was.
        """
        home = self.bring_home(block)
        with self.lock:
            replica = self._replica_on(block, device)
            if replica.state is not INVALID:
                return
            self.bury()
            device.refill(replica.base, block.nbytes)
            self.ledgers[device].add(replica)
            replica.become(FILLING, "fetch issued")
        try:
            replica.arrival = self.transfer.fetch(home, replica, ahead=ahead)
        except BaseException:
            with self.lock:
                replica.become(INVALID, "fetch failed")
                device.empty(replica.base)
                self.ledgers[device].remove(replica)
            raise
        self.log.note(block.name, f"fetch {device.name}", "ahead" if ahead else "an operator reads")

    # -- operators ------------------------------------------------------------------------------

    def acquire(
        self, device: Device, blocks: Sequence[Block], written: Sequence[Block], expected: int
    ) -> None:
        """Make blocks readable on a device and hold them there: all of them, or none.

        Parameters
        ----------
        device : Device
            Where the operator will run.
        blocks, written : sequence of Block
            Distinct operands, and those of them that the operator writes.
        expected : int
            Bytes its results are expected to take; room is made for them if there is any.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError, TransferError
            They cannot be brought there. Nothing is held.
        """
        for block in written:
            self.unshare(block)
        if device.is_host:
            for block in blocks:
                self.bring_home(block)
            return
        for _ in range(PATIENCE_ROUNDS):
            self._pin(device, blocks)
            try:
                self._fetch_missing(device, blocks, expected)
                return
            except HeldByOthersError:
                self.release(device, blocks)
                with self.lock:
                    self.unpinned.wait(PATIENCE_S)
            except BaseException:
                self.release(device, blocks)
                raise
        need_nbytes = sum(block.nbytes for block in blocks)
        limit_nbytes = self.ledgers[device].budget.limit_nbytes
        raise OutOfBudgetError(device.name, need_nbytes, limit_nbytes, limit_nbytes)

    def _pin(self, device: Device, blocks: Iterable[Block]) -> None:
        me = threading.get_ident()
        with self.lock:
            for block in blocks:
                self.refresh(block)
                self._replica_on(block, device).pins += 1
                self._pins_by_thread[me] = self._pins_by_thread.get(me, 0) + 1

    def release(self, device: Device, blocks: Iterable[Block]) -> None:
        """Let go of what `acquire` holds."""
        if device.is_host:
            return
        me = threading.get_ident()
        with self.lock:
            for block in blocks:
                block.replicas[device].pins -= 1
                self._pins_by_thread[me] -= 1
            if not self._pins_by_thread[me]:
                del self._pins_by_thread[me]
            self.unpinned.notify_all()

    def _fetch_missing(self, device: Device, blocks: Sequence[Block], expected: int) -> None:
        with self.lock:
            missing = [b for b in blocks if b.replicas[device].state is INVALID]
            self.counts.miss_count += len(missing)
            self.counts.hit_count += len(blocks) - len(missing)
        need_nbytes = sum(block.nbytes for block in missing)
        if need_nbytes or expected:
            try:
                self.make_room(device, need_nbytes + expected, "operands and results")
            except OutOfBudgetError:
                # What results take is only expected: operands must fit, results are seen to later.
                self.make_room(device, need_nbytes, "operands")
        for block in missing:
            self._fetch_with_room(block, device)
        with self.lock:
            for block in blocks:
                self._arrive(block.replicas[device])

    def _fetch_with_room(self, block: Block, device: Device) -> None:
        """Fetch; if the device refuses the allocation all the same, evict as much again, once."""
        try:
            self.make_room(device, block.nbytes, "operands")
            self.fetch(block, device)
        except OutOfBudgetError:
            raise
        except torch.OutOfMemoryError:
            self.evict_some(device, block.nbytes)
            self.fetch(block, device)

    def evict_some(self, device: Device, need_nbytes: int) -> None:
        """Evict at least so much although the ledger sees room: the device says otherwise."""
        with self.lock:
            candidates = self.candidates(device)
            snapshots = [s for r in candidates.values() if (s := self.snapshot_of(r))]
            seen = self.device_snapshot(device)
        self._evict_enough(
            device, seen, snapshots, candidates, need_nbytes, f"{device.name} refused to allocate"
        )

    def set_ready(self, block: Block, device: Device) -> None:
        """Open the fast path to a block where nothing has to be decided about it (lock held)."""
        replica = block.replicas.get(device)
        if (
            replica is None
            or replica.state not in (CLEAN, DIRTY)
            or block.exposure is not None
            or block.sharers is not None
            or (block.is_persistent and self.strategy.watches_accesses)
        ):
            block.ready = None
            return
        block.owned = replica.state is DIRTY
        block.ready = device

    def written(self, block: Block, device: Device) -> None:
        """Note that an operator has written a block on a device: other replicas are stale."""
        with self.lock:
            block.ready = None
            home = block.replicas.get(self.host)
            if home is not None and home.state is FILLING:
                self._arrive(home)
            for replica in list(block.replicas.values()):
                if replica.device is not device and replica.state is not INVALID:
                    self._arrive(replica)
                    self._make_stale(replica, f"written on {device.name}")
            own = block.replicas[device]
            if not device.is_host and own.state is CLEAN:
                own.become(DIRTY, "written by an operator")

    def _make_stale(self, replica: Replica, why: str) -> None:
        """A replica no longer current gives its bytes back; home keeps the room (lock held)."""
        replica.become(INVALID, why)
        if replica.device is not self.host:
            replica.device.empty(replica.base)
            self.ledgers[replica.device].remove(replica)

    def born(self, tensor: torch.Tensor, device: Device) -> Block:
        """Make the block of a kernel's fresh result, which owns its storage.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError
            It does not fit on the device, even after every legal eviction. Nothing has changed.
        """
        block = Block(storage_nbytes(tensor))
        block.last_use = self.tick
        if device.is_host:
            block.replicas[device] = Replica(block, device, tensor, CLEAN)
            return block
        ledger = self.ledgers[device]
        while True:
            with self.lock:
                self.bury()
                if ledger.budget.excess_nbytes(ledger.resident_nbytes, block.nbytes) <= 0:
                    self._account(block, tensor, device)
                    return block
            self.make_room_patiently(device, block.nbytes, "results")

    def make_room_patiently(self, device: Device, need_nbytes: int, why: str) -> None:
        """`make_room`, waiting a bounded time for what other threads hold."""
        for _ in range(PATIENCE_ROUNDS):
            try:
                return self.make_room(device, need_nbytes, why)
            except HeldByOthersError:
                with self.lock:
                    self.unpinned.wait(PATIENCE_S)
                # This thread holds its operands while it waits: after a while it must give up, or
                # two threads could wait for each other.
                if len(self._pins_by_thread) > 1:
                    break
        ledger = self.ledgers[device]
        raise OutOfBudgetError(
            device.name, need_nbytes, ledger.budget.limit_nbytes, ledger.resident_nbytes
        )

    def _account(self, block: Block, tensor: torch.Tensor, device: Device) -> None:
        try:
            device.account(tensor)
        except torch.OutOfMemoryError:
            self.evict_some(device, block.nbytes)
            device.account(tensor)
        replica = block.replicas[device] = Replica(block, device, tensor, DIRTY)
        self.ledgers[device].add(replica)
        block.ready = device
        block.owned = True

    def own_home_bytes(self, block: Block) -> None:
        """Exchange borrowed bytes at home for a copy of our own, if nobody outside holds them."""
        home = self.bring_home(block)
        with self.lock:
            if block.exposure is None and not home.base.untyped_storage().resizable():
                home.base = copy_of(home.base)

    # -- sharing and exposure -------------------------------------------------------------------

    def unshare(self, block: Block) -> None:
        """Give a block bytes of its own before it is written (copy on write).

        The oldest sharer keeps the replicas, since views over them may be kept; the others move to
        a copy at home, which they go on sharing.
        """
        if not block.is_shared:
            return
        home = self.bring_home(block)
        with self.lock:
            if not block.is_shared:
                return
            sharers = [b for reference in block.sharers or () if (b := reference()) is not None]
            movers = [b for b in sharers if b is not sharers[0]] if block is sharers[0] else [block]
            for mover in movers:
                mover.stop_sharing()
            first = movers[0]
            first.replicas[self.host] = Replica(first, self.host, copy_of(home.base), CLEAN)
            for mover in movers[1:]:
                first.share_with(mover)
            _ = block.is_shared

    def copy_on_write(self, block: Block) -> Block:
        """Return a new block that shares the bytes of another until one of them is written."""
        with self.lock:
            twin = Block(block.nbytes)
            twin.is_persistent = block.is_persistent
            block.share_with(twin)
        return twin

    def peek(self, block: Block) -> torch.Tensor:
        """Return host bytes with the current content; changes no state, keeps nothing."""
        with self.lock:
            home = block.readable_on(self.host)
            if home is not None:
                return home.base
            source = next(r for r in block.replicas.values() if r.state is DIRTY)
            return self.transfer.peek(source)

    def refresh(self, block: Block) -> None:
        """Distrust the copies of bytes that are exposed elsewhere (lock held)."""
        exposure = block.exposure
        if exposure is None:
            return
        if not exposure.alive:
            block.exposure = None
            return
        held = block.replicas[exposure.device]
        for replica in list(block.replicas.values()):
            if replica is not held and replica.state is not INVALID and not replica.pins:
                self._arrive(replica)
                if replica.device is self.host or replica.state is CLEAN:
                    self._make_stale(replica, f"exposed on {held.device.name}: {exposure.why}")
        if held.device is not self.host and held.state is CLEAN:
            held.become(DIRTY, f"exposed: {exposure.why}")

    def expose(self, block: Block, device: Device, why: str, *, forever: bool = False) -> Any:
        """Hold a block on a device and return a storage over its bytes that may be given away.

        The caller has made the block readable there. The storage is a twin: another object over
        the same memory, by whose users we see when the last holder outside is gone.
        """
        self.unshare(block)
        with self.lock:
            self.refresh(block)
            block.ready = None
            exposure = block.exposure
            if exposure is None or exposure.device is not device or exposure.storage is None:
                twin = torch.from_dlpack(bytes_of(block.replicas[device].base))
                forever = forever or (exposure is not None and exposure.forever)
                exposure = Exposure(device, twin.untyped_storage(), why, forever=forever)
                block.exposure = exposure
            exposure.forever = exposure.forever or forever
        self.log.note(block.name, f"expose {device.name}", why)
        return exposure.storage
