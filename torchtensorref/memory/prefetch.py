"""Prefetch: what a strategy wants fetched or written back ahead of need, never waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.errors import PromisedError, TransferError
from ..devices.base import Device
from ..strategy import Prefetch
from .block import Block
from .bookkeeping import Books
from .copies import Copier
from .eviction import Evictor
from .filling import RoomTakenError
from .holds import Holds
from .states import CLEAN, DIRTY, FILLING
from .strategy_feed import StrategyFeed


class Prefetcher:
    """Copies that nobody has asked for yet: refused where they would do harm, never an error."""

    def __init__(
        self, books: Books, holds: Holds, copier: Copier, evictor: Evictor, feed: StrategyFeed
    ) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier
        self._evictor = evictor
        self._feed = feed

    def issue_wishes(self, device: Device) -> None:
        """Ask the strategy what to write back and fetch early, and issue it; never waits."""
        leaving, coming = self._feed.wishes(device)
        for block_id in leaving:
            block = self._books.known.get(block_id)
            replica = block.replicas.get(device) if block is not None else None
            if replica is not None and replica.state is DIRTY:
                self._evictor.try_write_back(replica)
        self.prefetch(device, coming)

    def prefetch(self, device: Device, wishes: Sequence[Prefetch]) -> list[Block]:
        """Issue copies ahead of need until one is refused, and tell the strategy of all at once.

        Returns
        -------
        list of Block
            Those whose copies were issued.
        """
        issued: list[Block] = []
        try:
            for wish in wishes:
                if not self._prefetch(device, wish.block_id, wish.victims, issued):
                    break
        finally:
            if issued:
                self._feed.tell_prefetches(issued)
        return issued

    def _prefetch(
        self, device: Device, block_id: int, victims: Sequence[int], issued: list[Block]
    ) -> bool:
        """Issue the copy of one block ahead of need, in the room of its victims, and note it.

        Returns
        -------
        bool
            False where it was refused as a whole: the block is gone, shared, exposed or there
            already, or room is lacking even without the victims. Never an error.
        """
        books = self._books
        block = books.known.get(block_id)
        if block is None or block.exposure is not None or block.sharers is not None:
            return False
        with books.lock:
            books.bury()
            if block.is_on(device):
                return False
            home = block.replicas.get(books.host)
            if home is None or home.state is not CLEAN:
                return home is not None and home.state is FILLING  # later: it is on its way home
            chosen = self._holds.free_among(device, victims)
            ledger = books.ledgers[device]
            free_nbytes = ledger.most_nbytes - ledger.resident_nbytes
            if free_nbytes + sum([r.nbytes for r in chosen]) < block.nbytes:
                return False
        try:
            for victim in chosen:
                self._evictor.evict(victim, f"{self._feed.strategy.name}: room to prefetch")
            self._copier.fetch(block, device, ahead=True)
            issued.append(block)
        except (RoomTakenError, PromisedError):  # another thread has made a promise of it meanwhile
            return False
        except (torch.OutOfMemoryError, TransferError) as error:
            books.log.note(block.name, f"no prefetch {device.name}", str(error)[:80])
            return False
        return True
