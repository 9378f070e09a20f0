"""Fetching: the operands of an operator that are not where it runs, into room that is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices.base import Device
from .block import Block
from .bookkeeping import Books
from .budget import OutOfBudgetError
from .copies import Copier
from .eviction import Evictor, HeldByOthersError
from .filling import RoomTakenError
from .holds import PATIENCE_ROUNDS
from .states import INVALID, READABLE


class Fetcher:
    """Fetches what is missing of the blocks that an operator has pinned (no lock held)."""

    def __init__(self, books: Books, copier: Copier, evictor: Evictor) -> None:
        self._books = books
        self._copier = copier
        self._evictor = evictor

    def fetch_missing(
        self, device: Device, blocks: Sequence[Block], expected: int, why: str
    ) -> None:
        """Make pinned blocks readable on a device, with room for results of `expected` bytes.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError, TransferError
            They cannot be brought there.
        HeldByOthersError
            Other threads hold what they need, or have given up what had been fetched.
        """
        books = self._books
        missing, need_nbytes = [], 0
        with books.lock:
            for block in blocks:
                if block.replicas[device].state is INVALID:
                    missing.append(block)
                    need_nbytes += block.nbytes
            books.counts.miss_count += len(missing)
            books.counts.slow_hit_count += len(blocks) - len(missing)
            # Also where nothing is missing: the budget may have been lowered.
            ledger = books.ledgers[device]
            is_over = ledger.resident_nbytes > ledger.most_nbytes
        if need_nbytes or expected or is_over:
            try:
                need_all_nbytes = need_nbytes + expected
                self._evictor.make_room(device, need_all_nbytes, "operands, results", may_fail=True)
            except OutOfBudgetError:
                # What results take is only expected: operands must fit, results are seen to later.
                self._evictor.make_room(device, need_nbytes, "operands", may_fail=True)
        for block in missing:
            self._fetch_with_room(block, device, why)
        self._let_arrive(device, blocks, why)

    def _let_arrive(self, device: Device, blocks: Sequence[Block], why: str) -> None:
        """Let compute wait for what comes; what has failed on its way is fetched once more."""
        with self._books.lock:
            failed = [
                block
                for block in blocks
                if (replica := block.replicas[device]).state not in READABLE
                and not self._copier.arrivals.settle(replica)
            ]
        for block in failed:
            self._copier.transfer.counts.retry_count += 1
            self._fetch_with_room(block, device, why)
        with self._books.lock:
            for block in failed:
                self._copier.arrivals.arrive(block.replicas[device])
                if block.replicas[device].state not in READABLE:
                    raise HeldByOthersError

    def _fetch_with_room(self, block: Block, device: Device, why: str) -> None:
        """Fetch into the room that was made; make it again where another thread has taken it.

        If the device refuses the allocation all the same, as much again is evicted, once.
        """
        has_been_refused = False
        for _ in range(PATIENCE_ROUNDS):
            try:
                return self._copier.fetch(block, device, why=why)
            except RoomTakenError:
                self._evictor.make_room(device, block.nbytes, "operands", may_fail=True)
            except torch.OutOfMemoryError:
                if has_been_refused:
                    raise
                has_been_refused = True
                self._evictor.evict_some(device, block.nbytes, may_fail=True)
        raise HeldByOthersError
