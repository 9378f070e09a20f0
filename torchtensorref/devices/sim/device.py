"""A simulated accelerator: real bytes, virtual time, and no mercy for illegal accesses.

It holds its bytes in host tensors and runs the host's kernels. Each of its engines (compute, and
one copy engine per direction) has a clock; the host that feeds them has another, shared by all
devices of one `Machine`. The rules of time:

* The host issues operators and copies in program order. Its clock advances by `dispatch_ns` per
  operator, and waits only when it is told to, or when `queue_depth` operators are unfinished.
* An operator starts when compute is free, the host has issued it and the events compute waits
  for have fired. It takes ``launch_ns + max(flops / F, nbytes / bandwidth)``.
* A copy starts when its engine is free, the host has issued it and `after` has fired. It takes
  ``copy_latency_ns + nbytes / bandwidth``, the bandwidth being what the link takes of the host
  memory's that other copies leave over (`SharedMemory`).
* A copy from or to pageable memory is slower, and the host's clock waits until it ends.
* Its bytes arrive when its event fires (`wait`, `synchronize`, or `is_done` once the host's clock
  has passed its end), never before. Events of one engine fire in their order, so that waiting for
  one waits for those before it; nothing orders one engine with another but `after` and `wait`.
* Freed room may be written again when its last user has finished (`available`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ..base import Clocks
from .engines import SimEngines
from .events import Engine
from .faults import FaultPlan
from .machine import Machine
from .memory import POISON
from .spec import DeviceSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["POISON", "SimDevice"]


class SimDevice(SimEngines):
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

    Attributes
    ----------
    alloc_count, copy_count : int
        How many allocations (also refills and kernels' results) and copies were asked for.
    stall_ns : int
        How long compute stood idle only because it waited for a copy.

    Notes
    -----
    An access that a real device would answer with wrong bits raises `InvariantError` and names
    both accesses. `account` a kernel's results after its `after_operator` or `charge`, or name
    them among its writes: then `copy_out` can tell whether it would read them too early. Where
    `charge` is used, nobody knows which bases were read, so that `available` takes every base that
    was there for used until the end of the last such operator.
    """

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
        super().__init__(
            spec,
            index,
            machine=machine,
            poison=poison,
            faults=faults,
            name=name,
            page_locked=page_locked,
        )
        self.stall_ns = 0
        self._worked_ns = 0  # what its operators took, waiting not counted
        self._dispatch_ns = spec.dispatch_ns
        self._launch_ns = spec.launch_ns
        self._ns_per_byte = 1e9 / spec.memory_bytes_per_s
        self._ns_per_flop = {name: 1e9 / rate for name, rate in spec.flops_per_s.items()}
        self._ns_per_other_flop = 1e9 / spec.default_flops_per_s
        #: when the last operators end; the oldest one is overwritten next
        self._queue = [0] * spec.queue_depth
        self._queue_next = 0

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Refuse an operator whose bases are not here, still arriving, or still being copied."""
        if self._dead:
            with self._lock:
                self._settle()
        present, arriving, leaving = self._present, self._arriving, self._leaving
        for base in reads:
            key = id(base)
            if key not in present or key in arriving:
                self._refuse_operand("reads", base)
        for base in writes:
            key = id(base)
            if key not in present or key in arriving or key in leaving:
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

    def charge_time(self, compute_ns: int, op_count: int) -> None:  # noqa: D102
        machine = self.machine
        with self._lock:
            start_ns = max(machine.now_ns, self._compute_ns)
            if self._awaited_ns > start_ns:
                self.stall_ns += self._awaited_ns - start_ns
                start_ns = self._awaited_ns
            machine.now_ns += op_count * self._dispatch_ns
            self._worked_ns += compute_ns
            self._compute_ns = self._unnoted_ns = max(start_ns + compute_ns, machine.now_ns)

    def clocks(self) -> Clocks:  # noqa: D102
        with self._lock:
            return Clocks(
                compute_ns=self._worked_ns,
                compute_free_ns=self._compute_ns,
                link_free_ns=self._copy_ns[Engine.H2D],
                d2h_free_ns=self._copy_ns[Engine.D2H],
                h2d_bytes_per_s=self._link_rate[Engine.H2D] * 1e9,
                d2h_bytes_per_s=self._link_rate[Engine.D2H] * 1e9,
            )

    def _run(self, flops: int, nbytes: int, dtype_name: str) -> int:
        """Give one operator to compute; return when it ends. The caller holds the lock."""
        machine, queue, place = self.machine, self._queue, self._queue_next
        start_ns = machine.now_ns + self._dispatch_ns
        if queue[place] > start_ns:
            start_ns = queue[place]
        machine.now_ns = start_ns
        if self._compute_ns > start_ns:
            start_ns = self._compute_ns
        if self._awaited_ns > start_ns:
            self.stall_ns += self._awaited_ns - start_ns
            start_ns = self._awaited_ns
        work_ns = flops * self._ns_per_flop.get(dtype_name, self._ns_per_other_flop)
        move_ns = nbytes * self._ns_per_byte
        took_ns = self._launch_ns + int(work_ns if work_ns > move_ns else move_ns)
        self._worked_ns += took_ns
        end_ns = start_ns + took_ns
        self._compute_ns = queue[place] = end_ns
        self._queue_next = place + 1 if place + 1 < len(queue) else 0
        return end_ns

    def _refuse_operand(self, verb: str, base: Tensor) -> NoReturn:
        key = id(base)
        arriving, leaving = self._arriving.get(key), self._leaving.get(key)
        what = f"an operator that {verb} it"
        if key not in self._present:
            self._refuse(what, base, "has no bytes on this device")
        if arriving is not None:
            self._refuse(what, base, f"arrives by {arriving}, and compute has not waited for it")
        self._refuse(what, base, f"is being read by {leaving}, and compute has not waited for it")
