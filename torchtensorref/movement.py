"""Movement of bytes: make room, evict, write back, fetch, arrive."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import torch

from .blocks.block import Block, Replica
from .blocks.states import CLEAN, DIRTY, FILLING, INVALID
from .books import Books
from .budget import OutOfBudgetError
from .devices.base import Device, empty_bytes
from .errors import TransferError
from .strategy import BlockSnapshot, DeviceSnapshot

#: How long a thread waits for others to let go of bytes before it looks again, in seconds.
PATIENCE_S = 0.02
#: Rounds of waiting before a thread takes the way to the host: others may wait for this one.
PATIENCE_ROUNDS = 500
#: Pauses between attempts to copy home what somebody needs there, in seconds: the only copy is on
#: the device, so a link that fails gets time to recover.
LINK_PAUSES_S = (0.001, 0.01, 0.1, 1.0)


class HeldByOthersError(Exception):
    """Internal: room is lacking because other threads hold it. Never reaches the program."""


class RoomTakenError(Exception):
    """Internal: another thread has taken the room that was made. Never reaches the program."""


class Movement(Books):
    """What moves bytes between devices, one block at a time.

    Strategies, callbacks and copies run without the lock: a decision is taken on a snapshot and
    checked again before it is carried out.
    """

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
                if not self.is_pressed:
                    self._feel_pressure()
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

    def _feel_pressure(self) -> None:
        """From now on the strategy wants to see each use of what stays (lock held)."""
        self.is_pressed = True
        if self.strategy.watches_accesses:
            for ledger in self.ledgers.values():
                for replica in ledger.replicas():
                    block = self.block_of(replica)
                    if block is not None and block.is_persistent:
                        block.ready = None

    def _raise_no_room(self, device: Device, need: int, limit: int, held: int) -> None:
        me = threading.get_ident()
        others = any(count for ident, count in self._pins_by_thread.items() if ident != me)
        others = others or any(ident != me for ident in [*self.hazards, *self.native_blocks])
        if need <= limit and others:
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
            self._note_arrivals()
            if replica.state is CLEAN:
                return self._drop(replica, why)
            replica.pins += 1
        try:
            self.write_back(replica, wait=False)
        finally:
            with self.lock:
                replica.pins -= 1
        with self.lock:
            return self._let_go(replica, why)

    def _let_go(self, replica: Replica, why: str) -> int:
        """Drop a replica whose bytes are at home or on their way there (lock held).

        Notes
        -----
        Nobody waits for the copy: home is filling until it has arrived, and who reads it waits
        then. What is written meanwhile ends the copy first, so a copy in flight is current.
        """
        block = self.block_of(replica)
        home = block.replicas.get(self.host) if block is not None else None
        if home is None or not self._seize(replica):
            return 0
        if replica.state is DIRTY:
            if home.state is not FILLING or home.arrival is None:
                return 0
            if not replica.device.keeps_leaving_bytes:
                home.arrival.wait()
            replica.become(CLEAN, "on its way home")
        return self._drop(replica, why)

    def give_back(self, replica: Replica, why: str) -> None:
        """`evict` where nobody waits for the room: bytes that cannot be copied home stay."""
        try:
            self.evict(replica, why)
        except TransferError as error:
            self._note_failure(replica, error)

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
        # What may fail goes first: afterwards the books change, and nothing can stop them.
        replica.device.empty(replica.base)
        replica.become(INVALID, why)
        self.counts.evict_count += 1
        self.counts.dropped_nbytes += replica.nbytes
        self.log.note(f"b{replica.block_id}", f"drop {replica.device.name}", why)
        return self.ledgers[replica.device].remove(replica)

    def make_room_patiently(self, device: Device, need_nbytes: int, why: str) -> None:
        """`make_room`, waiting a bounded time for what other threads hold."""
        for _ in range(PATIENCE_ROUNDS):
            try:
                return self.make_room(device, need_nbytes, why)
            except HeldByOthersError:
                with self.lock:
                    self.unpinned.wait(PATIENCE_S)
                # This thread holds its operands while it waits, pinned or announced: it must give
                # up soon, or two threads could wait for each other.
                if len({*self._pins_by_thread, *self.hazards}) > 1:
                    break
        ledger = self.ledgers[device]
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
        for _ in range(PATIENCE_ROUNDS):
            with self.lock:
                self.bury()
                ledger = self.ledgers[device]
                excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
                if excess_nbytes <= 0:
                    return
                for replica in ledger.replicas():
                    block = self.block_of(replica)
                    if block is not None:
                        block.ready = None  # the long way looks at the budget
            # What nobody holds just now, little as it may be: what is fetched again must fit.
            self.evict_some(device, excess_nbytes)
            with self.lock:
                if excess_nbytes == ledger.resident_nbytes - ledger.budget.limit_nbytes:
                    blocks = [self.block_of(r) for r in ledger.replicas()]
                    if any(b is not None and self._held_by_exposure(b, device) for b in blocks):
                        break
                    self.unpinned.wait(PATIENCE_S)
        else:
            self.log.note("-", "budget lowered", "others hold more; the next operators evict")
            return
        self.make_room_patiently(device, 0, "the budget was lowered")

    def evict_some(self, device: Device, need_nbytes: int) -> None:
        """Evict at least so much although the ledger sees room: the device says otherwise."""
        with self.lock:
            candidates = self.candidates(device)
            snapshots = [s for r in candidates.values() if (s := self.snapshot_of(r))]
            seen = self.device_snapshot(device)
        self._evict_enough(
            device, seen, snapshots, candidates, need_nbytes, f"{device.name} refused to allocate"
        )

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
            home = self._home_replica(block, replica.device)
            if home.state is FILLING:
                if wait:
                    self._arrive(home)
                return
            home.become(FILLING, "write-back issued")
            self.issuing.add(home)
        try:
            home.arrival = self.transfer.write_back(replica, home)
        except BaseException:
            with self.lock:
                home.become(INVALID, "write-back failed")
            raise
        finally:
            self.issuing.discard(home)
        self.log.note(block.name, "write back", f"from {replica.device.name}")
        with self.lock:
            if wait:
                self._arrive(home)
            else:
                self._going.append(home)

    def _home_replica(self, block: Block, source: Device | None = None) -> Replica:
        """Return the replica at home, with bytes that may be stale (lock held)."""
        home = block.replicas.get(self.host)
        if home is None:
            base = None if source is None else source.home_memory(block.nbytes)
            base = empty_bytes(block.nbytes) if base is None else base
            home = block.replicas[self.host] = Replica(block, self.host, base, INVALID)
        return home

    def _arrive(self, replica: Replica) -> None:
        """Wait for the copy that fills a replica and make it readable (lock held)."""
        self._wait_for_issue(replica)
        arrival = replica.arrival
        if replica.state is not FILLING or arrival is None:
            return
        if replica.device is self.host:
            arrival.synchronize()
            replica.arrival = None
            replica.become(CLEAN, "written back")
            block = self.block_of(replica)
            for other in block.replicas.values() if block is not None else ():
                if other.state is DIRTY:
                    other.become(CLEAN, "written back")
        else:
            arrival.wait()
            replica.arrival = None
            replica.become(CLEAN, "arrived")

    def _wait_for_issue(self, replica: Replica) -> None:
        """Let another thread that is just issuing the copy into a replica do so (lock held)."""
        while replica.state is FILLING and replica.arrival is None:
            self.unpinned.wait(PATIENCE_S)

    def bring_home(self, block: Block) -> Replica:
        """Make the bytes at home current; return that replica.

        Raises
        ------
        TransferError
            The copy failed again and again; nothing is lost, the bytes are where they were.
        """
        with self.lock:
            self.refresh(block)
            home = block.readable_on(self.host)
            if home is not None:
                return home
            source = self._readable_source(block)
        if source is not None:
            self._write_back_patiently(source)
        with self.lock:
            home = self._home_replica(block)
            self._arrive(home)
            return home

    def _write_back_patiently(self, replica: Replica) -> None:
        for pause_s in LINK_PAUSES_S:
            try:
                return self.write_back(replica)
            except TransferError as error:
                self._note_failure(replica, error)
                time.sleep(pause_s)
        self.write_back(replica)

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
        RoomTakenError
            The budget has no room for it, or none any more; nothing has changed.
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
            ledger = self.ledgers[device]
            if ledger.resident_nbytes + block.nbytes > ledger.budget.limit_nbytes:
                raise RoomTakenError
            device.refill(replica.base, block.nbytes)
            ledger.add(replica)
            replica.become(FILLING, "fetch issued")
            self.issuing.add(replica)
        try:
            replica.arrival = self.transfer.fetch(home, replica, ahead=ahead)
            if ahead:
                with self.lock:
                    self._coming.setdefault(device, []).append(weakref.ref(replica))
        except BaseException:
            with self.lock:
                replica.become(INVALID, "fetch failed")
                device.empty(replica.base)
                self.ledgers[device].remove(replica)
            raise
        finally:
            self.issuing.discard(replica)
        self.log.note(block.name, f"fetch {device.name}", "ahead" if ahead else "an operator reads")

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

    def _make_stale(self, replica: Replica, why: str) -> None:
        """A replica no longer current gives its bytes back; home keeps the room (lock held)."""
        replica.become(INVALID, why)
        if replica.device is not self.host:
            replica.device.empty(replica.base)
            self.ledgers[replica.device].remove(replica)

    def peek(self, block: Block) -> torch.Tensor:
        """Return host bytes with the current content; changes no state, keeps nothing."""
        with self.lock:
            exposure = block.exposure
            if exposure is not None and exposure.device is not self.host and exposure.alive:
                # Whoever holds it there may have written it without our seeing it.
                held = block.replicas[exposure.device]
                self._arrive(held)
                return self.transfer.peek(held)
            home = block.replicas.get(self.host)
            if home is not None and DIRTY not in (r.state for r in block.replicas.values()):
                self._arrive(home)  # its bytes may be on their way home, and nowhere else
            home = block.readable_on(self.host)
            if home is not None:
                return home.base
            source = next(r for r in block.replicas.values() if r.state is DIRTY)
            return self.transfer.peek(source)

    def _note_failure(self, replica: Replica, error: Exception) -> None:
        self.log.note(f"b{replica.block_id}", f"no copy {replica.device.name}", str(error)[:80])

    def _note_arrivals(self) -> None:
        """See which copies home have ended meanwhile, in their order (lock held)."""
        going = self._going
        while going:
            home = going[0]
            if home.state is FILLING and home.arrival is not None:
                if not home.arrival.is_done():
                    return
                self._arrive(home)
            going.popleft()

    def settle_home(self) -> None:
        """Wait for every copy home that nobody has waited for."""
        with self.lock:
            while self._going:
                self._arrive(self._going.popleft())
