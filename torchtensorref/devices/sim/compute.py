"""The compute engine of a simulated device: when its operators start and end."""

from __future__ import annotations

from .machine import Machine
from .spec import DeviceSpec

__all__ = ["ComputeEngine", "SimStopwatch"]


class ComputeEngine:
    """The clock that operators advance.

    Parameters
    ----------
    spec : DeviceSpec
        How fast it is.
    machine : Machine
        The host that issues the operators.

    Attributes
    ----------
    end_ns : int
        When it has finished the operators it was given.
    awaited_ns : int
        When the last of the events that it was told to wait for fires.
    unnoted_ns : int
        The end of the last operator whose operands were not noted.
    worked_ns : int
        What its operators took, waiting not counted.
    stall_ns : int
        How long it stood idle only because it waited for a copy.
    host_stall_ns : int
        How long it stood idle while the host, which waited for nothing, had not issued its
        operator; copies that it has issued late have not arrived then either.
    host_ns : int
        What management took of the host's own time (`DeviceSpec.host_costs`).

    Notes
    -----
    The caller holds the machine's lock.
    """

    def __init__(self, spec: DeviceSpec, machine: Machine) -> None:
        self.end_ns = self.awaited_ns = self.unnoted_ns = self.worked_ns = self.stall_ns = 0
        self.host_stall_ns = self.host_ns = 0
        self._idle_until_ns = 0
        self._machine = machine
        self._dispatch_ns = spec.dispatch_ns
        self._ready_ns = spec.host_costs.ready_ns
        self._launch_ns = spec.launch_ns
        self._ns_per_byte = 1e9 / spec.memory_bytes_per_s
        self._ns_per_flop = {name: 1e9 / rate for name, rate in spec.flops_per_s.items()}
        self._ns_per_other_flop = 1e9 / spec.default_flops_per_s
        #: when the last operators end; the oldest one is overwritten next
        self._queue = [0] * spec.queue_depth
        self._queue_next = 0

    @property
    def reached_ns(self) -> int:
        """When it has finished what it was given, and what it waits for has fired."""
        return max(self.end_ns, self.awaited_ns)

    def wait_for(self, end_ns: int) -> None:
        """Start no later operator before a moment."""
        self.awaited_ns = max(self.awaited_ns, end_ns)

    def manage(self, took_ns: int) -> None:
        """Let management take so much of the host's own time."""
        self._machine.now_ns += took_ns
        self.host_ns += took_ns

    def stood_idle(self, began_ns: int) -> None:
        """Count a stall: the host has waited since then for a copy, and given it no operator."""
        now_ns = self._machine.now_ns
        # Several threads may have waited at the same time.
        self.stall_ns += max(0, now_ns - max(began_ns, self.end_ns, self._idle_until_ns))
        self._idle_until_ns = now_ns

    def run(self, flops: int, nbytes: int, dtype_name: str) -> int:
        """Issue one operator; return when it ends."""
        machine, queue, slot = self._machine, self._queue, self._queue_next
        if self._ready_ns:
            self.manage(self._ready_ns)
        issued_ns = machine.now_ns + self._dispatch_ns
        if queue[slot] > issued_ns:
            issued_ns = queue[slot]
        machine.now_ns = issued_ns
        work_ns = flops * self._ns_per_flop.get(dtype_name, self._ns_per_other_flop)
        move_ns = nbytes * self._ns_per_byte
        took_ns = self._launch_ns + int(work_ns if work_ns > move_ns else move_ns)
        self.worked_ns += took_ns
        self.end_ns = end_ns = queue[slot] = self._start_ns(issued_ns) + took_ns
        self._queue_next = slot + 1 if slot + 1 < len(queue) else 0
        return end_ns

    def run_unseen(self, compute_ns: int, op_count: int) -> None:
        """Issue operators that were not seen one by one; `compute_ns` is their sum."""
        machine = self._machine
        start_ns = self._start_ns(machine.now_ns)
        machine.now_ns += op_count * self._dispatch_ns
        self.worked_ns += compute_ns
        self.end_ns = self.unnoted_ns = max(start_ns + compute_ns, machine.now_ns)

    def _start_ns(self, issued_ns: int) -> int:
        """When an operator starts; the time it waits for a copy or the host is added up."""
        start_ns = self.end_ns
        if issued_ns > start_ns:
            self.host_stall_ns += max(0, issued_ns - max(start_ns, self._machine.waited_ns))
            start_ns = issued_ns
        if self.awaited_ns > start_ns:
            self.stall_ns += self.awaited_ns - start_ns
            start_ns = self.awaited_ns
        return start_ns


class SimStopwatch:
    """What a simulated device's operators take, by its clock: known at once."""

    def __init__(self, engine: ComputeEngine) -> None:
        self._engine = engine
        self._began_ns = engine.worked_ns
        self._took_ns: int | None = None

    def stop(self) -> None:
        """End what is measured."""
        self._took_ns = self._engine.worked_ns - self._began_ns

    def took_ns(self) -> int | None:
        """How long it took; None before it was stopped."""
        return self._took_ns
