"""The copy engines and the events of a simulated device."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from ...base.errors import TransferError
from ..base import Event, bytes_of, fill_bytes
from ..residents import Resident
from .events import Copy, Engine, SimEvent
from .faults import FaultPlan
from .machine import Machine
from .memory import POISON, SimMemory
from .spec import DeviceSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SimEngines"]


class SimEngines(SimMemory):
    """The part of a simulated device that copies. `SimDevice` has the docs."""

    def __init__(
        self,
        spec: DeviceSpec,
        index: int = 0,
        *,
        machine: Machine | None = None,
        poison: bool = False,
        faults: FaultPlan | None = None,
        name: str | None = None,
        page_locked: bool = True,
    ) -> None:
        super().__init__(spec, index, machine=machine, poison=poison, faults=faults, name=name)
        self.page_locked = page_locked
        #: when each copy engine is free
        self._copy_ns = {Engine.H2D: 0, Engine.D2H: 0}
        #: copies whose bytes have not arrived, in the order of their engine
        self._pending: dict[Engine, deque[Copy]] = {Engine.H2D: deque(), Engine.D2H: deque()}
        self._touching = {Engine.H2D: self._arriving, Engine.D2H: self._leaving}
        self._link_rate = {
            Engine.H2D: spec.link_bytes_per_s(to_device=True, page_locked=page_locked) / 1e9,
            Engine.D2H: spec.link_bytes_per_s(to_device=False, page_locked=page_locked) / 1e9,
        }

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        with self._lock:
            resident = self._resident_for_copy("copy_in", base, source)
            self._check_order("copy_in", base, self._available_ns(resident), after, "its users")
            landing, _ = self.machine.landing.get(source.data_ptr(), (None, None))
            if landing is not None:
                self._check_order("copy_in", base, landing.end_ns, after, f"its source's {landing}")
            copy = self._issue(Engine.H2D, resident, after)
            copy.source = source
            if self.poison:
                fill_bytes(bytes_of(base), POISON)
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
            if resident.nbytes:
                self.machine.expect(copy, destination)
            if self.poison:
                fill_bytes(destination, POISON)
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

    def _resident_for_copy(self, what: str, base: Tensor, host_side: Tensor) -> Resident:
        self._settle()
        resident = self._present.get(id(base))
        if resident is None:
            self._refuse(what, base, "has no bytes on this device")
        nbytes = host_side.numel() * host_side.element_size()
        if nbytes != resident.nbytes:
            self._refuse(what, base, f"does not match the {nbytes:,} bytes of the host side")
        if not host_side.is_contiguous():
            self._refuse(what, base, "cannot be copied: the host side is not contiguous")
        return resident

    def _check_order(
        self, what: str, base: Tensor, free_at_ns: int, after: Event | None, whom: str
    ) -> None:
        """Refuse a copy that could start before the users of its bytes have finished."""
        now_ns = self.machine.now_ns
        ordered_ns = now_ns if after is None else max(now_ns, after.end_ns)
        if ordered_ns < free_at_ns:
            self._refuse(
                what,
                base,
                f"may be touched at {ordered_ns:,} ns, but {whom} will not have finished before "
                f"{free_at_ns:,} ns; pass `after`",
            )

    def _issue(self, engine: Engine, resident: Resident, after: Event | None) -> Copy:
        """Give one copy to its engine."""
        self._count_copy(engine, resident.nbytes)
        machine, spec = self.machine, self.spec
        start_ns = max(self._copy_ns[engine], machine.now_ns, after.end_ns if after else 0)
        machine.memory.forget_before(machine.now_ns)
        end_ns = math.ceil(
            machine.memory.finish(
                start_ns + spec.copy_latency_ns,
                resident.nbytes,
                rate=self._link_rate[engine],
                total_rate=spec.host_memory_bytes_per_s / 1e9,
                lane=(self.name, id(self), engine),
            )
        )
        for busy in (engine,) if spec.duplex else (Engine.H2D, Engine.D2H):
            self._copy_ns[busy] = end_ns
        copy = Copy(self, engine, end_ns, number=self.copy_count, resident=resident, after=after)
        self._pending[engine].append(copy)
        self._touching[engine][resident.key] = copy
        if not self.page_locked:
            machine.wait_until(end_ns)
        return copy

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

    # events -------------------------------------------------------------------------------

    def has_fired(self, event: SimEvent) -> bool:
        """Whether the host's clock has passed an event; if so, its bytes arrive."""
        with self._lock:
            if self.machine.now_ns < event.end_ns:
                return False
            self._observe(event.engine, event.end_ns, on_host=True)
            return True

    def wait_on_compute(self, event: SimEvent) -> None:
        """Let compute wait for an event; its bytes arrive."""
        with self._lock:
            self._awaited_ns = max(self._awaited_ns, event.end_ns)
            self._observe(event.engine, event.end_ns, on_host=False)

    def wait_on_host(self, event: SimEvent) -> None:
        """Let the host wait for an event; its bytes arrive."""
        with self._lock:
            self.machine.wait_until(event.end_ns)
            self._observe(event.engine, event.end_ns, on_host=True)

    def deliver(self, copy: Copy) -> None:
        """Move the bytes of a copy and of those before it, and let nobody use them yet."""
        self._deliver(copy.engine, copy.end_ns)

    def _observe(self, engine: Engine, end_ns: int, *, on_host: bool) -> None:
        """Let the copies that one engine has finished by `end_ns` arrive, and be used."""
        if engine is Engine.COMPUTE:
            return
        self._deliver(engine, end_ns)
        touching = self._touching[engine]
        for key in [key for key, copy in touching.items() if copy.end_ns <= end_ns]:
            del touching[key]
        if on_host and engine is Engine.D2H:
            self.machine.land(self, end_ns)

    def _deliver(self, engine: Engine, end_ns: int) -> None:
        pending = self._pending[engine]
        while pending and pending[0].end_ns <= end_ns:
            copy = pending.popleft()
            before = copy.after
            if isinstance(before, Copy):
                # What it waited for arrived first, whether anybody has looked or not.
                before.device.deliver(before)
            copy.arrive()

    def record(self) -> Event:  # noqa: D102
        with self._lock:
            return SimEvent(self, Engine.COMPUTE, max(self._compute_ns, self._awaited_ns))

    def synchronize(self) -> None:  # noqa: D102
        with self._lock:
            self.machine.wait_until(max(self._compute_ns, self._awaited_ns))
            for engine, end_ns in self._copy_ns.items():
                self.machine.wait_until(end_ns)
                self._observe(engine, end_ns, on_host=True)

    def now_ns(self) -> int:  # noqa: D102
        return self.machine.now_ns
