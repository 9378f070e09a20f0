"""Copies of blocks: write back, fetch, arrive, and what is stale after one."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from ..base.errors import TransferError
from ..devices.base import Device
from ..devices.host.readers import host_readers
from . import telling
from .arrivals import Arrivals
from .block import Block, Replica
from .bookkeeping import Books
from .filling import Filling
from .holds import Holds, is_exposed_on
from .in_flight import InFlight
from .leaving import Leaving, finish_issue, note_failure
from .ledger import lost
from .peers import Peers
from .rehousing import Rehousing
from .states import CLEAN, DIRTY, FILLING, INVALID
from .transfer import Looking, Transfer, wait_if_issued
from .twins import follow_holder

#: Pauses between attempts to copy home what somebody needs there, in seconds: the only copy is on
#: the device, so a link that fails gets time to recover.
LINK_PAUSES_S = (0.001, 0.01, 0.1, 1.0)


class Copier:
    """Copies a block's bytes between devices, and keeps the states of its replicas true.

    Notes
    -----
    The host waits for a copy without the lock; whoever needs what arrives waits first and looks
    again under the lock. Compute waits in its own stream, which takes the host no time.
    """

    def __init__(self, books: Books, holds: Holds) -> None:
        self._books = books
        self._holds = holds
        self.transfer = Transfer()
        self.in_flight = InFlight()
        self.rehousing = Rehousing(books, holds)
        self.filling = Filling(books, holds)
        self.peers = Peers(
            books, holds, self.filling, self.transfer, self.in_flight, self.replica_on
        )
        self.leaving = Leaving(books, holds, self.transfer)
        self.arrivals = Arrivals(books, holds, self.filling, self.peers)

    # -- home -----------------------------------------------------------------------------------

    def write_back(self, replica: Replica) -> None:
        """Copy dirty bytes home; afterwards the replica is clean (lock not held).

        Raises
        ------
        TransferError
            The copy failed; the replica is still dirty, and whole.
        """
        with self._books.lock:
            home = self.leaving.begin_wanted(replica)
        if home is not None:
            self.leaving.issue(replica, home)
            self.arrivals.wait_for(home)

    def bring_home(self, block: Block) -> Replica:
        """Make the bytes at home current; return that replica.

        Raises
        ------
        TransferError
            The copy failed again and again; nothing is lost, the bytes are where they were.
        LostError
            There is no copy of them any more.
        """
        books = self._books
        self.refresh(block)  # once: what is exposed elsewhere is distrusted again at each look
        while True:
            with books.lock:
                home = block.readable_on(books.host)
                if home is not None:
                    return home
                source = self._dirty_replica(block)
                home = self.leaving.home_of(block)
                if source is None and home.state is not FILLING:
                    raise lost(block)
            if source is None:
                self.arrivals.wait_for(home)
            else:
                self._write_back_patiently(source)

    def _write_back_patiently(self, replica: Replica) -> None:
        for pause_s in LINK_PAUSES_S:
            try:
                return self.write_back(replica)
            except TransferError as error:
                self.note_failure(replica, error)
                time.sleep(pause_s)
        self.write_back(replica)

    def _dirty_replica(self, block: Block) -> Replica | None:
        """Return the only current replica, on an accelerator (lock held)."""
        for replica in block.replicas.values():
            if replica.device is not self._books.host:
                self.arrivals.settle(replica)
                if replica.state is DIRTY:
                    return replica
        return None

    def settle_home(self) -> None:
        """Wait for every copy home that nobody has waited for (lock not held)."""
        while True:
            with self._books.lock:
                if not self.leaving.not_awaited:
                    return
                home = self.leaving.not_awaited.popleft()
            self.arrivals.wait_for(home)

    def note_arrivals(self) -> None:
        """See which copies home have ended meanwhile, in their order (lock held)."""
        going = self.leaving.not_awaited
        while going:
            home = going[0]
            if home.state is FILLING and home.arrival is not None:
                arrival = home.arrival
                if not arrival.is_done():
                    return
                try:
                    self.arrivals.arrive(home)
                except TransferError as error:
                    note_failure(self._books, home, arrival)
                    self.note_failure(home, error)
            if going and going[0] is home:  # else a finalizer has come here in between
                going.popleft()

    # -- on the way home ------------------------------------------------------------------------

    def is_on_its_way_home(self, block: Block) -> bool:
        """Whether a dirty replica of a block is being copied home (lock held)."""
        home = block.replicas.get(self._books.host)
        return (
            home is not None
            and home.state is FILLING
            and any(replica.state is DIRTY for replica in block.replicas.values())
        )

    def end_write_back(self, block: Block) -> None:
        """Order a copy home before an operator that is about to write what it reads, and holds."""
        home = block.replicas.get(self._books.host)
        if home is None or home.state is not FILLING:
            return
        with suppress(TransferError):  # then home is stale, as it is about to be anyway
            finish_issue(self._books, block)
        with self._books.lock:
            home = block.replicas.get(self._books.host)
            if home is not None:
                self._holds.wait_for_issue(home)
            if home is not None and home.arrival is not None and self.is_on_its_way_home(block):
                # Compute waits, the host does not; what arrives is stale at once.
                home.arrival.wait()
                self.leaving.overtake(home)

    # -- fetch ----------------------------------------------------------------------------------

    def replica_on(self, block: Block, device: Device) -> Replica:
        """Return the replica on an accelerator, an empty one if there was none (lock held)."""
        replica = block.replicas.get(device)
        if replica is None:
            base = device.allocate(0)
            device.empty(base)
            replica = block.replicas[device] = Replica(block, device, base, INVALID)
        return replica

    def fetch(
        self, block: Block, device: Device, *, ahead: bool = False, why: str = telling.READS
    ) -> None:
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
        books, holds = self._books, self._holds
        if self.rehousing.waiting:
            self.rehousing.move_some()
        if books.is_spread and self.peers.bring(block, device, ahead=ahead, why=why):
            return
        if block.exposure is not None or block.promise is not None:
            self.refresh(block)
        while True:
            with books.lock:
                home = block.readable_on(books.host)
                if home is not None:
                    replica = self.replica_on(block, device)
                    if not self.filling.open(block, replica):
                        return
                    break
            self.bring_home(block)
        try:
            replica.arrival = self.transfer.fetch(home, replica, ahead=ahead)
            if host_readers.mirrors:
                self.rehousing.note_copy(home)
            if ahead:
                with books.lock:
                    self.in_flight.add(replica)
        except BaseException as error:
            wait_if_issued(device, error)
            with books.lock:
                self.filling.close(replica)
            raise
        finally:
            holds.issuing.pop(replica, None)
        telling.fetched(books, block.name, replica, ahead=ahead, why=why)

    # -- what is current ------------------------------------------------------------------------

    def refresh(self, block: Block) -> None:
        """Distrust the copies of bytes that are exposed elsewhere (lock not held)."""
        if block.promise is not None:
            self._books.asked(block)
        if block.exposure is None:
            return
        self.arrivals.wait_for_home(block)
        with self._books.lock:
            self._books.parts.forget(block)
            exposure = block.exposure
            if exposure is None:
                return
            host = self._books.host
            follow_holder(block, host)
            if not exposure.alive and not any(r.pins for r in block.replicas.values()):
                block.exposure = None  # after a last look: who has left may have written before
            held = block.replicas[exposure.device]
            for replica in list(block.replicas.values()):
                if replica is not held and replica.state is not INVALID and not replica.pins:
                    self.arrivals.settle(replica)
                    if replica.device is host or replica.state is CLEAN:
                        self._make_stale(replica, f"exposed on {held.device.name}: {exposure.why}")
            if held.device is not host and held.state is CLEAN:
                held.become(DIRTY, f"exposed: {exposure.why}")

    def written(self, block: Block, device: Device) -> None:
        """Note that an operator has written a block on a device, which it holds there.

        Other replicas are stale, also those that other threads have written meanwhile: torch
        promises no values then, and we that one of the writers is right.
        """
        books = self._books
        self.arrivals.wait_for_home(block)
        if device.is_host:
            self.leaving.let_land(block.replicas[device])
        with books.lock:
            books.parts.forget(block)
            block.ready = None
            self.arrivals.arrive(block.replicas[device])
            for replica in list(block.replicas.values()):
                self.arrivals.settle(replica)
            self._make_current(block.replicas[device])
            for replica in list(block.replicas.values()):
                if device.is_host and is_exposed_on(block, replica.device):
                    if replica.state is DIRTY:
                        replica.become(CLEAN, "it will be given what is written at home")
                elif replica.device is not device:
                    self._make_stale(replica, f"written on {device.name}")

    def has_been_written(self, block: Block, device: Device) -> None:
        """Note that the operator has ended of which `written` told (lock not held).

        Meanwhile another thread may have begun to copy what was being written: an evictor that had
        chosen the replica before the operator held it, or a reader. What it has got is stale.
        """
        if device.is_host:
            home = block.replicas.get(device)
            if home is not None:
                device.has_changed(home.base)
        with self._books.lock:
            self._books.parts.forget(block)
            others = [r for other, r in block.replicas.items() if other is not device]
        if any(replica.state is not INVALID for replica in others):
            with suppress(TransferError):  # what would have come is stale
                self.arrivals.wait_for_home(block)
            self.written(block, device)
        if block.exposure is not None and device.is_host:
            self._give_holder(block)
        elif block.exposure is not None and block.exposure.device.is_host:
            self.bring_home(block)  # it was handed out while the operator ran

    def _give_holder(self, block: Block) -> None:
        """Copy what was written at home to where somebody outside holds the block, in the end."""
        exposure = block.exposure
        if exposure is None or exposure.device.is_host or not exposure.alive:
            return
        home, held = block.replicas[self._books.host], block.replicas[exposure.device]
        self.transfer.fetch(home, held).synchronize()

    def _make_current(self, replica: Replica) -> None:
        """Let a replica that is being written be the one that counts (lock held)."""
        if replica.state is INVALID:
            self._holds.take_stale(replica)
            replica.become(CLEAN if replica.device.is_host else DIRTY, "written by an operator")
        elif replica.state is CLEAN and not replica.device.is_host:
            replica.become(DIRTY, "written by an operator")

    def _make_stale(self, replica: Replica, why: str) -> None:
        """A replica no longer current gives its bytes back; home keeps the room (lock held)."""
        if replica.state is INVALID:
            return  # it has been given back while its arrival was waited for
        if replica.state is DIRTY:
            replica.become(CLEAN, why)  # another one has become the current one
        replica.become(INVALID, why)
        if replica.device is not self._books.host:
            self._holds.give_back(replica)

    def peek(self, block: Block, look: Looking | None = None) -> tuple[torch.Tensor, int]:
        """Return host bytes with what is current, and where they begin; changes no state."""
        books = self._books
        if block.promise is not None:
            books.asked(block)
        while True:
            with books.lock:
                source: Replica | None
                exposure = block.exposure
                follow_holder(block, books.host)
                if exposure is not None and exposure.device is not books.host:
                    # Whoever holds it there, or has held it, may have written it unseen.
                    source = block.replicas[exposure.device]
                    self.arrivals.arrive(source)
                else:
                    home = block.readable_on(books.host)
                    if home is not None:
                        return home.base, 0
                    dirty = (r for r in block.replicas.values() if r.state is DIRTY)
                    source = next(dirty, None)
                if source is not None:
                    self._holds.pin([source])
                    break
            self.bring_home(block)  # its bytes are on their way home, and nowhere else
        try:
            return self.transfer.peek(source, look)
        finally:
            self._holds.unpin([source])

    def note_failure(self, replica: Replica, error: Exception) -> None:
        """Write into the log that a copy failed, and why."""
        telling.failed(self._books, replica, error)
