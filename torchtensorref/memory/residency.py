"""Residency: the part of the manager that acts for whole operators, and on sharing of bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..base.errors import ExposedError
from ..devices.base import Device, bytes_of
from .block import Block, Exposure, Replica, graveyard
from .budget import OutOfBudgetError
from .copies import PATIENCE_S, RoomTakenError
from .eviction import PATIENCE_ROUNDS, HeldByOthersError
from .prefetch import LookAhead
from .states import CLEAN, DIRTY, FILLING, INVALID
from .transfer import copy_of

#: Operators on blocks up to this size run at home as long as nothing larger takes part.
AT_HOME_NBYTES = 16


class Residency(LookAhead):
    """The blocks' bytes on all devices: held for operators, born of them, shared and exposed."""

    # -- operators ------------------------------------------------------------------------------

    def acquire(
        self, device: Device, blocks: Sequence[Block], written: Sequence[Block], expected: int
    ) -> list[Replica]:
        """Make blocks readable on a device and hold them there: all of them, or none.

        Parameters
        ----------
        device : Device
            Where the operator will run.
        blocks, written : sequence of Block
            Distinct operands, and those of them that the operator writes.
        expected : int
            Bytes its results are expected to take; room is made for them if there is any.

        Returns
        -------
        list of Replica
            What is held, to be handed to `release`.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError, TransferError
            They cannot be brought there. Nothing is held.
        """
        for block in written:
            self.unshare(block)
        if device.is_host:
            return self._pin_at_home(blocks)
        for _ in range(PATIENCE_ROUNDS):
            held = self._pin(device, blocks)
            try:
                self._fetch_missing(device, blocks, expected)
                for block in written:
                    self._end_write_back(block)
                return held
            except HeldByOthersError:
                self.release(held)
                with self.lock:
                    self.unpinned.wait(PATIENCE_S)
            except BaseException:
                self.release(held)
                raise
        need_nbytes = sum(block.nbytes for block in blocks)
        limit_nbytes = self.ledgers[device].budget.limit_nbytes
        raise OutOfBudgetError(device.name, need_nbytes, limit_nbytes, limit_nbytes)

    def _end_write_back(self, block: Block) -> None:
        """Wait for a copy home that reads what an operator is about to write, and holds."""
        with self.lock:
            home = block.replicas.get(self.host)
            if home is not None:
                self._wait_for_issue(home)
            if home is None or home.arrival is None:
                return
            if any(replica.state is DIRTY for replica in block.replicas.values()):
                # Compute waits, the host does not; what arrives is stale at once.
                home.arrival.wait()
                home.arrival = None
                home.become(INVALID, "written while it was copied home")

    def _pin(self, device: Device, blocks: Iterable[Block]) -> list[Replica]:
        me = threading.get_ident()
        with self.lock:
            held = []
            for block in blocks:
                self.refresh(block)
                held.append(self._replica_on(block, device))
            # All or none: nothing above is held yet, nothing below can fail.
            for replica in held:
                replica.pins += 1
            if held:
                self._pins_by_thread[me] = self._pins_by_thread.get(me, 0) + len(held)
        return held

    def _pin_at_home(self, blocks: Sequence[Block]) -> list[Replica]:
        """At home nothing is evicted: pins only keep sharers from writing what is being read."""
        for block in blocks:
            self.bring_home(block)
        with self.lock:
            held = [block.replicas[self.host] for block in blocks]
            for replica in held:
                replica.pins += 1
        return held

    def release(self, held: Sequence[Replica]) -> None:
        """Let go of what `acquire` holds."""
        me = threading.get_ident()
        with self.lock:
            for replica in held:
                replica.pins -= 1
                if not replica.device.is_host:
                    self._pins_by_thread[me] -= 1
                    if replica.device.notes_uses:
                        self._note_use(replica, me)
            if self._pins_by_thread.get(me) == 0:
                del self._pins_by_thread[me]
            self.unpinned.notify_all()

    def _note_use(self, replica: Replica, me: int) -> None:
        """Tell a device who was the last to use a replica, where that can be known (lock held)."""
        block = self.block_of(replica)
        is_closed = block is not None and block.ready is None and block.exposure is None
        # Another thread on the fast path may have looked before it was closed.
        if is_closed and (not self.hazards or tuple(self.hazards) == (me,)):
            replica.device.note_use(replica.base)
        else:
            replica.device.forget_use(replica.base)

    def _fetch_missing(self, device: Device, blocks: Sequence[Block], expected: int) -> None:
        with self.lock:
            missing = [b for b in blocks if b.replicas[device].state is INVALID]
            self.counts.miss_count += len(missing)
            self.counts.hit_count += len(blocks) - len(missing)
            # Also where nothing is missing: the budget may have been lowered.
            ledger = self.ledgers[device]
            is_over = ledger.resident_nbytes > ledger.budget.limit_nbytes
        need_nbytes = sum(block.nbytes for block in missing)
        if need_nbytes or expected or is_over:
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
        has_been_refused = False
        for _ in range(PATIENCE_ROUNDS):
            self.make_room(device, block.nbytes, "operands")
            try:
                return self.fetch(block, device)
            except RoomTakenError:
                continue
            except torch.OutOfMemoryError:
                if has_been_refused:
                    raise
                has_been_refused = True
                self.evict_some(device, block.nbytes)
        raise HeldByOthersError

    def set_ready(self, block: Block, device: Device) -> None:
        """Open the fast path to a block where nothing has to be decided about it (lock held)."""
        replica = block.replicas.get(device)
        if (
            replica is None
            or replica.state not in (CLEAN, DIRTY)
            or block.exposure is not None
            or block.sharers is not None
            or (block.is_persistent and self.is_pressed and self.strategy.watches_accesses)
        ):
            block.ready = None
            return
        home = block.replicas.get(self.host)
        block.owned = replica.state is DIRTY and (home is None or home.state is INVALID)
        if device.notes_uses:
            device.forget_use(replica.base)
        block.ready = device

    def settle_at_home(self, block: Block) -> None:
        """Open the fast path at home to a small block that is nowhere else.

        Flags, counters and positions: an operator on them takes less time than a copy would.
        """
        block.ready = None
        if (
            block.nbytes <= AT_HOME_NBYTES
            and block.exposure is None
            and block.sharers is None
            and not block.is_rehoused
            and not block.is_persistent
            and len(block.readable_replicas()) == 1
            and block.readable_on(self.host) is not None
        ):
            block.ready = self.host
            block.owned = True

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

    def born(self, tensor: torch.Tensor, device: Device) -> Block:
        """Make the block of a kernel's fresh result, which owns its storage.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError
            It does not fit on the device, even after every legal eviction. Nothing has changed.
        """
        nbytes = tensor.untyped_storage().nbytes()
        if device.is_host:
            block = Block(nbytes, self.tick)
            block.replicas[device] = Replica(block, device, tensor, CLEAN)
            self.settle_at_home(block)
            return block
        ledger = self.ledgers[device]
        has_been_refused = False
        while True:
            is_refused = False
            with self.lock:
                if graveyard or ledger.dead:
                    self.bury()
                if ledger.resident_nbytes + nbytes <= ledger.budget.high_nbytes:
                    try:
                        if device.is_witness:
                            device.account(tensor)
                        block = ledger.bear(tensor, nbytes, self.tick)
                        if self.is_pressed and self.strategy.watches_accesses:
                            self.unheard.append(weakref.ref(block))
                        return block
                    except torch.OutOfMemoryError:
                        if has_been_refused:
                            raise
                        is_refused = has_been_refused = True
            # Without the lock: the strategy is asked, and who tells it something may need the lock.
            if is_refused:
                self.evict_some(device, nbytes)
            else:
                self.make_room_patiently(device, nbytes, "results")

    # -- sharing and exposure -------------------------------------------------------------------

    def unshare(self, block: Block) -> None:
        """Give a block bytes of its own before it is written (copy on write).

        The oldest sharer keeps the replicas, since views over them may be kept; the others move to
        a copy at home, which they go on sharing.
        """
        while True:
            with self.lock:  # also to look: sharers that part are nobody's for a moment
                if not block.is_shared:
                    return
            self.bring_home(block)
            with self.lock:
                self._wait_for_readers(block)
                # Meanwhile another sharer may have left and taken this one to other replicas.
                home = block.readable_on(self.host)
                if home is not None and block.is_shared:
                    self._part(block, home)

    def _part(self, block: Block, home: Replica) -> None:
        """Separate a block from its sharers; their bytes at home are current (lock held)."""
        sharers = [b for reference in block.sharers or () if (b := reference()) is not None]
        movers = [b for b in sharers if b is not sharers[0]] if block is sharers[0] else [block]
        for mover in movers:
            mover.stop_sharing()
        first = movers[0]
        first.replicas[self.host] = Replica(first, self.host, copy_of(home.base), CLEAN)
        for mover in movers[1:]:
            first.share_with(mover)
        _ = block.is_shared

    def _wait_for_readers(self, block: Block) -> None:
        """Wait for other threads' operators on the bytes that a sharer is about to write."""
        if threading.get_ident() in self._pins_by_thread:
            return  # an operator inside an operator would wait for itself
        for _ in range(PATIENCE_ROUNDS):
            if not any(replica.pins for replica in block.replicas.values()):
                return
            self.unpinned.wait(PATIENCE_S)

    def copy_on_write(self, block: Block) -> Block:
        """Return a new block that shares the bytes of another until one of them is written."""
        with self.lock:
            self.refresh(block)
            is_exposed = block.exposure is not None
        # Whoever holds exposed bytes may write them unseen: those are copied now.
        home = self.bring_home(block) if is_exposed else None
        with self.lock:
            twin = Block(block.nbytes)
            twin.is_persistent = block.is_persistent
            if home is None:
                block.share_with(twin)
            else:
                twin.replicas[self.host] = Replica(twin, self.host, copy_of(home.base), CLEAN)
        return twin

    def expose(self, block: Block, device: Device, why: str, *, forever: bool = False) -> Any:
        """Hold a block on a device and return a storage over its bytes that may be given away.

        The caller has made the block readable there. The storage is a twin: another object over
        the same memory, by whose users we see when the last holder outside is gone.

        Raises
        ------
        ExposedError
            Somebody outside holds the bytes on another device, where they may be written.
        """
        if self.recorder is not None:
            self.recorder.mistrust(f"bytes are handed out: {why}")
        self.unshare(block)
        device.about_to_change(block.replicas[device].base)
        with self.lock:
            self.refresh(block)
            block.ready = None
            exposure = block.exposure
            if exposure is not None and exposure.device is not device and exposure.alive:
                raise ExposedError(
                    f"{block.name} is held on {exposure.device.name} ({exposure.why}), so its "
                    f"memory on {device.name} cannot be handed out ({why}). Let go of the one "
                    "before you ask for the other, or use a clone().",
                    block=block.name,
                    device=exposure.device.name,
                )
            if exposure is None or exposure.device is not device or exposure.storage is None:
                twin = torch.from_dlpack(  # type: ignore[attr-defined]
                    bytes_of(block.replicas[device].base)
                )
                forever = forever or (exposure is not None and exposure.forever)
                exposure = Exposure(device, twin.untyped_storage(), why, forever=forever)
                block.exposure = exposure
            exposure.forever = exposure.forever or forever
        self.log.note(block.name, f"expose {device.name}", why)
        return exposure.storage

    def own_home_bytes(self, block: Block) -> None:
        """Exchange borrowed bytes at home for a copy of our own, if nobody outside holds them."""
        home = self.bring_home(block)
        with self.lock:
            if block.exposure is None and not home.base.untyped_storage().resizable():
                home.base = copy_of(home.base)
                block.is_rehoused = True
                block.ready = None

    def note_resized(self, block: Block, nbytes: int) -> None:
        """Note that the program has resized a storage: only the bytes at home are current."""
        block.nbytes = nbytes
        for replica in block.replicas.values():
            replica.nbytes = nbytes

    def note_given_by_value(self, block: Block) -> None:
        """Count that an operator was given the number in a block instead of its bytes."""
        block.carried_count += 1
