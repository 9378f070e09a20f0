"""Readiness: which blocks operators may use without asking anybody, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..devices.base import Device
from .block import Block, Replica
from .bookkeeping import Books
from .copies import Copier
from .holds import Holds
from .leases import Lease
from .states import CLEAN, DIRTY, FILLING, INVALID

#: Operators on blocks up to this size run at home as long as nothing larger takes part.
AT_HOME_NBYTES = 16


class Readiness:
    """Opens and closes the ready path to blocks (`Block.ready`)."""

    def __init__(self, books: Books, holds: Holds, copier: Copier) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier

    def set_ready(self, block: Block, device: Device) -> None:
        """Open the ready path to a block where nothing has to be decided about it (lock held)."""
        if (block.is_persistent and self._books.wants_every_use) or not self._open([block], device):
            block.ready = None

    def _open(self, blocks: Sequence[Block], device: Device) -> list[Block]:
        """Open the ready path to blocks whose bytes are there, and ours alone (lock held).

        Returns
        -------
        list of Block
            Those that were opened.
        """
        opened: list[Block] = []
        host, bases = self._books.host, []
        for block in () if self._books.is_left(device) else blocks:
            replicas = block.replicas
            replica, home = replicas.get(device), replicas.get(host)
            if (
                replica is None
                or replica.state not in (CLEAN, DIRTY)
                or block.exposure is not None
                or block.sharers is not None
                or block.left
            ):
                continue
            block.owned = replica.state is DIRTY and (home is None or home.state is INVALID)
            bases.append(replica.base)
            opened.append(block)
        if device.notes_uses:
            device.forget_uses(bases)
        for block in opened:
            block.ready = device
        return opened

    def settle_at_home(self, block: Block) -> None:
        """Open the ready path at home to a small block that is nowhere else.

        Flags, counters and positions: an operator on them takes less time than a copy would.
        """
        block.ready = None
        if (
            block.nbytes <= AT_HOME_NBYTES
            and block.exposure is None
            and block.sharers is None
            and not block.left
            and not block.is_rehoused
            and not block.is_persistent
            and block.readable_on(self._books.host) is not None
            # What is still on its way elsewhere would arrive without what is written here.
            and block.accelerator() is None
        ):
            block.owned = True
            block.ready = self._books.host

    # -- what the strategy hears of -------------------------------------------------------------

    def open_watched(self, blocks: Sequence[Block], device: Device, minds_time: bool) -> bool:
        """Open the ready path to blocks for one operator; False if one of them is not there.

        Whatever it says, `close_watched` closes them again.

        Parameters
        ----------
        minds_time : bool
            What has not arrived yet is not there: it may be computed elsewhere meanwhile.
        """
        books = self._books
        with books.lock:
            if self._is_over_budget(device):
                return False
            for block in blocks:
                replica = block.replicas.get(device)
                if replica is None or not self._let_arrive(replica, minds_time):
                    return False
            if len(self._open(blocks, device)) < len(blocks):
                return False
            books.counts.slow_hit_count += len(blocks)
        return True

    def open_held(self, blocks: Sequence[Block], device: Device) -> bool:
        """Open the ready path to blocks that are there, or held; False if one cannot be."""
        with self._books.lock:
            closed = [block for block in blocks if block.ready is not device]
            return len(self._open(closed, device)) == len(closed)

    def lease(self, device: Device, expected: Sequence[int]) -> Lease | None:
        """Open the ready path to blocks that are used next, as far as they are there.

        What is missing is passed over, since the program may do without it; what is on its way is
        about to be used, and ends it.

        Parameters
        ----------
        expected : sequence of int
            Their numbers, in the order of the program.

        Returns
        -------
        Lease or None
            None for less than two of them: then each use is told by itself.
        """
        books = self._books
        if len(expected) < 2:
            return None
        with books.lock:
            there: list[Block] = []
            for block_id in () if self._is_over_budget(device) else expected:
                block = books.known.get(block_id)
                replica = block.replicas.get(device) if block is not None else None
                if block is None or replica is None or not block.is_persistent:
                    continue
                # Let nobody wait for a copy before its reader comes.
                if not self._let_arrive(replica, True):
                    break
                there.append(block)
            opened = self._open(there, device)
            return Lease(books.ledgers[device], opened) if opened else None

    def close_watched(self, blocks: Sequence[Block], device: Device) -> None:
        """Close the ready path to those of the blocks whose uses the strategy wants to hear."""
        if self._books.wants_every_use:
            self.close([block for block in blocks if block.is_persistent], device)

    def close(self, blocks: Sequence[Block], device: Device) -> None:
        """Close the ready path to blocks on a device."""
        with self._books.lock:
            closed = [block for block in blocks if block.ready is device]
            for block in closed:
                block.ready = None
            if device.notes_uses:
                self.note_uses(device, [block.replicas[device] for block in closed])

    def note_uses(self, device: Device, replicas: Sequence[Replica]) -> None:
        """Tell a device who used its replicas last, where that can be known (lock held)."""
        known: list[Any] = []
        unknown: list[Any] = []
        is_alone: bool | None = None  # asked once
        for replica in replicas:
            block = replica.block
            if block is not None and block.ready is replica.device:
                continue  # it was forgotten when it was opened
            is_closed = block is not None and block.ready is None and block.exposure is None
            # Another thread on the ready path may have looked before it was closed.
            if is_closed and is_alone is None:
                is_alone = self._holds.is_alone_on_ready_path()
            (known if is_closed and is_alone else unknown).append(replica.base)
        if known:
            device.note_uses(known)
        if unknown:
            device.forget_uses(unknown)

    def _let_arrive(self, replica: Replica, minds_time: bool) -> bool:
        """Let compute wait for what is on its way; False if something is to be decided about it."""
        arrival = replica.arrival
        if replica.state is FILLING:
            if arrival is None or (minds_time and not arrival.is_done()):
                return False
            return self._copier.arrivals.settle(replica)
        return True

    def _is_over_budget(self, device: Device) -> bool:
        """Whether the next operator has to make room first: the budget was lowered."""
        ledger = self._books.ledgers[device]
        return ledger.resident_nbytes > ledger.budget.limit_nbytes
