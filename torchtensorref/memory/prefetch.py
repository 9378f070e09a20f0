"""Ahead of need: what a strategy wants fetched or written back early, never waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.errors import TransferError
from ..devices.base import Device
from .block import Replica
from .bookkeeping import Resident
from .copies import RoomTakenError
from .eviction import Movement
from .states import CLEAN, DIRTY, FILLING, INVALID


class LookAhead(Movement):
    """Copies that nobody has asked for yet: refused where they would do harm, never an error."""

    def look_ahead(self, device: Device) -> None:
        """Ask the strategy what to write back and fetch early, and issue it; never waits."""
        resident = Resident(self, device)
        with self.lock:
            self.bury()
            self._note_arrivals()
            seen = self.device_snapshot(device)
        with self.strategy_lock:
            leaving = list(self.strategy.write_back(seen, resident))
            coming = list(self.strategy.prefetch(seen, resident))
        for block_id in leaving:
            block = self.known.get(block_id)
            dirty = block.replicas.get(device) if block is not None else None
            if dirty is not None and dirty.state is DIRTY:
                self._write_back_early(dirty)
        for wish in coming:
            if not self.prefetch(device, wish.block_id, wish.victims):
                return

    def _write_back_early(self, replica: Replica) -> None:
        """Issue a copy home of what no operator holds; if it fails, nothing is lost."""
        with self.lock:
            if not self._seize(replica):
                return
            replica.pins += 1
        try:
            self.write_back(replica, wait=False)
        except TransferError as error:
            self._note_failure(replica, error)
        finally:
            with self.lock:
                replica.pins -= 1
                self.unpinned.notify_all()

    def prefetch(self, device: Device, block_id: int, victims: Sequence[int]) -> bool:
        """Issue the copy of one block ahead of need, in the room of its victims.

        Returns
        -------
        bool
            False where it was refused as a whole: the block is gone, shared, exposed or there
            already, or room is lacking even without the victims. Never an error.
        """
        block = self.known.get(block_id)
        if block is None or block.exposure is not None or block.sharers is not None:
            return False
        with self.lock:
            self.bury()
            replica = block.replicas.get(device)
            if replica is not None and replica.state is not INVALID:
                return False
            home = block.replicas.get(self.host)
            if home is None or home.state is not CLEAN:
                return home is not None and home.state is FILLING  # later: it is on its way home
            chosen = self.chosen(device, victims)
            ledger = self.ledgers[device]
            free_nbytes = ledger.budget.limit_nbytes - ledger.resident_nbytes
            if free_nbytes + sum(r.nbytes for r in chosen) < block.nbytes:
                return False
        try:
            for victim in chosen:
                self.evict(victim, f"{self.strategy.name}: room to fetch ahead")
            self.fetch(block, device, ahead=True)
            with self.strategy_lock:
                self.strategy.on_prefetch(block_id, block.nbytes)
        except RoomTakenError:
            return False
        except (torch.OutOfMemoryError, TransferError) as error:
            self.log.note(block.name, f"no prefetch {device.name}", str(error)[:80])
            return False
        return True
