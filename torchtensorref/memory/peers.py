"""Copies from one accelerator to another, past the host, where their hardware has a link for it.

What an operator has just made is on its accelerator and nowhere else, and an operator on another
one often is the next and the last to read it: such a block *moves*. The replica that it leaves is
given up as soon as the copy is issued, so there is still one current copy at any moment, and home
hears of nothing. What is wanted back after it has moved is not moved to and fro: it goes by way of
home, and all that use it have it.

What home has too, a weight or a cache, is taken from whoever can have brought it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..base.errors import TransferError
from ..devices.base import Device
from . import telling
from .block import Block, Replica
from .bookkeeping import Books
from .filling import Filling
from .holds import Holds
from .in_flight import InFlight
from .states import CLEAN, DIRTY, FILLING, INVALID
from .transfer import Transfer, wait_if_issued


class Peers:
    """Brings blocks from other accelerators, where that is sooner there (lock not held)."""

    def __init__(
        self,
        books: Books,
        holds: Holds,
        filling: Filling,
        transfer: Transfer,
        in_flight: InFlight,
        replica_on: Callable[[Block, Device], Replica],
    ) -> None:
        self._books = books
        self._holds = holds
        self._filling = filling
        self._transfer = transfer
        self._in_flight = in_flight
        self._replica_on = replica_on
        #: On their way, and current nowhere else; whether any ever was.
        self._has_moving = False
        self._moving: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._has_moved: weakref.WeakSet[Block] = weakref.WeakSet()

    def bring(self, block: Block, device: Device, *, ahead: bool, why: str) -> bool:
        """Issue the copy of a block from another accelerator; room must be there.

        Returns
        -------
        bool
            False where there is none to copy from, or home is sooner: nothing has changed.

        Raises
        ------
        RoomTakenError, torch.OutOfMemoryError
            As `Copier.fetch`; nothing has changed.
        """
        if device.is_host or not self._books.spreads:
            return False
        # All of it under the lock: at no moment do others see two replicas, or none.
        with self._books.lock:
            source = self._source(block, device)
            if source is None:
                return False
            replica = self._replica_on(block, device)
            if not self._filling.open(block, replica):
                return True
            try:
                replica.arrival = self._transfer.fetch_across(source, replica, ahead=ahead)
            except BaseException as error:
                wait_if_issued(device, error)
                self._filling.close(replica)
                if isinstance(error, TransferError):
                    self._books.log.note(block.name, f"no copy {device.name}", str(error)[:80])
                    return False
                raise
            finally:
                self._holds.issuing.pop(replica, None)
            if source.state is DIRTY:
                self._has_moving = True
                self._moving.add(replica)
                self._has_moved.add(block)
                source.become(CLEAN, f"moves to {device.name}")
                source.become(INVALID, f"moves to {device.name}")
                source.device.empty(source.base)
                self._books.remove(source)
            if ahead:
                self._in_flight.add(replica)
        telling.fetched(self._books, block.name, replica, ahead=ahead, why=why)
        return True

    def has_arrived(self, replica: Replica) -> None:
        """Note that compute waits for what comes: the only copy there is is dirty (lock held)."""
        if self._has_moving and replica in self._moving:
            self._moving.discard(replica)
            replica.become(DIRTY, "home has not heard of it")

    def end_reading(self, block: Block, device: Device) -> None:
        """Order copies to other accelerators before an operator that writes what they read."""
        if not self._books.spreads:
            return
        with self._books.lock:
            replica = block.replicas.get(device)
            if replica is not None and replica.state in (CLEAN, DIRTY):
                device.end_peer_copies(replica.base)

    def _source(self, block: Block, device: Device) -> Replica | None:
        """Return what to copy from; closed to the ready path where it is about to go."""
        if block.exposure is not None or block.sharers is not None or block.promise is not None:
            return None
        home = block.replicas.get(self._books.host)
        for giver in self._books.accelerators:
            replica = block.replicas.get(giver)
            if replica is None or giver is device or replica.state not in (CLEAN, DIRTY):
                continue
            if not device.peer_bytes_per_s(giver):
                continue
            if replica.state is CLEAN:
                is_home_too = home is not None and home.state is CLEAN
                if is_home_too and _is_sooner(block.nbytes, giver, device):
                    block.owned = False  # who writes it has to wait for this copy first
                    return replica
            elif (
                (home is None or home.state is not FILLING)
                and block not in self._has_moved
                and self._holds.seize(replica)
            ):
                return replica
        return None


def _is_sooner(nbytes: int, giver: Device, device: Device) -> bool:
    """Whether a copy by the peer's link ends before one from home, or with it."""
    clocks, now_ns = device.clocks(), device.now_ns()
    home_ns = max(now_ns, clocks.link_free_ns) + nbytes / clocks.h2d_bytes_per_s * 1e9
    link_ns = max(now_ns, device.peer_free_ns(giver), giver.clocks().compute_free_ns)
    return link_ns + nbytes / device.peer_bytes_per_s(giver) * 1e9 <= home_ns
