"""What a simulated device is like: its size and its speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.errors import ConfigError
from ...base.units import parse_nbytes
from .host_costs import HostCosts

__all__ = ["DeviceSpec"]

#: Pageable copies are bound by one host core and its memory, not by the link: 3 to 6 GB/s are found
#: (THEORY.md, 4.3). The high end, for every host.
PAGEABLE_BYTES_PER_S = 6e9


#: Fields that may be zero.
SIZES_AND_TIMES = (
    "capacity_nbytes", "urgent_nbytes", "decision_nbytes",
    "copy_latency_ns", "launch_ns", "dispatch_ns",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceSpec:
    """Size and speeds of a simulated device and of the host it is plugged into.

    Speeds are *effective* ones: what programs see, not what a data sheet promises.

    Examples
    --------
    >>> small = DeviceSpec("mine", capacity_nbytes=1000)
    >>> small.scaled(capacity=4000).capacity_nbytes
    4000
    """

    name: str
    capacity_nbytes: int
    #: by dtype name; "default" for every other dtype
    flops_per_s: Mapping[str, float] = field(default_factory=lambda: {"default": 5e12}, hash=False)
    memory_bytes_per_s: float = 200e9
    h2d_bytes_per_s: float = 12e9
    d2h_bytes_per_s: float = 12e9
    #: of a copy, either way, with ordinary (pageable) memory at the host's end: the driver moves it
    #: piece by piece through a small page-locked buffer, and the host waits for it
    pageable_bytes_per_s: float = PAGEABLE_BYTES_PER_S
    #: from the issue of a copy to its first byte
    copy_latency_ns: int = 10_000
    #: of one kernel, on the device
    launch_ns: int = 5_000
    #: time the host needs to issue one operator
    dispatch_ns: int = 2_000
    #: how many operators the host may have issued and the device not finished (CUDA: 1024)
    queue_depth: int = 1024
    #: of host memory; copies and host operators share it
    host_memory_bytes_per_s: float = 40e9
    host_flops_per_s: float = 0.5e12
    #: the most that a kernel of the host takes of that memory (THEORY.md, 3.2: b_c); None where it
    #: is not known of this machine: all that copies leave over
    host_kernel_bytes_per_s: float | None = None
    #: a copy to the device of at most so many bytes passes those that are queued, on a stream of
    #: its own of higher priority; 0: copies are done in the order of their issue
    urgent_nbytes: int = 0
    #: a copy to the device of at most so many bytes takes no longer than the host takes to decide
    #: about it; 0: what the link copies in the time of `host_costs`
    decision_nbytes: int = 0
    #: both directions of the link work at once
    duplex: bool = True
    #: of a copy from or to another device of the machine that has this, too (the slower one
    #: counts), past the host's memory; None: what crosses goes through the host
    peer_bytes_per_s: float | None = None
    #: what management takes of the host's own time; all zero: none, so that it is not counted
    host_costs: HostCosts = field(default_factory=HostCosts)

    def __post_init__(self) -> None:
        speeds: dict[str, float] = {
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "h2d_bytes_per_s": self.h2d_bytes_per_s,
            "d2h_bytes_per_s": self.d2h_bytes_per_s,
            "pageable_bytes_per_s": self.pageable_bytes_per_s,
            "host_memory_bytes_per_s": self.host_memory_bytes_per_s,
            "host_flops_per_s": self.host_flops_per_s,
        }
        if self.host_kernel_bytes_per_s is not None:
            speeds["host_kernel_bytes_per_s"] = self.host_kernel_bytes_per_s
        if self.peer_bytes_per_s is not None:
            speeds["peer_bytes_per_s"] = self.peer_bytes_per_s
        speeds.update({f"flops_per_s[{name!r}]": rate for name, rate in self.flops_per_s.items()})
        if not self.flops_per_s:
            raise ConfigError(f"{self.name}: flops_per_s is empty; give at least 'default'")
        for what, rate in speeds.items():
            if not isinstance(rate, (int, float)) or not rate > 0:
                raise ConfigError(f"{self.name}: {what} is {rate!r}; it must be a number above 0")
        least = dict.fromkeys(SIZES_AND_TIMES, 0) | {"queue_depth": 1}
        for what, smallest in least.items():
            value = getattr(self, what)
            if not isinstance(value, (int, float)) or value < smallest:
                raise ConfigError(
                    f"{self.name}: {what} is {value!r}; it must be a number, {smallest} or more"
                )

    @property
    def default_flops_per_s(self) -> float:
        """The speed for dtypes that are not listed: ``"default"``, else the slowest listed."""
        listed = self.flops_per_s.get("default")
        return min(self.flops_per_s.values()) if listed is None else listed

    def link_bytes_per_s(self, *, to_device: bool, page_locked: bool) -> float:
        """What a copy gets of the link: by direction, and by the memory at the host's end."""
        rate = self.h2d_bytes_per_s if to_device else self.d2h_bytes_per_s
        return rate if page_locked else min(rate, self.pageable_bytes_per_s)

    def scaled(self, *, capacity: int | str | None = None, **changes: Any) -> DeviceSpec:
        """The same device with another size or other speeds.

        Parameters
        ----------
        capacity : int or str, optional
            Bytes, or text such as ``"2GiB"``.
        **changes
            Any other field, by its name.
        """
        if capacity is not None:
            changes["capacity_nbytes"] = (
                capacity if isinstance(capacity, int) else parse_nbytes(capacity)
            )
        return replace(self, **changes)
