"""The memory of a simulated device: how much is resident, what is free, and from when on."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NoReturn

from ...base.errors import InvariantError
from ...base.options import settings
from ..residents import Resident, Residents
from ..storages import bytes_of, empty_bytes, fill_bytes, give_bytes, storage_nbytes, storage_of
from .compute import ComputeEngine
from .faults import FaultPlan
from .machine import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from .events import Copy

__all__ = ["POISON", "BusyRoom", "SimMemory"]

#: What freed and not yet arrived bytes are filled with: NaN in every float type.
POISON = 0xFF


class BusyRoom:
    """Freed bytes that are still being read, by the moment when the reading ends.

    Notes
    -----
    The simulated memory has no addresses and therefore no fragmentation. What matters is kept:
    bytes freed now may still be read by operators that were issued but have not run yet, and must
    not be written before. Bytes that are free already are taken first, then those that become
    free first.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[int, int]] = []  # a heap of (free at, nbytes)
        self.busy_nbytes = 0  # their sum

    def give(self, nbytes: int, free_at_ns: int, now_ns: int) -> None:
        """Note freed bytes that may be written from `free_at_ns` on, later than now."""
        self._forget_free(now_ns)
        heappush(self._freed, (free_at_ns, nbytes))
        self.busy_nbytes += nbytes

    def take(self, nbytes: int, spare_nbytes: int, now_ns: int) -> int:
        """Use up `nbytes`; return the moment from which all of them may be written.

        Parameters
        ----------
        nbytes : int
            How much is wanted.
        spare_nbytes : int
            All that is not resident, busy bytes included; where that is less than what is wanted,
            since more is held than may be, all that is busy is waited for.
        now_ns : int
            The host's clock.

        Returns
        -------
        int
            0 if it was free already.
        """
        self._forget_free(now_ns)
        missing = nbytes - (spare_nbytes - self.busy_nbytes)
        free_at_ns = 0
        while missing > 0 and self._freed:
            free_at_ns, piece = heappop(self._freed)
            self.busy_nbytes -= piece
            missing -= piece
            if missing < 0:
                heappush(self._freed, (free_at_ns, -missing))
                self.busy_nbytes -= missing
        return free_at_ns

    def recount(self) -> None:
        """Sum again what is busy."""
        self.busy_nbytes = sum(nbytes for _, nbytes in self._freed)

    def _forget_free(self, now_ns: int) -> None:
        while self._freed and self._freed[0][0] <= now_ns:
            self.busy_nbytes -= heappop(self._freed)[1]


class SimMemory:
    """The bytes on a simulated device: counted exactly, with the times when they may be touched.

    Parameters
    ----------
    name : str
        The device's, for messages.
    capacity_nbytes : int
        The most bytes it holds.
    machine : Machine
        Has the host's clock.
    compute : ComputeEngine
        Uses the bytes; waits where its results get bytes that a copy still reads.
    faults : FaultPlan
        Which allocations fail.
    poison : bool
        Whether freed, stale and not yet arrived bytes are overwritten.
    bytes_on : str
        Where torch keeps the bytes; "meta": nowhere.

    Attributes
    ----------
    alloc_count : int
        How many allocations were asked for: also refills and kernels' results.
    residents : Residents
        What is here.
    limit_nbytes : int
        Of the capacity, what may be used: what is beyond waits for freed bytes to become free.
    arriving, leaving : dict of int to Copy
        The copies to here and from here that were not waited for, by the id of their base.

    Notes
    -----
    The caller holds the machine's lock. An access that a real device would answer with wrong bits
    or a crash raises `InvariantError`.
    """

    def __init__(
        self,
        name: str,
        capacity_nbytes: int,
        *,
        machine: Machine,
        compute: ComputeEngine,
        faults: FaultPlan,
        poison: bool,
        bytes_on: str,
    ) -> None:
        self._name = name
        self._capacity_nbytes = capacity_nbytes
        self._machine = machine
        self._compute = compute
        self._faults = faults
        self._poison = poison
        self._bytes_on = bytes_on
        self._busy = BusyRoom()
        self.alloc_count = 0
        self.limit_nbytes = capacity_nbytes
        self.residents = Residents()
        self.arriving: dict[int, Copy] = {}
        self.leaving: dict[int, Copy] = {}

    # allocation ---------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Make a base, as `Device.allocate` does."""
        self._count_allocation()
        room_ns = self._take_room(nbytes)
        base = empty_bytes(nbytes, self._bytes_on)
        # Another thread's base may have died since, and this one have got its id.
        self.settle()
        resident = self.residents.enter(base, nbytes, self.alloc_count)
        resident.room_ns = room_ns
        resident.entered_ns = self._compute.unnoted_ns
        self.poison(base)
        return base

    def refill(self, base: Tensor, nbytes: int) -> None:
        """Give bytes again to an emptied base."""
        self.settle()
        resident = self.residents.emptied.get(id(base))
        if resident is None:
            self.refuse("refill", base, "was not emptied before")
        self._count_allocation()
        room_ns = self._take_room(nbytes)
        give_bytes(base, nbytes)
        self.residents.enter_again(resident, nbytes)
        resident.number = self.alloc_count
        resident.room_ns = room_ns
        resident.used_ns = resident.written_ns = 0
        resident.entered_ns = self._compute.unnoted_ns
        self.poison_base(base)

    def empty(self, base: Tensor) -> None:
        """Free the bytes of a base; a copy that still reads them keeps them."""
        self.settle()
        resident = self.resident("empty", base, "has no bytes: freed twice, or never allocated")
        leaving = self.leaving.get(resident.key)
        if leaving is not None:
            leaving.keep_source()
        self.poison_base(base)
        storage_of(base).resize_(0)
        self.residents.leave(resident)
        self._give_room(resident)

    def recover(self, bases: Sequence[tuple[Tensor, bool]]) -> None:
        """Count anew what is here, as `Device.recover` does."""
        self.residents.recover(bases, self.alloc_count)
        self._busy.recount()
        records = {**self.residents.present, **self.residents.emptied}
        for copies in (self.arriving, self.leaving):
            for key, copy in list(copies.items()):
                if records.get(key) is not copy.resident:
                    del copies[key]

    def account(self, base: Tensor) -> None:
        """Count a kernel's result; compute waits until no copy reads the bytes it was given."""
        nbytes = storage_nbytes(base)
        self._count_allocation()
        if id(base) in self.residents.present:
            self.refuse("account", base, "is counted already")
        if self.residents.nbytes + nbytes + self._busy.busy_nbytes > self.limit_nbytes:
            self._compute.wait_for(self._take_room(nbytes))
        resident = self.residents.enter(base, nbytes, self.alloc_count)
        resident.used_ns = resident.written_ns = self._compute.end_ns

    def settle(self) -> None:
        """Stop counting the bases that died."""
        while (resident := self.residents.take_dead()) is not None:
            self._give_room(resident)

    def poison(self, tensor: Tensor) -> None:
        """Overwrite bytes that must not be read, where that was asked for."""
        if self._poison or settings.poison:
            fill_bytes(tensor, POISON)

    def poison_base(self, base: Tensor) -> None:
        """Overwrite all the bytes of a base, where that was asked for."""
        if self._poison or settings.poison:
            fill_bytes(bytes_of(base), POISON)

    def _count_allocation(self) -> None:
        if self.residents.dead:
            self.settle()
        self.alloc_count += 1
        if self._faults.fire("alloc", self.alloc_count):
            self._out_of_memory(f"Allocation {self.alloc_count} was made to fail.")

    def _take_room(self, nbytes: int) -> int:
        """Find bytes for an allocation; return when they may be written."""
        held, capacity = self.residents.nbytes, self._capacity_nbytes
        spare = capacity - held
        if nbytes > spare:
            self._out_of_memory(
                f"Tried to allocate {nbytes:,} bytes; {held:,} of {capacity:,} are in "
                f"use and {spare:,} are free. Evict something first."
            )
        return self._busy.take(nbytes, self.limit_nbytes - held, self._machine.now_ns)

    def _give_room(self, resident: Resident) -> None:
        """Free the bytes of a base that was emptied or died, once they are not used any more."""
        free_at_ns = self.available_ns(resident)
        self.leaving.pop(resident.key, None)
        arriving = self.arriving.pop(resident.key, None)
        if arriving is not None:
            arriving.cancel()
        now_ns = self._machine.now_ns
        if free_at_ns > now_ns:
            self._busy.give(resident.nbytes, free_at_ns, now_ns)

    def _out_of_memory(self, why: str) -> NoReturn:
        import torch

        # Handlers of the field look for the words "out of memory." (STYLE, principle 8).
        raise torch.OutOfMemoryError(f"{self._name} out of memory. {why}")

    # legality -----------------------------------------------------------------------------

    def resident(
        self, what: str, base: Tensor, why_not: str = "has no bytes on this device"
    ) -> Resident:
        """Return the record of a base that is here; refuse `what` where it is not."""
        resident = self.residents.present.get(id(base))
        if resident is None:
            self.refuse(what, base, why_not)
        return resident

    def available_ns(self, resident: Resident) -> int:
        """When the last copy or operator that uses the bytes of a base ends."""
        end_ns = max(resident.used_ns, resident.room_ns)
        # Any operator issued since it came may have used it, where operands were not noted.
        if resident.entered_ns < self._compute.unnoted_ns:
            end_ns = max(end_ns, self._compute.unnoted_ns)
        for copies in (self.arriving, self.leaving):
            copy = copies.get(resident.key)
            if copy is not None:
                end_ns = max(end_ns, copy.end_ns)
        return end_ns

    def check_operands(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Refuse an operator whose bases are not here, still arriving, or still being copied."""
        if self.residents.dead:
            self.settle()
        present, arriving, leaving = self.residents.present, self.arriving, self.leaving
        for base in reads:
            key = id(base)
            if key not in present or key in arriving:
                self._refuse_operand("reads", base)
        for base in writes:
            key = id(base)
            if key not in present or key in arriving or key in leaving:
                self._refuse_operand("writes", base)

    def _refuse_operand(self, verb: str, base: Tensor) -> NoReturn:
        what = f"an operator that {verb} it"
        arriving = self.arriving.get(self.resident(what, base).key)
        how = f"is being read by {self.leaving.get(id(base))}"
        if arriving is not None:
            how = f"arrives by {arriving}"
        self.refuse(what, base, f"{how}, and compute has not waited for it")

    def note_operands(self, reads: Sequence[Tensor], writes: Sequence[Tensor], end_ns: int) -> None:
        """Note that an operator, which ends then, uses these bases."""
        present = self.residents.present
        for base in reads:
            resident = present.get(id(base))
            if resident is not None:
                resident.used_ns = end_ns
        for base in writes:
            resident = present.get(id(base))
            if resident is not None:
                resident.used_ns = resident.written_ns = end_ns

    def refuse(self, what: str, base: Tensor, why: str) -> NoReturn:
        """Raise for an access that a real device would answer with wrong bits or a crash."""
        key = id(base)
        here, emptied = self.residents.present.get(key), self.residents.emptied.get(key)
        name = f"a base of {base.numel() * base.element_size():,} bytes, unknown here,"
        if here is not None:
            name = str(here)
        elif emptied is not None:
            name = f"emptied {emptied}"
        raise InvariantError(
            f"{self._name}: {what} is illegal at {self._machine.now_ns:,} ns: {name} {why}.",
            violations=(f"{what}: {name} {why}",),
        )
