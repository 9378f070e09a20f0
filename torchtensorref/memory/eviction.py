"""Movement of bytes: make room and evict."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..base.errors import TransferError
from ..devices.base import Device
from ..strategy import BlockSnapshot, DeviceSnapshot
from .block import Replica
from .budget import OutOfBudgetError
from .copies import PATIENCE_S, Copies
from .states import CLEAN, DIRTY, FILLING, INVALID

#: Rounds of waiting before a thread takes the way to the host: others may wait for this one.
PATIENCE_ROUNDS = 500


class HeldByOthersError(Exception):
    """Internal: room is lacking because other threads hold it. Never reaches the program."""


class Movement(Copies):
    """What makes room on devices, one block at a time.

    Strategies, callbacks and copies run without the lock: a decision is taken on a snapshot and
    checked again before it is carried out.
    """

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
        others = others or any(ident != me for ident in list(self.hazards))
        others = others or any(ident != me for ident in list(self.native_blocks))
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
