"""The memory of a simulated device: how much is resident, what is free, and from when on."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NoReturn

from ...base.errors import InvariantError
from ..base import Device, bytes_of, empty_bytes, fill_bytes
from ..residents import Resident, Residents
from .faults import FaultPlan
from .machine import Machine
from .spec import DeviceSpec

if TYPE_CHECKING:
    from torch import Tensor

    from .events import Copy

__all__ = ["POISON", "Room", "SimMemory"]

#: What freed and not yet arrived bytes are filled with: NaN in every float type.
POISON = 0xFF


class Room:
    """Freed bytes that somebody may still be reading, by the moment when the reading ends.

    Notes
    -----
    The simulated memory has no addresses and therefore no fragmentation. What matters is kept:
    bytes freed now may still be read by operators that were issued but have not run yet, and who
    gets this room must not write it before. Room that is free already is taken first, then the
    room that becomes free first.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[int, int]] = []  # a heap of (free at, nbytes)
        self.busy_nbytes = 0  # their sum

    def give(self, nbytes: int, free_at_ns: int, now_ns: int) -> None:
        """Take back room that is free from `free_at_ns` on, later than now."""
        freed = self._freed
        while freed and freed[0][0] <= now_ns:
            self.busy_nbytes -= heappop(freed)[1]
        heappush(freed, (free_at_ns, nbytes))
        self.busy_nbytes += nbytes

    def take(self, nbytes: int, spare_nbytes: int, now_ns: int) -> int:
        """Use up room for `nbytes`; return the moment from which all of it is free.

        Parameters
        ----------
        nbytes : int
            How much is wanted; no more than `spare_nbytes`.
        spare_nbytes : int
            All that is not resident, busy room included.
        now_ns : int
            The host's clock.

        Returns
        -------
        int
            0 if it was free already.
        """
        freed = self._freed
        while freed and freed[0][0] <= now_ns:
            self.busy_nbytes -= heappop(freed)[1]
        missing = nbytes - (spare_nbytes - self.busy_nbytes)
        free_at_ns = 0
        while missing > 0:
            free_at_ns, piece = heappop(freed)
            self.busy_nbytes -= piece
            missing -= piece
            if missing < 0:
                heappush(freed, (free_at_ns, -missing))
                self.busy_nbytes -= missing
        return free_at_ns


class SimMemory(Device):
    """The part of a simulated device that holds bytes, to the byte. `SimDevice` has the docs."""

    kind = "sim"
    is_simulated = True
    is_witness = True
    keeps_leaving_bytes = True

    def __init__(
        self,
        spec: DeviceSpec,
        index: int = 0,
        *,
        machine: Machine | None = None,
        poison: bool = False,
        faults: FaultPlan | None = None,
        name: str | None = None,
    ) -> None:
        self.spec = spec
        self.index = index
        self.name = f"sim:{index}" if name is None else name
        self.capacity_nbytes = spec.capacity_nbytes
        self.machine = machine or Machine(
            memory_bytes_per_s=spec.host_memory_bytes_per_s, flops_per_s=spec.host_flops_per_s
        )
        self.poison = poison
        self.alloc_count = self.copy_count = 0
        self._lock = self.machine.lock
        self._set_faults(faults or FaultPlan())
        self._residents = Residents()
        self._dead = self._residents.dead
        self._present = self._residents.present
        self._room = Room()
        self._compute_ns = 0  # when compute has finished what it was given
        self._awaited_ns = 0  # what compute has been told to wait for
        self._unnoted_ns = 0  # the end of the last operator whose operands nobody noted
        self._arriving: dict[int, Copy] = {}  # copies here that nobody waited for, by base
        self._leaving: dict[int, Copy] = {}  # copies from here that nobody waited for, by base

    # faults -------------------------------------------------------------------------------

    def _set_faults(self, faults: FaultPlan) -> None:
        self._faults = faults
        self._alloc_fault = faults.next_of("alloc")
        self._copy_fault = faults.next_of("copy")

    def fail_next(self, kind: str, number: int = 1) -> None:
        """Let the `number`-th ``"alloc"`` or ``"copy"`` from now on fail, once."""
        with self._lock:
            so_far = self.copy_count if kind == "copy" else self.alloc_count
            self._faults.add(kind, so_far + number)
            self._set_faults(self._faults)

    def _fail_alloc_if_planned(self) -> None:
        planned = self._faults.fire("alloc", self.alloc_count)
        self._set_faults(self._faults)
        if planned:
            self._out_of_memory(f"Allocation {self.alloc_count} was made to fail.")

    def _out_of_memory(self, why: str) -> NoReturn:
        import torch

        # Handlers of the field look for the words "out of memory." (STYLE, principle 8).
        raise torch.OutOfMemoryError(f"{self.name} out of memory. {why}")

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        with self._lock:
            room_ns = self._take_room(nbytes)
            base = empty_bytes(nbytes)
            # Another thread's base may have died since, and this one have got its number.
            self._settle()
            resident = self._residents.enter(base, nbytes, self.alloc_count)
            resident.room_ns = room_ns
            resident.entered_ns = self._unnoted_ns
        if self.poison:
            fill_bytes(base, POISON)
        return base

    def refill(self, base: Tensor, nbytes: int) -> None:  # noqa: D102
        with self._lock:
            self._settle()
            resident = self._residents.emptied.get(id(base))
            if resident is None:
                self._refuse("refill", base, "was not emptied before")
            room_ns = self._take_room(nbytes)
            base.untyped_storage().resize_(nbytes)
            self._residents.enter_again(resident, nbytes)
            resident.number = self.alloc_count
            resident.room_ns = room_ns
            resident.used_ns = resident.written_ns = 0
            resident.entered_ns = self._unnoted_ns
            if self.poison:
                fill_bytes(bytes_of(base), POISON)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._settle()
            resident = self._present.get(id(base))
            if resident is None:
                self._refuse("empty", base, "has no bytes: freed twice, or never allocated")
            leaving = self._leaving.get(resident.key)
            if leaving is not None:
                leaving.keep_source()
            if self.poison:
                fill_bytes(bytes_of(base), POISON)
            base.untyped_storage().resize_(0)
            self._residents.leave(resident)
            self._give_room(resident)

    def account(self, base: Tensor) -> None:  # noqa: D102
        # Flat, because it runs for every operator: `Residents.enter` written out.
        nbytes = base.untyped_storage().nbytes()
        with self._lock:
            if self._dead:
                self._settle()
            self.alloc_count = number = self.alloc_count + 1
            if number >= self._alloc_fault:
                self._fail_alloc_if_planned()
            key = id(base)
            if key in self._present:
                self._refuse("account", base, "is counted already")
            residents = self._residents
            total = residents.nbytes + nbytes
            if total + self._room.busy_nbytes > self.capacity_nbytes:
                self._account_in_busy_room(nbytes)
            resident = Resident(base, residents.on_death)
            resident.key = key
            resident.nbytes = nbytes
            resident.number = number
            resident.used_ns = resident.written_ns = self._compute_ns
            resident.room_ns = resident.entered_ns = 0
            self._present[key] = resident
            residents.nbytes = total
            if total > residents.peak_nbytes:
                residents.peak_nbytes = total

    def _account_in_busy_room(self, nbytes: int) -> None:
        """Let compute wait until a copy out has left the room that its result needs."""
        spare = self.capacity_nbytes - self._residents.nbytes
        if nbytes > spare:
            self._refuse_room(nbytes)
        free_at_ns = self._room.take(nbytes, spare, self.machine.now_ns)
        if free_at_ns > self._compute_ns and free_at_ns > self._awaited_ns:
            self._awaited_ns = free_at_ns

    def _take_room(self, nbytes: int) -> int:
        """Count an allocation and find room for it; return when this room is free to write."""
        self._settle()
        self.alloc_count += 1
        if self.alloc_count >= self._alloc_fault:
            self._fail_alloc_if_planned()
        spare = self.capacity_nbytes - self._residents.nbytes
        if nbytes > spare:
            self._refuse_room(nbytes)
        return self._room.take(nbytes, spare, self.machine.now_ns)

    def _refuse_room(self, nbytes: int) -> NoReturn:
        held = self._residents.nbytes
        self._out_of_memory(
            f"Tried to allocate {nbytes:,} bytes; {held:,} of {self.capacity_nbytes:,} are in "
            f"use and {self.capacity_nbytes - held:,} are free. Evict something first."
        )

    def _settle(self) -> None:
        """Take the bases that died out of the books."""
        residents = self._residents
        while (resident := residents.take_dead()) is not None:
            self._give_room(resident)

    def _give_room(self, resident: Resident) -> None:
        """Take back the room of a base that was emptied or died."""
        free_at_ns = self._available_ns(resident)
        if self._arriving or self._leaving:
            self._leaving.pop(resident.key, None)
            arriving = self._arriving.pop(resident.key, None)
            if arriving is not None:
                arriving.cancel()
        now_ns = self.machine.now_ns
        if free_at_ns > now_ns:
            self._room.give(resident.nbytes, free_at_ns, now_ns)

    def _available_ns(self, resident: Resident) -> int:
        """When nobody reads or writes the bytes under a base any more."""
        end_ns = resident.used_ns
        if resident.room_ns > end_ns:
            end_ns = resident.room_ns
        # Any operator issued since it came may have used it, if nobody noted the operands.
        if resident.entered_ns < self._unnoted_ns > end_ns:
            end_ns = self._unnoted_ns
        if self._arriving or self._leaving:
            for touching in (self._arriving, self._leaving):
                copy = touching.get(resident.key)
                if copy is not None and copy.end_ns > end_ns:
                    end_ns = copy.end_ns
        return end_ns

    def free_nbytes(self) -> int:  # noqa: D102
        return self.capacity_nbytes - self.resident_nbytes

    @property
    def resident_nbytes(self) -> int:
        """The bytes it holds now: exact, also for bases that have just died."""
        with self._lock:
            self._settle()
            return self._residents.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most bytes it has held since the last `reset_peak`: exact."""
        return self._residents.peak_nbytes

    def reset_peak(self) -> None:  # noqa: D102
        with self._lock:
            self._settle()
            self._residents.peak_nbytes = self._residents.nbytes

    def recount_nbytes(self) -> int:
        """The resident bytes, added up from the storages themselves (slow: for `check`)."""
        with self._lock:
            self._settle()
            return self._residents.recount()

    # legality -----------------------------------------------------------------------------

    def _refuse(self, what: str, base: Tensor, why: str) -> NoReturn:
        """Raise for an access that a real device would answer with wrong bits or a crash."""
        key = id(base)
        resident = self._present.get(key) or self._residents.emptied.get(key)
        if resident is None:
            name = f"a base of {base.numel() * base.element_size():,} bytes, unknown here,"
        else:
            name = f"{'' if key in self._present else 'emptied '}{resident}"
        raise InvariantError(
            f"{self.name}: {what} is illegal at {self.machine.now_ns:,} ns: {name} {why}.",
            violations=(f"{what}: {name} {why}",),
        )
