"""Copies of blocks: write back, fetch, arrive, and what is stale after one."""

from __future__ import annotations

import time
import weakref

import torch

from ..base.errors import TransferError
from ..devices.base import Device, empty_bytes
from .block import Block, Replica
from .bookkeeping import Books
from .states import CLEAN, DIRTY, FILLING, INVALID

#: How long a thread waits for others to let go of bytes before it looks again, in seconds.
PATIENCE_S = 0.02
#: Pauses between attempts to copy home what somebody needs there, in seconds: the only copy is on
#: the device, so a link that fails gets time to recover.
LINK_PAUSES_S = (0.001, 0.01, 0.1, 1.0)


class RoomTakenError(Exception):
    """Internal: another thread has taken the room that was made. Never reaches the program."""


class Copies(Books):
    """What copies a block's bytes between devices, and keeps the states of its replicas true."""

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
