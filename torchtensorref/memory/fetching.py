"""Fetching: copies into replicas that were opened are issued, several of them together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import compress

import torch

from ..base.errors import TransferError
from ..devices.base import Device
from ..devices.host.readers import host_readers
from . import telling
from .block import Block, Replica
from .bookkeeping import Books
from .filling import Filling, RoomTakenError, replica_on
from .holds import Holds
from .in_flight import InFlight
from .rehousing import Rehousing
from .states import CLEAN, INVALID
from .transfer import Pair, Transfer


class Fetching:
    """Issues the copies from home that fill replicas."""

    def __init__(
        self,
        books: Books,
        holds: Holds,
        filling: Filling,
        transfer: Transfer,
        in_flight: InFlight,
        rehousing: Rehousing,
    ) -> None:
        self._books = books
        self._holds = holds
        self._filling = filling
        self._transfer = transfer
        self._in_flight = in_flight
        self._rehousing = rehousing

    def issue(self, pairs: Sequence[Pair], *, ahead: bool = False) -> None:
        """Issue the copies into replicas of one device that were opened for them.

        Raises
        ------
        TransferError
            A copy failed. Its replica and those behind it are closed: the blocks are where they
            were. Those before it are on their way.
        """
        device, issued = pairs[0][1].device, list[Replica]()
        try:
            events = self._transfer.fetch(pairs, ahead=ahead)
            for (home, replica), event in zip(pairs, events, strict=False):
                replica.arrival = event
                issued.append(replica)
                if host_readers.mirrors:
                    self._rehousing.note_copy(home)
        except BaseException as error:
            if not isinstance(error, TransferError):
                device.synchronize()  # it may have been issued all the same
            with self._books.lock:
                for _, replica in pairs[len(issued) :]:
                    self._filling.close(replica)
            raise
        finally:
            for _, replica in pairs:
                self._holds.issuing.pop(replica, None)
            if ahead:
                with self._books.lock:
                    for replica in issued:
                        self._in_flight.add(replica)
            for replica in issued:
                telling.fetched(self._books, f"b{replica.block_id}", replica, ahead=ahead)

    def issue_ahead(self, blocks: Sequence[Block], device: Device) -> list[Block]:
        """Issue the copies of blocks that nobody waits for, until one is refused; never an error.

        Returns
        -------
        list of Block
            Those that are on their way.

        Notes
        -----
        Nothing of the program's, and no listener, runs between the first that is opened and the
        last that is issued: it could wait for one of them.
        """
        pairs: list[Pair] = []
        try:
            with suppress(RoomTakenError), self._books.lock:
                for block in blocks:
                    pair = self._open(block, device)
                    if pair is None:
                        break
                    pairs.append(pair)
        except torch.OutOfMemoryError as error:
            self._note_refusal(blocks[len(pairs)], device, error)
        finally:
            if pairs:
                try:
                    self.issue(pairs, ahead=True)
                except TransferError as error:
                    self._note_refusal(blocks[0], device, error)
        coming = [replica.state is not INVALID for _, replica in pairs]
        return list(compress(blocks, coming))

    def _open(self, block: Block, device: Device) -> Pair | None:
        """Open a replica on a device; None where its block is not at home, or is there (locked)."""
        home = block.replicas.get(self._books.host)
        if home is None or home.state is not CLEAN or block.exposure is not None:
            return None
        if block.sharers is not None or block.promise is not None:
            return None
        replica = replica_on(block, device)
        return (home, replica) if self._filling.open(block, replica) else None

    def _note_refusal(self, block: Block, device: Device, error: Exception) -> None:
        self._books.log.note(block.name, f"no prefetch {device.name}", str(error)[:80])
