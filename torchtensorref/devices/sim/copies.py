"""The copy engines of a simulated device, and the events that tell when work is done."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from ...base.errors import TransferError
from ..base import Event
from ..residents import Resident
from ..storages import bytes_of, part_of
from .compute import ComputeEngine
from .events import Copy, Engine, Landing, SimEvent
from .faults import FaultPlan
from .machine import Machine, address_of
from .memory import SimMemory
from .spec import DeviceSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CopyEngines"]


class _CopyEngine:
    """One direction of the link."""

    def __init__(self, bytes_per_s: float, not_awaited: dict[int, Copy]) -> None:
        self.bytes_per_ns = bytes_per_s / 1e9
        self.free_ns = 0
        #: copies whose bytes have not arrived, in their order
        self.pending: deque[Copy] = deque()
        #: copies that were not waited for, by the id of their base; shared with the memory
        self.not_awaited = not_awaited

    def expect(self, key: int, copy: Copy) -> None:
        """Note a copy that was issued."""
        self.pending.append(copy)
        self.note(key, copy)

    def note(self, key: int, copy: Copy) -> None:
        """Note a copy of this engine's, or one that another device makes of the same bytes."""
        before = self.not_awaited.pop(key, None)
        if before is not None and before.observer is not copy.observer:
            before.observer.deliver(before)  # it is not known here any more when its source goes
        last = next(reversed(self.not_awaited.values()), copy)
        self.not_awaited[key] = copy
        # Small copies pass others, and those between devices go by a link of their own.
        if any(copy.end_ns < other.end_ns for other in (last, *islice(reversed(self.pending), 2))):
            self.put_in_order()

    def put_in_order(self) -> None:
        """Put the copies in the order of their ends again: one has passed others."""
        self.pending = deque(sorted(self.pending, key=_end_of))
        by_end = sorted(self.not_awaited.items(), key=lambda item: item[1].end_ns)
        self.not_awaited.clear()
        self.not_awaited.update(by_end)


def _end_of(copy: Copy) -> int:
    return copy.end_ns


class CopyEngines:
    """Issues copies in virtual time, and moves their bytes when their events are waited for.

    Parameters
    ----------
    name : str
        The device's.
    spec : DeviceSpec
        How fast the link is.
    machine : Machine
        Has the host's clock and memory, which copies share.
    compute : ComputeEngine
        Waits for events.
    memory : SimMemory
        The device's end of the copies.
    faults : FaultPlan
        Which copies fail.
    page_locked : bool
        Whether the host's end is page-locked; else the host waits for each copy.

    Attributes
    ----------
    copy_count : int
        How many copies were asked for.

    Notes
    -----
    The caller holds the machine's lock, except where an event asks: `has_fired`,
    `wait_on_compute` and `wait_on_host` take it.
    """

    def __init__(
        self,
        name: str,
        spec: DeviceSpec,
        *,
        machine: Machine,
        compute: ComputeEngine,
        memory: SimMemory,
        faults: FaultPlan,
        page_locked: bool,
    ) -> None:
        self._name = name
        self._spec = spec
        self._machine = machine
        self._compute = compute
        self._memory = memory
        self._faults = faults
        self._page_locked = page_locked
        self.copy_count = 0
        #: Of those, to the device.
        self.copy_in_count = 0
        #: When its link to other devices has finished what it was given.
        self.peer_free_ns = 0
        #: Copies to the host that it has not waited for, oldest first.
        self.landing: Landing = deque()
        self._engines = {
            Engine.H2D: _CopyEngine(
                spec.link_bytes_per_s(to_device=True, page_locked=page_locked), memory.arriving
            ),
            Engine.D2H: _CopyEngine(
                spec.link_bytes_per_s(to_device=False, page_locked=page_locked), memory.leaving
            ),
        }

    def free_ns(self, engine: Engine) -> int:
        """When a copy engine has finished what it was given."""
        return self._engines[engine].free_ns

    def bytes_per_s(self, engine: Engine) -> float:
        """How fast a copy engine is while nothing else uses the host's memory."""
        return self._engines[engine].bytes_per_ns * 1e9

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, after: Event | None) -> Event:
        """Issue a copy to the device, as `Device.copy_in` does."""
        memory = self._memory
        resident = self._check_ends("copy_in", base, source)
        self._check_order("copy_in", base, memory.available_ns(resident), after, "its users")
        landing, _ = self._machine.landing.get(address_of(source), (None, None))
        if landing is not None:
            self._check_order("copy_in", base, landing.end_ns, after, f"its source's {landing}")
        copy = self._issue(Engine.H2D, resident, after, resident.nbytes)
        copy.source = source
        self.copy_in_count += 1
        if self._faults.fire("late", self.copy_in_count):
            copy.error = TransferError(
                f"{copy} was made to fail. Its source is untouched; a second try will work.",
                source="cpu",
                destination=self._name,
                nbytes=resident.nbytes,
            )
        memory.poison_base(base)
        return copy

    def copy_out(
        self, base: Tensor, destination: Tensor, after: Event | None, start: int | None = None
    ) -> Event:
        """Issue a copy to the host, as `Device.copy_out` does."""
        memory, nbytes = self._memory, destination.nbytes
        resident = self._check_ends("copy_out", base, destination, start)
        if after is None:
            after = self.event_at(self._compute.reached_ns)
        written_ns = resident.written_ns
        arriving = memory.arriving.get(resident.key)
        if arriving is not None:
            written_ns = max(written_ns, arriving.end_ns)
        self._check_order("copy_out", base, written_ns, after, "its writer")
        copy = self._issue(Engine.D2H, resident, after, nbytes)
        copy.source = bytes_of(base) if start is None else part_of(base, start, nbytes)
        copy.target = destination
        if nbytes:
            self._machine.expect(copy, destination)
        memory.poison(destination)
        return copy

    def copy_across(
        self,
        giver: CopyEngines,
        source: Tensor,
        base: Tensor,
        after: Event | None,
        bytes_per_ns: float,
    ) -> Event:
        """Issue a copy from another device, as `Device.copy_across` does."""
        memory, spec, machine = self._memory, self._spec, self._machine
        giver._memory.settle()
        given = giver._memory.resident("copy_across", source)
        taken = self._check_ends("copy_across", base, bytes_of(source))
        self._check_order("copy_across", base, memory.available_ns(taken), after, "its users")
        arriving = giver._memory.arriving.get(given.key)
        if arriving is not None:
            giver._memory.refuse("copy_across", source, f"arrives by {arriving}")
        self._count_copy(giver._name, self._name, taken.nbytes)
        free_ns = max(self.peer_free_ns, giver.peer_free_ns, giver._compute.reached_ns)
        start_ns = max(free_ns, machine.now_ns, after.end_ns if after else 0)
        end_ns = math.ceil(start_ns + spec.copy_latency_ns + taken.nbytes / bytes_per_ns)
        self.peer_free_ns = giver.peer_free_ns = end_ns
        copy = Copy(
            self,
            Engine.H2D,
            end_ns,
            start_ns=start_ns,
            number=self.copy_count,
            resident=taken,
            after=after,
        )
        copy.source = bytes_of(source)
        self._engines[Engine.H2D].expect(taken.key, copy)
        giver._engines[Engine.D2H].note(given.key, copy)
        memory.poison_base(base)
        return copy

    def end_peer_copies(self, base: Tensor) -> None:
        """Let compute wait until no other device reads a base, as `Device.end_peer_copies` does."""
        key = self._memory.resident("end_peer_copies", base).key
        copy = self._memory.leaving.get(key)
        if copy is not None and copy.observer is not self:
            copy.observer.deliver(copy)
            self._compute.wait_for(copy.end_ns)
            del self._memory.leaving[key]

    def _check_ends(
        self, what: str, base: Tensor, host_side: Tensor, start: int | None = None
    ) -> Resident:
        """Refuse a copy whose base is not here, or whose two ends differ in size."""
        memory = self._memory
        memory.settle()
        resident = memory.resident(what, base)
        nbytes = host_side.numel() * host_side.element_size()
        is_all = nbytes == resident.nbytes
        if not (is_all if start is None else 0 <= start <= resident.nbytes - nbytes):
            memory.refuse(what, base, f"does not match the {nbytes:,} bytes of the host side")
        if not host_side.is_contiguous():
            memory.refuse(what, base, "cannot be copied: the host side is not contiguous")
        return resident

    def _check_order(
        self, what: str, base: Tensor, free_at_ns: int, after: Event | None, user: str
    ) -> None:
        """Refuse a copy that could start before the users of its bytes have finished."""
        now_ns = self._machine.now_ns
        ordered_ns = now_ns if after is None else max(now_ns, after.end_ns)
        if ordered_ns < free_at_ns:
            self._memory.refuse(
                what,
                base,
                f"may be touched at {ordered_ns:,} ns, but {user} will not have finished before "
                f"{free_at_ns:,} ns; pass `after`",
            )

    def _issue(
        self, direction: Engine, resident: Resident, after: Event | None, nbytes: int
    ) -> Copy:
        """Give one copy to its engine."""
        ends = ("cpu", self._name) if direction is Engine.H2D else (self._name, "cpu")
        self._count_copy(*ends, nbytes)
        machine, spec, engine = self._machine, self._spec, self._engines[direction]
        is_urgent = direction is Engine.H2D and 0 < nbytes <= spec.urgent_nbytes
        queued_ns = 0 if is_urgent else engine.free_ns
        start_ns = max(queued_ns, machine.now_ns, after.end_ns if after else 0)
        machine.memory.forget_before(machine.now_ns)
        end_ns = math.ceil(
            machine.memory.finish(
                start_ns + spec.copy_latency_ns,
                nbytes,
                rate=engine.bytes_per_ns,
                total_rate=spec.host_memory_bytes_per_s / 1e9,
                lane=(self._name, id(self), direction, is_urgent),
            )
        )
        free_ns = end_ns
        if is_urgent:  # what is queued behind it has so much less of the link
            free_ns = max(end_ns, engine.free_ns + int(nbytes / engine.bytes_per_ns))
        for busy in (engine,) if spec.duplex else self._engines.values():
            busy.free_ns = free_ns
        copy = Copy(
            self,
            direction,
            end_ns,
            start_ns=start_ns,
            number=self.copy_count,
            resident=resident,
            after=after,
        )
        engine.expect(resident.key, copy)
        if not self._page_locked:
            machine.wait_until(end_ns)
        return copy

    def _count_copy(self, source: str, destination: str, nbytes: int) -> None:
        self.copy_count += 1
        if self._faults.fire("copy", self.copy_count):
            raise TransferError(
                f"Copy {self.copy_count} from {source} to {destination} ({nbytes:,} bytes) was "
                "made to fail. Nothing has changed; a second try will work.",
                source=source,
                destination=destination,
                nbytes=nbytes,
            )

    # events -------------------------------------------------------------------------------

    def event_at(self, end_ns: int) -> SimEvent:
        """An event of compute."""
        return SimEvent(self, Engine.COMPUTE, end_ns)

    def has_fired(self, event: SimEvent) -> bool:
        """Whether the host's clock has passed an event; if so, its bytes arrive."""
        with self._machine.lock:
            if self._machine.now_ns < event.end_ns:
                return False
            self._observe(event.engine, event.end_ns, on_host=True)
            return True

    def wait_on_compute(self, event: SimEvent) -> None:
        """Let compute wait for an event; its bytes arrive."""
        with self._machine.lock:
            self._compute.wait_for(event.end_ns)
            self._observe(event.engine, event.end_ns, on_host=False)

    def wait_on_host(self, event: SimEvent) -> None:
        """Let the host wait for an event; its bytes arrive."""
        with self._machine.lock:
            self._machine.wait_until(event.end_ns)
            self._observe(event.engine, event.end_ns, on_host=True)

    def synchronize(self) -> None:
        """Let the host wait for every copy; their bytes arrive."""
        for direction, engine in self._engines.items():
            self._machine.wait_until(engine.free_ns)
            self._observe(direction, engine.free_ns, on_host=True)

    def deliver(self, copy: Copy) -> None:
        """Move the bytes of a copy and of those before it; they may not be used yet."""
        self._deliver(copy.engine, copy.end_ns)

    def _observe(self, direction: Engine, end_ns: int, *, on_host: bool) -> None:
        """Let the copies that one engine has finished by `end_ns` arrive; they may be used."""
        if direction is Engine.COMPUTE:
            return
        self._deliver(direction, end_ns)
        not_awaited = self._engines[direction].not_awaited
        while not_awaited:
            key, copy = next(iter(not_awaited.items()))  # they end in the order of their issue
            if copy.end_ns > end_ns:
                break
            if copy.observer is not self:  # another device copies from here
                copy.observer.deliver(copy)
            del not_awaited[key]
        if on_host and direction is Engine.D2H:
            self._machine.land(self.landing, end_ns)

    def _deliver(self, direction: Engine, end_ns: int) -> None:
        pending = self._engines[direction].pending
        while pending and pending[0].end_ns <= end_ns:
            copy = pending[0]
            before = copy.after
            if isinstance(before, Copy):
                # The copy it waited for arrived before it, although its event was not asked.
                before.observer.deliver(before)
            copy.arrive()
            pending.popleft()  # last: who is interrupted before does it again
