"""Bytes that several have: blocks that share until one is written, and bytes that have left us."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from ..base.errors import ExposedError, TransferError
from ..devices.base import Device
from ..devices.storages import bytes_of, over_same_memory, storage_of
from .block import Block, Replica
from .bookkeeping import Books
from .copies import Copier
from .exposure import SHARED, TWIN_USERS, Exposure
from .holds import PATIENCE_ROUNDS, PATIENCE_S, Holds
from .states import CLEAN, FILLING
from .transfer import copy_of
from .twins import twin_of

#: How long an operator waits for those of other threads that read an older copy, in seconds: then
#: it runs at home.
READERS_S = 1.0


class Sharing:
    """Copy on write between blocks, and exposure to arrays, storages and raw pointers."""

    def __init__(self, books: Books, holds: Holds, copier: Copier) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier

    # -- copy on write --------------------------------------------------------------------------

    def copy_on_write(self, block: Block) -> Block:
        """Return a new block that shares the bytes of another until one of them is written."""
        host = self._books.host
        while True:
            self._copier.refresh(block)
            # Whoever holds exposed bytes may write them unseen: those are copied now.
            home = None if block.exposure is None else self._copier.bring_home(block)
            with self._books.lock:
                if home is None and block.exposure is not None:
                    continue  # they have been handed out meanwhile
                twin = Block(block.nbytes, self._books.tick)
                twin.is_persistent = block.is_persistent
                if home is None:
                    block.share_with(twin)
                else:
                    twin.replicas[host] = Replica(twin, host, copy_of(home.base), CLEAN)
                return twin

    def unshare(self, block: Block) -> None:
        """Give a block bytes of its own before it is written.

        The oldest sharer keeps the replicas, since views over them may be kept; the others move to
        a copy at home, which they go on sharing.
        """
        while True:
            with self._books.lock:  # also to look: sharers that part are nobody's for a moment
                if not block.is_shared:
                    return
            self._copier.bring_home(block)
            with self._books.lock:
                self._wait_for_readers(block)
                # Meanwhile another sharer may have left and taken this one to other replicas.
                home = block.readable_on(self._books.host)
                if home is not None and block.is_shared:
                    self._part(block, home)

    def _part(self, block: Block, home: Replica) -> None:
        """Separate a block from its sharers; their bytes at home are current (lock held)."""
        host = self._books.host
        sharers = [b for reference in block.sharers or () if (b := reference()) is not None]
        movers = [b for b in sharers if b is not sharers[0]] if block is sharers[0] else [block]
        # All that can fail comes first: each mover has one of the two at any moment.
        copied = Replica(movers[0], host, copy_of(home.base), CLEAN)
        copied.holders = [weakref.ref(mover) for mover in movers]
        replicas = {host: copied}
        for mover in movers:
            self._books.parts.forget(mover)
            mover.move_to(replicas, copied.holders)
        if block is sharers[0] and block.sharers is not None:
            # Also who has been kept from becoming one (`Block.share_with`).
            block.sharers[:] = [weakref.ref(block)]
        _ = block.is_shared

    def _wait_for_readers(self, block: Block) -> None:
        """Wait for other threads' operators on the bytes that a sharer is about to write."""
        if threading.get_ident() in self._holds.pins_by_thread:
            return  # an operator inside an operator would wait for itself
        for _ in range(PATIENCE_ROUNDS):
            if not any(replica.pins for replica in block.replicas.values()):
                return
            self._books.wait_for_release(PATIENCE_S)

    def _has_waited_for_those_before(self, block: Block) -> bool:
        """Wait for other threads' operators that began before bytes have left us (lock held).

        What is handed out is what they have left. Where one takes too long, it is brought up to
        date once that has ended, and what was written outside meanwhile is lost. Whoever begins
        from now on minds who has them: readers may be so many that one is always there.
        """
        holds, me = self._holds, threading.get_ident()
        if holds.is_alone() or me in (*holds.pins_by_thread, *holds.native_blocks):
            return False  # an operator inside an operator would wait for itself
        before = holds.by_others(block)
        for waited in range(PATIENCE_ROUNDS):
            if not before:
                return waited > 0
            self._books.wait_for_release(PATIENCE_S)
            now = holds.by_others(block)
            before = {who: hold for who, hold in before.items() if now.get(who) is hold}
        return True

    # -- exposure -------------------------------------------------------------------------------

    def expose(
        self, block: Block, where: Device | None, why: str, *, forever: bool = False
    ) -> tuple[torch.UntypedStorage, Device]:
        """Hold a block at home, or where it is, and return a storage that may be given away.

        The storage is a twin: another object over the same memory, by whose users we see when the
        last holder outside is gone.

        Parameters
        ----------
        where : Device or None
            Home. None: where the bytes are when they are held.

        Returns
        -------
        tuple of UntypedStorage and Device
            And where they are held.

        Raises
        ------
        ExposedError
            Somebody outside holds the bytes on another device, where they may be written.
        """
        while True:
            self.unshare(block)
            if where is None:
                # What was written through an array that is gone is at home, and nowhere else.
                self._copier.refresh(block)
            device = where or self._where_held(block)
            if device.is_host:
                self._copier.bring_home(block)
            device.about_to_change(block.replicas[device].base)
            self._copier.refresh(block)
            with self._books.lock:
                block.ready = None  # first: whoever comes from now on sees it
                if block.is_shared:
                    continue  # by a clone that another thread has taken meanwhile
                _refuse_if_elsewhere(block, device, why)
                if block.readable_on(device) is None:
                    continue  # written elsewhere, or evicted
                # Held from here on: else nobody outside would seem to hold it.
                storage = self._hand_out(block, device, why, forever=forever)
                has_waited = self._has_waited_for_those_before(block)
                break
        if has_waited and device.is_host:
            self._copier.bring_home(block)  # what those have left
        # Again: another thread may have begun to copy it meanwhile. From here on they mind.
        device.about_to_change(block.replicas[device].base)
        self._books.log.note(block.name, f"expose {device.name}", why)
        return storage, device

    def _where_held(self, block: Block) -> Device:
        """Where somebody outside holds a block; else where it is. It may be gone from there."""
        exposure = block.exposure
        if exposure is None or not exposure.alive:
            return self._books.where(block)
        # An array is at home, also while what counts is a copy for one operator elsewhere.
        is_there = exposure.device.is_host or block.readable_on(exposure.device) is not None
        return exposure.device if is_there else self._books.where(block)

    def _hand_out(
        self, block: Block, device: Device, why: str, *, forever: bool
    ) -> torch.UntypedStorage:
        """Note that bytes leave us which nobody shares (lock held)."""
        self._books.parts.forget(block)
        before, replica = block.exposure, block.replicas[device]
        exposure, base = before, replica.base
        if exposure is None or not exposure.is_over(storage_of(base), device):
            forever = forever or (before is not None and before.alive)
            exposure = replica.handed_out
            if exposure is None or not exposure.is_over(storage_of(base), device):
                twin = bytes_of(base)
                if not (device.is_host and storage_of(base).is_shared()):
                    # Who is given shared memory may hand it on, as what it is.
                    twin = over_same_memory(twin)
                exposure = Exposure(device, twin.untyped_storage(), why)
            exposure.why = why
        exposure.forever = exposure.forever or forever
        if device.is_host:
            replica.handed_out = exposure
        block.exposure = exposure  # last: it is true by now
        assert exposure.storage is not None
        return exposure.storage

    def renew(self, block: Block, device: Device) -> None:
        """Let an operator that begins now find nothing older of exposed bytes on a device.

        Operators of other threads that read an older copy are waited for. What is fetched after
        those is new enough for all who have waited: they go on together, and not in turns.

        Raises
        ------
        TransferError
            The others take too long, or may wait for this thread: the bytes at home are current.
        """
        holds, me = self._holds, threading.get_ident()
        before, until = _stale_count(block, device), time.monotonic() + READERS_S
        while True:
            self._copier.refresh(block)
            with self._books.lock:
                older = self._older_copy(block, device)
                if older is None or older.stale_count != before:
                    return
                if not older.pins:
                    continue  # they have just let go of it
                may_wait_for_us = me in (*holds.pins_by_thread, *holds.native_blocks)
                if may_wait_for_us or time.monotonic() > until:
                    break
                self._books.wait_for_release(PATIENCE_S)
        host = self._books.host.name
        raise TransferError(
            f"No copy of {block.name} to {device.name}: operators of other threads still read what "
            f"it was there before. Those on {host} can read it.",
            source=host,
            destination=device.name,
            nbytes=block.nbytes,
        )

    def _older_copy(self, block: Block, device: Device) -> Replica | None:
        """Return what a device has of exposed bytes, unless it is what counts (lock held)."""
        replica, exposure = block.replicas.get(device), block.exposure
        if exposure is None or exposure.device is device or replica is None:
            return None
        if replica in self._holds.pinned.get(threading.get_ident(), ()):
            return None  # an operator inside an operator has what that one has
        return replica if replica.state in (CLEAN, FILLING) else None

    def move_to_shared_memory(self, block: Block) -> None:
        """Exchange bytes at home for a copy that other processes can map.

        Who was given the memory before keeps that, alone: plain torch frees it.
        """
        home = self._copier.bring_home(block)
        with self._books.lock:
            exposure = block.exposure
            is_held = exposure is not None and not exposure.device.is_host and exposure.alive
            if is_held or home.base.untyped_storage().is_shared():
                return
            shared = copy_of(home.base)
            shared.untyped_storage().share_memory_()
            block.ready = None
            block.is_rehoused = True
            self._books.parts.forget(block)
            home.rehouse(shared)
            block.exposure = None

    def grow(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Take all of a storage outside that has more bytes than its block; `resized` follows."""
        host = self._books.host
        self.unshare(block)
        self._copier.bring_home(block)
        self._copier.written(block, host)  # what others have is too small
        with self._books.lock:
            block.ready = None
            block.is_rehoused = True
            if block.exposure is None:
                block.exposure = Exposure(host, storage, SHARED, own_count=TWIN_USERS)
            block.replicas[host].rehouse(twin_of(storage, 0, storage.nbytes()))

    def own_home_bytes(self, block: Block) -> None:
        """Exchange borrowed bytes at home for a copy of our own, if nobody outside holds them."""
        home = self._copier.bring_home(block)
        with self._books.lock:
            if block.exposure is None and not home.base.untyped_storage().resizable():
                block.ready = None
                block.is_rehoused = True
                self._books.parts.forget(block)
                home.rehouse(copy_of(home.base))


def _stale_count(block: Block, device: Device) -> int:
    replica = block.replicas.get(device)
    return 0 if replica is None else replica.stale_count


def _refuse_if_elsewhere(block: Block, device: Device, why: str) -> None:
    exposure = block.exposure
    if exposure is not None and exposure.device is not device and exposure.alive:
        raise ExposedError(
            f"{block.name} is held on {exposure.device.name} ({exposure.why}), so its memory on "
            f"{device.name} cannot be handed out ({why}). Let go of the one before you ask for "
            "the other, or use a clone().",
            block=block.name,
            device=exposure.device.name,
        )
