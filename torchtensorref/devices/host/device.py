"""The host: where blocks are at home."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base import forking
from ..base import DONE, Device, Event
from ..out_of_memory import of_host
from ..residents import Residents
from ..storages import bytes_of, empty_bytes, move_bytes, part_of, storage_of
from .readers import host_readers

if TYPE_CHECKING:
    from torch import Tensor

    from ..sim.machine import Machine

__all__ = ["HostDevice"]


class HostDevice(Device):
    """The host's memory and processor.

    Parameters
    ----------
    capacity_nbytes : int, optional
        What it is said to hold; by default what the system says is installed. It is not enforced.

    Notes
    -----
    Its copies are finished when they are issued. `resident_nbytes` counts what was allocated here
    and not the results of kernels. Where simulated devices exist, `machines` are their virtual
    hosts, and what runs here is charged to their clocks.
    """

    kind = "cpu"
    name = "cpu"
    index = 0
    is_host = True
    has_host_kernels = True
    kernels_allocate = True
    shares_memory = True

    def __init__(self, capacity_nbytes: int | None = None) -> None:
        self.capacity_nbytes = _installed_nbytes() if capacity_nbytes is None else capacity_nbytes
        self.machines: list[Machine] = []
        #: Those of devices that a user has made: they are forgotten with them.
        self._guests: weakref.WeakSet[Machine] = weakref.WeakSet()
        self._lock = forking.RLock()
        self._residents = Residents()
        self._alloc_count = 0

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        try:
            base = empty_bytes(nbytes)
        except RuntimeError as error:
            raise of_host(nbytes) from error
        with self._lock:
            self._residents.settle()
            self._alloc_count += 1
            self._residents.enter(base, nbytes, self._alloc_count)
        return base

    def refill(self, base: Tensor, nbytes: int) -> None:  # noqa: D102
        try:
            storage_of(base).resize_(nbytes)
        except RuntimeError as error:
            raise of_host(nbytes) from error
        with self._lock:
            self._residents.settle()
            resident = self._residents.emptied.get(id(base))
            if resident is not None:
                self._residents.enter_again(resident, nbytes)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._residents.settle()
            resident = self._residents.present.get(id(base))
            if resident is not None:
                self._residents.leave(resident)
        storage_of(base).resize_(0)

    def account(self, base: Tensor) -> None:
        """Count nothing: the host's memory is not rationed here."""

    def free_nbytes(self) -> int:
        """What the system says could be given to programs without swapping."""
        import psutil

        return int(psutil.virtual_memory().available)

    @property
    def resident_nbytes(self) -> int:
        """The bytes of the replicas here; what kernels use meanwhile is not among them."""
        with self._lock:
            self._residents.settle()
            return self._residents.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most of them since the last `reset_peak`."""
        return self._residents.peak_nbytes

    def reset_peak(self) -> None:  # noqa: D102
        with self._lock:
            self._residents.settle()
            self._residents.reset_peak()

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        return self._copy(source, bytes_of(base), after)

    def copy_out(  # noqa: D102
        self,
        base: Tensor,
        destination: Tensor,
        *,
        after: Event | None = None,
        start: int | None = None,
    ) -> Event:
        source = bytes_of(base) if start is None else part_of(base, start, destination.nbytes)
        return self._copy(source, destination, after)

    def _copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Event:
        if after is not None:
            after.synchronize()
        move_bytes(source, destination)
        self.charge(0, 2 * source.numel() * source.element_size(), "uint8")
        return DONE

    def available(self, base: Tensor) -> Event | None:
        """Nothing to wait for: the host works in order."""
        return None

    # operators ----------------------------------------------------------------------------

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Wait for copies that read what the operator writes.

        Refuse an operator on bytes that a simulated device has not finished copying here.
        """
        if host_readers.are_watched:
            for base in writes:
                host_readers.about_to_change(base)
        for machine in self._all_machines():
            if machine.landing:
                machine.check_landed(reads, "reads")
                machine.check_landed(writes, "writes")

    def about_to_change(self, base: Tensor) -> None:
        """Wait until no copy reads these bytes any more: they may be written unseen from now on."""
        host_readers.about_to_change(base)

    def has_changed(self, base: Tensor) -> None:
        """Forget what was copied from these bytes while they were being written."""
        host_readers.have_changed(base)

    def after_operator(  # noqa: D102
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        flops: int,
        nbytes: int,
        dtype_name: str,
    ) -> None:
        self.charge(flops, nbytes, dtype_name)

    def charge(self, flops: int, nbytes: int, dtype_name: str) -> None:
        """Advance the clocks of the virtual hosts, where there are any."""
        for machine in self._all_machines():
            machine.compute(flops, nbytes)

    def plug_in(self, machine: Machine) -> None:
        """Charge what runs here to one more virtual host, as long as its devices are there."""
        if machine not in self.machines:
            self._guests.add(machine)

    def _all_machines(self) -> list[Machine]:
        return [*self.machines, *self._guests] if self._guests else self.machines

    def record(self) -> Event:  # noqa: D102
        return DONE

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @property
    def hardware(self) -> str:
        """Its processor, and how many threads kernels have."""
        import torch

        return f"{_processor()}, {torch.get_num_threads()} threads"

    def now_ns(self) -> int:
        """The clock on the wall, or the virtual host's where there is one."""
        return self.machines[-1].now_ns if self.machines else time.perf_counter_ns()


@functools.cache
def _processor() -> str:
    """What the system calls the processor, and how many of it there are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(models, name)
    return f"{os.cpu_count()} x {name}"


def _installed_nbytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
