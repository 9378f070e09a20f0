"""What each accelerator's time went into: several work, and wait, at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..devices.base import Device
from .advice import Bound, bound_of
from .bookkeeping import Books


class DeviceTimes(NamedTuple):
    """How far one accelerator has come, and what its time went into; or the difference of two."""

    reached_ns: int
    compute_ns: int
    stall_ns: int
    host_ns: int
    host_stall_ns: int

    @classmethod
    def of(cls, device: Device) -> DeviceTimes:
        """Read its clocks; it has come as far as what it was given, and the host, have."""
        reached_ns = max(device.now_ns(), device.record().end_ns)
        compute_ns = device.clocks().compute_ns
        return cls(reached_ns, compute_ns, device.stall_ns, device.host_ns, device.host_stall_ns)

    def since(self, first: DeviceTimes | None) -> DeviceTimes:
        """Return what has come to it since then; all of it if nothing was noted then."""
        if first is None:
            return self
        return DeviceTimes(*(now - then for now, then in zip(self, first, strict=True)))


def times_by_device(books: Books) -> dict[Device, DeviceTimes]:
    """Read the clocks of all accelerators in use; of the host where there is none."""
    return {device: DeviceTimes.of(device) for device in books.accelerators or [books.main]}


def busiest(times: Mapping[Device, DeviceTimes]) -> Device:
    """Return the accelerator that worked or waited for copies longest: the others ended sooner."""
    return max(times, key=lambda device: times[device].compute_ns + times[device].stall_ns)


def as_numbers(times: Mapping[Device, DeviceTimes]) -> dict[str, int]:
    """Return the times of a run: what stands for one accelerator is that of the busiest.

    Sums over several would be longer than the run. Management's time is of one host.
    """
    most = times[busiest(times)]
    return {
        "compute_ns": most.compute_ns,
        "stall_ns": most.stall_ns,
        "host_ns": sum(one.host_ns for one in times.values()),
        "host_stall_ns": most.host_stall_ns,
        "time_ns": max(one.reached_ns for one in times.values()),
    }


def bound_of_run(books: Books, stats: dict[str, Any]) -> Bound:
    """Say what bounds a run: of several accelerators, what bounds the busiest."""
    device = next((d for d in books.accelerators if d.name == stats["busiest"]), books.main)
    clocks = device.clocks()
    if len(stats["by_device"]) > 1:
        stats = {**stats, "prefetched_nbytes": 0, **stats["by_device"][device.name]}
    return bound_of(stats, clocks.h2d_bytes_per_s, clocks.d2h_bytes_per_s)
