"""A simulated accelerator: real bytes, virtual time, and errors for illegal accesses.

It holds its bytes in host tensors and runs the host's kernels. Each of its engines (compute, and
one copy engine per direction) has a clock; the host that feeds them has another, shared by all
devices of one `Machine`. The rules of time:

* The host issues operators and copies in program order. Its clock advances by `dispatch_ns` per
  operator, and by what management takes (`host_costs`): for each operator, for each about which a
  strategy is told, for each block that is brought or given back. It waits only when it is told to,
  or when `queue_depth` operators are unfinished.
* An operator starts when compute is free, the host has issued it and the events compute waits
  for have fired. It takes ``launch_ns + max(flops / F, nbytes / bandwidth)``.
* A copy starts when its engine is free, the host has issued it and `after` has fired. It takes
  ``copy_latency_ns + nbytes / bandwidth``, the bandwidth being what the link takes of the host
  memory's that other copies leave over (`SharedMemory`).
* A copy to the device of at most `urgent_nbytes` passes those that are queued, which end when they
  would have ended; what is issued after it begins that much later.
* A copy from another device begins when that has done what it was given and the link between the
  two is free. It takes ``copy_latency_ns + nbytes / bandwidth`` and nothing of the host's memory.
* An operator on the host holds up the host's clock for ``max(flops / F, nbytes / bandwidth)``, the
  bandwidth being what a kernel takes of the host memory's that copies leave over. It begins where
  the program has come to: what it reads has been waited for, copies issued before go on.
* A copy from or to pageable memory is slower, and the host's clock waits until it ends.
* Its bytes arrive when its event fires (`wait`, `synchronize`, or `is_done` once the host's clock
  has passed its end), never before. Events of one engine fire in their order, so that waiting for
  one waits for those before it; nothing orders one engine with another but `after` and `wait`.
* Freed bytes may be written again when their last user has finished (`available`). Until then they
  count: with what is held they are no more than the budget (`limit`), or what is new waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base.options import Settings, listeners, parse_faults, settings
from ..base import Clocks, Device, Event
from ..storages import empty_bytes, storage_nbytes
from .compute import ComputeEngine, SimStopwatch
from .copies import CopyEngines
from .events import Engine
from .faults import FaultPlan
from .machine import Machine
from .memory import POISON, SimMemory
from .spec import DeviceSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["POISON", "SimDevice"]


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
    page_locked : bool, optional
        Whether the host's memory is page-locked, as ours is. Otherwise copies take as long as from
        pageable memory (`DeviceSpec.pageable_bytes_per_s`), and the host waits for each.
    keeps_bytes : bool, optional
        Whether there are bytes. Without, it counts and times what is asked of it, of any size, and
        its bases are on torch's device "meta", like those at home then.

    Attributes
    ----------
    alloc_count, copy_count : int
        How many allocations (also refills and kernels' results) and copies were asked for.
    stall_ns, host_stall_ns : int
        How long compute stood idle only because it waited for a copy; and while the host, which
        waited for nothing, had not issued its operator.
    host_ns : int
        What management took of the host's own time.

    Notes
    -----
    An access that a real device would answer with wrong bits raises `InvariantError` and names
    both accesses. `account` a kernel's results after its `after_operator` or `charge`, or name
    them among its writes: then `copy_out` can tell whether it would read them too early. Where
    `charge` is used, it is not known which bases were read, so that `available` takes every base
    that was there for used until the end of the last such operator.
    """

    kind = "sim"
    has_virtual_clock = True
    has_host_kernels = True
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
        page_locked: bool = True,
        keeps_bytes: bool = True,
    ) -> None:
        self.spec = spec
        self.index = index
        self.name = f"sim:{index}" if name is None else name
        self.capacity_nbytes = spec.capacity_nbytes
        self.machine = machine or Machine.of(spec)
        costs = spec.host_costs
        self.decision_nbytes = spec.decision_nbytes or costs.nbytes_meanwhile(spec.h2d_bytes_per_s)
        self.knows_host = spec.host_kernel_bytes_per_s is not None
        self.poison = poison
        self.page_locked = page_locked
        self._bytes_on = "cpu" if keeps_bytes else "meta"
        self._lock = self.machine.lock
        self._faults = faults or FaultPlan()
        self._compute = ComputeEngine(spec, self.machine)
        self._memory = SimMemory(
            self.name,
            spec.capacity_nbytes,
            machine=self.machine,
            compute=self._compute,
            faults=self._faults,
            poison=poison,
            bytes_on=self._bytes_on,
        )
        self._copies = CopyEngines(
            self.name,
            spec,
            machine=self.machine,
            compute=self._compute,
            memory=self._memory,
            faults=self._faults,
            page_locked=page_locked,
        )
        #: What was planned when it was made, and what has been planned since, by a scope.
        self._faults_at_start = settings.faults
        self._faults_of_scope: list[tuple[str, int]] = []
        _simulated.add(self)

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        with self._lock:
            return self._memory.allocate(nbytes)

    def refill(self, base: Tensor, nbytes: int) -> None:  # noqa: D102
        with self._lock:
            self._memory.refill(base, nbytes)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            if storage_nbytes(base):
                self._compute.manage(self.spec.host_costs.evicted_ns)
            self._memory.empty(base)

    def account(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._memory.account(base)

    def recover(self, bases: Sequence[tuple[Tensor, bool]]) -> None:  # noqa: D102
        with self._lock:
            self._memory.recover(bases)

    def home_memory(self, nbytes: int) -> Tensor | None:  # noqa: D102
        return None if self._bytes_on == "cpu" else empty_bytes(nbytes, self._bytes_on)

    def limit(self, nbytes: int) -> bool:
        """Let what is beyond wait until what was freed is free; nothing is refused: False."""
        with self._lock:
            self._memory.limit_nbytes = min(nbytes, self.capacity_nbytes)
        return False

    @property
    def limit_nbytes(self) -> int:
        """The limit: all that there is where none was set."""
        return self._memory.limit_nbytes

    def free_nbytes(self) -> int:  # noqa: D102
        return self.capacity_nbytes - self.resident_nbytes

    @property
    def resident_nbytes(self) -> int:
        """The bytes it holds now: exact, also for bases that have just died."""
        with self._lock:
            self._memory.settle()
            return self._memory.residents.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most bytes it has held since the last `reset_peak`: exact."""
        return self._memory.residents.peak_nbytes

    def reset_peak(self) -> None:  # noqa: D102
        with self._lock:
            self._memory.settle()
            self._memory.residents.reset_peak()

    def recount_nbytes(self) -> int:
        """The resident bytes, added up from the storages themselves (slow: for `check`)."""
        with self._lock:
            self._memory.settle()
            return self._memory.residents.recount()

    @property
    def alloc_count(self) -> int:
        """How many allocations were asked for: also refills and kernels' results."""
        return self._memory.alloc_count

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        with self._lock:
            self._compute.manage(self.spec.host_costs.fetched_ns)
            return self._copies.copy_in(source, base, after)

    def copy_out(  # noqa: D102
        self,
        base: Tensor,
        destination: Tensor,
        *,
        after: Event | None = None,
        start: int | None = None,
    ) -> Event:
        with self._lock:
            return self._copies.copy_out(base, destination, after, start)

    def available(self, base: Tensor) -> Event | None:  # noqa: D102
        with self._lock:
            self._memory.settle()
            end_ns = self._memory.available_ns(self._memory.resident("available", base))
            return None if end_ns <= self.machine.now_ns else self._copies.event_at(end_ns)

    def peer_bytes_per_s(self, giver: Device) -> float:  # noqa: D102
        if not isinstance(giver, SimDevice) or giver is self or giver.machine is not self.machine:
            return 0.0
        return min(self.spec.peer_bytes_per_s or 0.0, giver.spec.peer_bytes_per_s or 0.0)

    def peer_free_ns(self, giver: Device) -> int:  # noqa: D102
        assert isinstance(giver, SimDevice)
        return max(self._copies.peer_free_ns, giver._copies.peer_free_ns)

    def copy_across(  # noqa: D102
        self, giver: Device, source: Tensor, base: Tensor, *, after: Event | None = None
    ) -> Event:
        assert isinstance(giver, SimDevice)
        rate = self.peer_bytes_per_s(giver)
        with self._lock:
            self._compute.manage(self.spec.host_costs.fetched_ns)
            return self._copies.copy_across(giver._copies, source, base, after, rate / 1e9)

    def end_peer_copies(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._copies.end_peer_copies(base)

    @property
    def copy_count(self) -> int:
        """How many copies were asked for."""
        return self._copies.copy_count

    def fail_next(self, kind: str, number: int = 1) -> None:
        """Let the `number`-th ``"alloc"``, ``"copy"`` or ``"late"`` from now on fail, once."""
        with self._lock:
            self._faults.add(kind, self._counts_of_faults().get(kind, 0) + number)

    def _counts_of_faults(self) -> dict[str, int]:
        copies = self._copies
        return {
            "alloc": self.alloc_count,
            "copy": copies.copy_count,
            "late": copies.copy_in_count,
        }

    def plan_faults(self, text: str | None) -> None:
        """Follow `options(faults=...)`: its numbers count from now on, its end ends it."""
        with self._lock:
            for kind, number in self._faults_of_scope:
                self._faults.forget(kind, number)
            self._faults_of_scope.clear()
            if text is None or text == self._faults_at_start:
                return
            counts = self._counts_of_faults()
            self._faults_of_scope += [(kind, counts[kind] + n) for kind, n in parse_faults(text)]
            for kind, number in self._faults_of_scope:
                self._faults.add(kind, number)

    # operators ----------------------------------------------------------------------------

    def note_decision(self) -> None:  # noqa: D102
        with self._lock:
            self._compute.manage(self.spec.host_costs.decided_ns)

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Refuse an operator whose bases are not here, still arriving, or still being copied."""
        with self._lock:
            self._memory.check_operands(reads, writes)

    def after_operator(  # noqa: D102
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        flops: int,
        nbytes: int,
        dtype_name: str,
    ) -> None:
        with self._lock:
            end_ns = self._compute.run(flops, nbytes, dtype_name)
            self._memory.note_operands(reads, writes, end_ns)

    def charge(self, flops: int, nbytes: int, dtype_name: str) -> None:  # noqa: D102
        with self._lock:
            self._compute.unnoted_ns = self._compute.run(flops, nbytes, dtype_name)

    def charge_time(self, compute_ns: int, op_count: int) -> None:  # noqa: D102
        with self._lock:
            self._compute.run_unseen(compute_ns, op_count)

    def record(self) -> Event:  # noqa: D102
        with self._lock:
            return self._copies.event_at(self._compute.reached_ns)

    def synchronize(self) -> None:  # noqa: D102
        with self._lock:
            self.machine.wait_until(self._compute.reached_ns)
            self._copies.synchronize()

    # time ---------------------------------------------------------------------------------

    @property
    def stall_ns(self) -> int:
        """How long compute stood idle only because it waited for a copy."""
        return self._compute.stall_ns

    @property
    def host_stall_ns(self) -> int:
        """How long compute stood idle while the host had not issued its operator."""
        return self._compute.host_stall_ns

    @property
    def host_ns(self) -> int:
        """What management took of the host's own time."""
        return self._compute.host_ns

    def clocks(self) -> Clocks:  # noqa: D102
        compute, copies = self._compute, self._copies
        with self._lock:
            return Clocks(
                compute_ns=compute.worked_ns,
                compute_free_ns=compute.end_ns,
                link_free_ns=copies.free_ns(Engine.H2D),
                d2h_free_ns=copies.free_ns(Engine.D2H),
                h2d_bytes_per_s=copies.bytes_per_s(Engine.H2D),
                d2h_bytes_per_s=copies.bytes_per_s(Engine.D2H),
                host_bytes_per_s=self.machine.kernel_bytes_per_ns * 1e9,
                host_flops_per_s=self.machine.flops_per_ns * 1e9,
            )

    @property
    def hardware(self) -> str:  # noqa: D102
        return repr(self.spec)

    def stopwatch(self) -> SimStopwatch:  # noqa: D102
        return SimStopwatch(self._compute)

    def note_wait(self, began_ns: int) -> None:  # noqa: D102
        with self._lock:
            self._compute.stood_idle(began_ns)

    def now_ns(self) -> int:  # noqa: D102
        return self.machine.now_ns


_simulated: weakref.WeakSet[SimDevice] = weakref.WeakSet()


def _follow_options(before: Settings) -> None:
    if before.faults != settings.faults:
        for device in list(_simulated):
            device.plan_faults(settings.faults)


listeners.append(_follow_options)
