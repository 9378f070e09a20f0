"""A simulated accelerator: real bytes, virtual time, and no mercy for illegal accesses.

It holds its bytes in host tensors and runs the host's kernels. Each of its engines (compute, and
one copy engine per direction) has a clock; the host that feeds them has another, shared by all
devices of one `Machine`. The rules of time:

* The host issues operators and copies in program order and never waits unless it is told to. Its
  clock advances by `dispatch_ns` per operator.
* An operator starts when compute is free, the host has issued it and the events compute waits
  for have fired. It takes ``launch_ns + max(flops / F, nbytes / bandwidth)``.
* A copy starts when its engine is free, the host has issued it and `after` has fired. It takes
  ``copy_latency_ns + nbytes / bandwidth``, the bandwidth being what the link takes of the host
  memory's that other copies leave over (`SharedMemory`).
* Its bytes arrive when its event fires (`wait`, `synchronize`, or `is_done` once the host's clock
  has passed its end), never before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ..errors import InvariantError, TransferError
from .base import Device, Event, bytes_of, empty_bytes
from .faults import FaultPlan
from .residents import Resident, Residents
from .sim_events import Copy, Engine, SimEvent
from .sim_machine import Machine
from .sim_memory import Room
from .sim_spec import DeviceSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["POISON", "SimDevice"]

#: What freed and not yet arrived bytes are filled with: NaN in every float type.
POISON = 0xFF


class SimDevice(Device):
    """A simulated accelerator of any size and speed.

    Parameters
    ----------
    spec : DeviceSpec
        Its size and its speeds.
    index : int, optional
        Which one of its name.
    machine : Machine, optional
        The host it is plugged into; its own by default. Devices of one machine share the host's
        clock, its memory bandwidth and one lock.
    poison : bool, optional
        Whether freed, stale and not yet arrived bytes are overwritten.
    faults : FaultPlan, optional
        What is to fail.
    name : str, optional
        By default ``"sim:<index>"``.

    Attributes
    ----------
    alloc_count, copy_count : int
        How many allocations (also refills and kernels' results) and copies were asked for.
    """

    kind = "sim"
    is_simulated = True

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
        self.stall_ns = 0
        self._lock = self.machine.lock
        self._set_faults(faults or FaultPlan())
        self._set_speeds(spec)
        self._residents = Residents()
        self._dead = self._residents.dead
        self._present = self._residents.present
        self._room = Room()
        self._compute_ns = 0  # when compute has finished what it was given
        self._awaited_ns = 0  # what compute has been told to wait for
        self._unnoted_ns = 0  # the end of the last operator whose operands nobody noted
        self._copy_ns = {Engine.H2D: 0, Engine.D2H: 0}  # when each copy engine is free
        self._pending: dict[Engine, deque[Copy]] = {Engine.H2D: deque(), Engine.D2H: deque()}
        self._touching: dict[Engine, dict[int, Copy]] = {Engine.H2D: {}, Engine.D2H: {}}
        self._arriving = self._touching[Engine.H2D]  # copies nobody has waited for, by base
        self._leaving = self._touching[Engine.D2H]

    def _set_speeds(self, spec: DeviceSpec) -> None:
        self._dispatch_ns = spec.dispatch_ns
        self._launch_ns = spec.launch_ns
        self._ns_per_byte = 1e9 / spec.memory_bytes_per_s
        self._ns_per_flop = {name: 1e9 / rate for name, rate in spec.flops_per_s.items()}
        self._ns_per_other_flop = 1e9 / spec.default_flops_per_s
        self._link_rate = {
            Engine.H2D: spec.h2d_bytes_per_s / 1e9,
            Engine.D2H: spec.d2h_bytes_per_s / 1e9,
        }

    @property
    def torch_device(self) -> torch.device:  # type: ignore[override]
        """Where torch says these tensors are: on the host."""
        import torch

        return torch.device("cpu")

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

    def _count_alloc(self) -> None:
        self.alloc_count += 1
        if self.alloc_count >= self._alloc_fault:
            self._fail_alloc_if_planned()

    def _fail_alloc_if_planned(self) -> None:
        planned = self._faults.fire("alloc", self.alloc_count)
        self._set_faults(self._faults)
        if planned:
            self._out_of_memory(f"Allocation {self.alloc_count} was made to fail.")

    def _count_copy(self, engine: Engine, nbytes: int) -> None:
        self.copy_count += 1
        if self.copy_count < self._copy_fault:
            return
        planned = self._faults.fire("copy", self.copy_count)
        self._set_faults(self._faults)
        if planned:
            ends = ("cpu", self.name) if engine is Engine.H2D else (self.name, "cpu")
            raise TransferError(
                f"Copy {self.copy_count} from {ends[0]} to {ends[1]} ({nbytes:,} bytes) was made "
                "to fail. Nothing has changed; a second try will work.",
                source=ends[0],
                destination=ends[1],
                nbytes=nbytes,
            )

    def _out_of_memory(self, why: str) -> NoReturn:
        import torch

        # Handlers of the field look for the words "out of memory." (STYLE, principle 8).
        raise torch.OutOfMemoryError(f"{self.name} out of memory. {why}")

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        with self._lock:
            room_ns = self._take_room(nbytes)
            base = empty_bytes(nbytes)
            resident = self._residents.enter(base, nbytes, self.alloc_count)
            resident.room_ns = room_ns
            resident.entered_ns = self._unnoted_ns
        if self.poison:
            base.fill_(POISON)
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
                bytes_of(base).fill_(POISON)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._settle()
            resident = self._present.get(id(base))
            if resident is None:
                self._refuse("empty", base, "has no bytes: it was freed twice, or never allocated")
            leaving = self._leaving.get(resident.key)
            if leaving is not None:
                leaving.keep_source()
            if self.poison:
                bytes_of(base).fill_(POISON)
            base.untyped_storage().resize_(0)
            self._residents.leave(resident)
            self._give_room(resident)

    def account(self, base: Tensor) -> None:  # noqa: D102
        nbytes = base.untyped_storage().nbytes()
        with self._lock:
            if self._dead:
                self._settle()
            self.alloc_count = number = self.alloc_count + 1
            if number >= self._alloc_fault:
                self._fail_alloc_if_planned()
            residents = self._residents
            spare = self.capacity_nbytes - residents.nbytes
            if nbytes > spare - self._room.busy_nbytes:
                self._account_in_busy_room(nbytes, spare)
            resident = residents.enter(base, nbytes, number)
            resident.used_ns = resident.written_ns = self._compute_ns

    def _account_in_busy_room(self, nbytes: int, spare: int) -> None:
        """Let compute wait until a copy out has left the room that its result needs."""
        if nbytes > spare:
            self._refuse_room(nbytes)
        free_at_ns = self._room.take(nbytes, spare, self.machine.now_ns)
        if free_at_ns > self._compute_ns and free_at_ns > self._awaited_ns:
            self._awaited_ns = free_at_ns

    def _take_room(self, nbytes: int) -> int:
        """Count an allocation and find room for it; return when this room is free to write."""
        self._settle()
        self._count_alloc()
        spare = self.capacity_nbytes - self._residents.nbytes
        if nbytes > spare:
            self._refuse_room(nbytes)
        return self._room.take(nbytes, spare, self.machine.now_ns)

    def _refuse_room(self, nbytes: int) -> NoReturn:
        held = self._residents.nbytes
        self._out_of_memory(
            f"Tried to allocate {nbytes:,} bytes; {held:,} of {self.capacity_nbytes:,} are in "
            f"use and {self.capacity_nbytes - held:,} are free. Evict something first.",
        )

    def _give_room(self, resident: Resident) -> None:
        """Take back the room of a base that was emptied or died."""
        free_at_ns = self._available_ns(resident)
        arriving = self._arriving.pop(resident.key, None)
        if arriving is not None:
            arriving.cancel()
        self._leaving.pop(resident.key, None)
        self._room.give(resident.nbytes, free_at_ns, self.machine.now_ns)

    def _settle(self) -> None:
        """Take the bases that died out of the books."""
        while (resident := self._residents.take_dead()) is not None:
            self._give_room(resident)

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

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        with self._lock:
            resident = self._resident_for_copy("copy_in", base, source)
            self._check_order("copy_in", base, self._available_ns(resident), after, "its users")
            copy = self._issue(Engine.H2D, resident, after)
            copy.source = source
            if self.poison:
                bytes_of(base).fill_(POISON)
            return copy

    def copy_out(self, base: Tensor, destination: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        with self._lock:
            resident = self._resident_for_copy("copy_out", base, destination)
            written_ns = resident.written_ns
            arriving = self._arriving.get(resident.key)
            if arriving is not None:
                written_ns = max(written_ns, arriving.end_ns)
            self._check_order("copy_out", base, written_ns, after, "its writer")
            copy = self._issue(Engine.D2H, resident, after)
            copy.source, copy.target = bytes_of(base), destination
            if self.poison:
                destination.fill_(POISON)
            return copy

    def available(self, base: Tensor) -> Event | None:  # noqa: D102
        with self._lock:
            self._settle()
            resident = self._present.get(id(base))
            if resident is None:
                self._refuse("available", base, "has no bytes on this device")
            end_ns = self._available_ns(resident)
            if end_ns <= self.machine.now_ns:
                return None
            return SimEvent(self, Engine.COMPUTE, end_ns)

    def _available_ns(self, resident: Resident) -> int:
        """When nobody reads or writes the bytes under a base any more."""
        ends = [resident.room_ns, resident.used_ns]
        if self._unnoted_ns > resident.entered_ns:
            ends.append(self._unnoted_ns)  # any of those operators may have used it
        for touching in self._touching.values():
            copy = touching.get(resident.key)
            if copy is not None:
                ends.append(copy.end_ns)
        return max(ends)

    def _resident_for_copy(self, what: str, base: Tensor, host_side: Tensor) -> Resident:
        self._settle()
        resident = self._present.get(id(base))
        if resident is None:
            self._refuse(what, base, "has no bytes on this device")
        host_nbytes = host_side.numel() * host_side.element_size()
        if host_nbytes != resident.nbytes:
            self._refuse(what, base, f"is {resident}, but the host side has {host_nbytes:,} bytes")
        self._count_copy(Engine.H2D if what == "copy_in" else Engine.D2H, host_nbytes)
        return resident

    def _check_order(
        self, what: str, base: Tensor, free_at_ns: int, after: Event | None, whom: str
    ) -> None:
        """Refuse a copy that could start before the users of its bytes have finished."""
        ordered_ns = (
            self.machine.now_ns if after is None else max(self.machine.now_ns, after.end_ns)
        )
        if ordered_ns < free_at_ns:
            self._refuse(
                what,
                base,
                f"may start at {ordered_ns:,} ns, but {whom} will not have finished before "
                f"{free_at_ns:,} ns; pass `after`",
            )

    def _issue(self, engine: Engine, resident: Resident, after: Event | None) -> Copy:
        """Give one copy to its engine."""
        machine = self.machine
        start_ns = max(self._copy_ns[engine], machine.now_ns, after.end_ns if after else 0)
        machine.memory.forget_before(machine.now_ns)
        end_ns = math.ceil(
            machine.memory.finish(
                start_ns + self.spec.copy_latency_ns,
                resident.nbytes,
                rate=self._link_rate[engine],
                total_rate=self.spec.host_memory_bytes_per_s / 1e9,
                reserve=True,
            )
        )
        for busy in (engine,) if self.spec.duplex else (Engine.H2D, Engine.D2H):
            self._copy_ns[busy] = end_ns
        copy = Copy(self, engine, end_ns, number=self.copy_count, resident=resident, after=after)
        self._pending[engine].append(copy)
        self._touching[engine][resident.key] = copy
        return copy

    # events -------------------------------------------------------------------------------

    def has_fired(self, event: SimEvent) -> bool:
        """Whether the host's clock has passed an event; if so, its bytes arrive."""
        with self._lock:
            if self.machine.now_ns < event.end_ns:
                return False
            self._observe(event.engine, event.end_ns)
            return True

    def wait_on_compute(self, event: SimEvent) -> None:
        """Let compute wait for an event; its bytes arrive."""
        with self._lock:
            self._awaited_ns = max(self._awaited_ns, event.end_ns)
            self._observe(event.engine, event.end_ns)

    def wait_on_host(self, event: SimEvent) -> None:
        """Let the host wait for an event; its bytes arrive."""
        with self._lock:
            self.machine.wait_until(event.end_ns)
            self._observe(event.engine, event.end_ns)

    def _observe(self, engine: Engine, end_ns: int) -> None:
        """Let the copies that one engine has finished by `end_ns` arrive, and be used."""
        if engine is Engine.COMPUTE:
            return
        self._deliver(engine, end_ns)
        touching = self._touching[engine]
        for key in [key for key, copy in touching.items() if copy.end_ns <= end_ns]:
            del touching[key]

    def _deliver(self, engine: Engine, end_ns: int) -> None:
        pending = self._pending[engine]
        while pending and pending[0].end_ns <= end_ns:
            copy = pending.popleft()
            before = copy.after
            if isinstance(before, Copy):
                # What it waited for arrived first, whether anybody has looked or not.
                before.device.deliver(before)
            copy.arrive()

    def deliver(self, copy: Copy) -> None:
        """Move the bytes of a copy and of those before it, and let nobody use them yet."""
        self._deliver(copy.engine, copy.end_ns)

    def record(self) -> Event:  # noqa: D102
        with self._lock:
            return SimEvent(self, Engine.COMPUTE, max(self._compute_ns, self._awaited_ns))

    def synchronize(self) -> None:  # noqa: D102
        with self._lock:
            ends = {Engine.COMPUTE: max(self._compute_ns, self._awaited_ns), **self._copy_ns}
            self.machine.wait_until(max(ends.values()))
            for engine, end_ns in ends.items():
                self._observe(engine, end_ns)

    def now_ns(self) -> int:  # noqa: D102
        return self.machine.now_ns

    # operators ----------------------------------------------------------------------------

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:  # noqa: D102
        if self._dead:
            with self._lock:
                self._settle()
        present, arriving = self._present, self._arriving
        for base in reads:
            if id(base) not in present or (arriving and id(base) in arriving):
                self._refuse_operand("reads", base)
        for base in writes:
            key = id(base)
            if key not in present or key in arriving or key in self._leaving:
                self._refuse_operand("writes", base)

    def after_operator(  # noqa: D102
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        flops: int,
        nbytes: int,
        dtype_name: str,
    ) -> None:
        present = self._present
        with self._lock:
            end_ns = self._run(flops, nbytes, dtype_name)
            for base in reads:
                resident = present.get(id(base))
                if resident is not None:
                    resident.used_ns = end_ns
            for base in writes:
                resident = present.get(id(base))
                if resident is not None:
                    resident.used_ns = resident.written_ns = end_ns

    def charge(self, flops: int, nbytes: int, dtype_name: str) -> None:  # noqa: D102
        with self._lock:
            self._unnoted_ns = self._run(flops, nbytes, dtype_name)

    def _run(self, flops: int, nbytes: int, dtype_name: str) -> int:
        """Give one operator to compute; return when it ends. The caller holds the lock."""
        machine = self.machine
        machine.now_ns = start_ns = machine.now_ns + self._dispatch_ns
        if self._compute_ns > start_ns:
            start_ns = self._compute_ns
        if self._awaited_ns > start_ns:
            self.stall_ns += self._awaited_ns - start_ns
            start_ns = self._awaited_ns
        work_ns = flops * self._ns_per_flop.get(dtype_name, self._ns_per_other_flop)
        move_ns = nbytes * self._ns_per_byte
        self._compute_ns = end_ns = (
            start_ns + self._launch_ns + int(work_ns if work_ns > move_ns else move_ns)
        )
        return end_ns

    # legality -----------------------------------------------------------------------------

    def _refuse_operand(self, verb: str, base: Tensor) -> NoReturn:
        key = id(base)
        arriving, leaving = self._arriving.get(key), self._leaving.get(key)
        if key not in self._present:
            self._refuse(f"an operator that {verb} it", base, "has no bytes on this device")
        if arriving is not None:
            why = f"is still arriving by {arriving}, and compute has not waited for it"
            self._refuse(f"an operator that {verb} it", base, why)
        why = f"is still being read by {leaving}, and compute has not waited for it"
        self._refuse(f"an operator that {verb} it", base, why)

    def _refuse(self, what: str, base: Tensor, why: str) -> NoReturn:
        key = id(base)
        resident = self._present.get(key) or self._residents.emptied.get(key)
        if resident is None:
            name = f"a base of {base.numel() * base.element_size():,} bytes, unknown here,"
        else:
            state = "" if key in self._present else "emptied "
            name = f"{state}{resident}"
        raise InvariantError(
            f"{self.name}: {what} is illegal at {self.machine.now_ns:,} ns: {name} {why}.",
            violations=(f"{what}: {why}",),
        )
