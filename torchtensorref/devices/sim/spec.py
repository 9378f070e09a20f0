"""What a simulated device is like: its size and its speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.errors import ConfigError
from ...base.units import parse_nbytes

__all__ = ["DEFAULT_SPEC_NAME", "SPECS", "DeviceSpec"]

GB = 10**9  # data sheets count bandwidth in powers of ten
GIB = 2**30  # and memory in powers of two
TERA = 10**12

#: Shares of a data sheet's peak that programs see (THEORY.md, 4): large matrix products reach 60
#: to 80 % of the arithmetic, streaming kernels 60 to 85 % of the memory, large page-locked copies
#: about 80 % of PCI Express.
COMPUTE_SHARE = 0.70
MEMORY_SHARE = 0.80
LINK_SHARE = 0.80
#: Pageable copies are bound by one host core and its memory, not by the link: 3 to 6 GB/s are found
#: (THEORY.md, 4.3). The high end, for every host.
PAGEABLE_BYTES_PER_S = 6e9


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
    #: both directions of the link work at once
    duplex: bool = True

    def __post_init__(self) -> None:
        speeds: dict[str, float] = {
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "h2d_bytes_per_s": self.h2d_bytes_per_s,
            "d2h_bytes_per_s": self.d2h_bytes_per_s,
            "pageable_bytes_per_s": self.pageable_bytes_per_s,
            "host_memory_bytes_per_s": self.host_memory_bytes_per_s,
            "host_flops_per_s": self.host_flops_per_s,
        }
        speeds.update({f"flops_per_s[{name!r}]": rate for name, rate in self.flops_per_s.items()})
        if not self.flops_per_s:
            raise ConfigError(f"{self.name}: flops_per_s is empty; give at least 'default'")
        for what, rate in speeds.items():
            if not rate > 0:
                raise ConfigError(f"{self.name}: {what} is {rate}; it must be above 0")
        times = (self.copy_latency_ns, self.launch_ns, self.dispatch_ns)
        if self.queue_depth < 1:
            raise ConfigError(f"{self.name}: queue_depth is {self.queue_depth}; 1 is the least")
        if self.capacity_nbytes < 0 or min(times) < 0:
            raise ConfigError(f"{self.name}: a size or a time is negative")

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


def _from_data_sheet(
    name: str,
    *,
    gib: float,
    tflops_float32: float,
    tflops_float16: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    host_memory_gb_per_s: float = 40.0,
    host_tflops: float = 0.5,
) -> DeviceSpec:
    """Turn peak figures into what programs see. Host figures are effective already."""
    half = tflops_float16 * TERA * COMPUTE_SHARE
    single = tflops_float32 * TERA * COMPUTE_SHARE
    return DeviceSpec(
        name=name,
        capacity_nbytes=int(gib * GIB),
        flops_per_s={"float16": half, "bfloat16": half, "float32": single, "default": single},
        memory_bytes_per_s=memory_gb_per_s * GB * MEMORY_SHARE,
        h2d_bytes_per_s=link_gb_per_s * GB * LINK_SHARE,
        d2h_bytes_per_s=link_gb_per_s * GB * LINK_SHARE,
        host_memory_bytes_per_s=host_memory_gb_per_s * GB,
        host_flops_per_s=host_tflops * TERA,
    )


#: Peak PCI Express figures, one direction, after line coding: 15.75 GB/s for 4.0 x8,
#: 31.5 for 4.0 x16, 63.0 for 5.0 x16 (PCI-SIG). The 4060 and the 6600 XT are wired x8.
#: Half precision: dense tensor-core figures with float32 accumulation.
#: Host: two channels of DDR4-3200 (51.2 GB/s peak) unless it says otherwise.
_NAMED = (
    # AMD product page: 8 GB GDDR6, 256 GB/s, 10.6 / 21.2 TFLOPS, PCIe 4.0 x8
    _from_data_sheet(
        "rx6600xt",
        gib=8,
        tflops_float32=10.6,
        tflops_float16=21.2,
        memory_gb_per_s=256,
        link_gb_per_s=15.75,
    ),
    # NVIDIA Ampere GA106: 12 GB GDDR6, 360 GB/s, 12.7 / 25.5 TFLOPS, PCIe 4.0 x16
    _from_data_sheet(
        "rtx3060",
        gib=12,
        tflops_float32=12.7,
        tflops_float16=25.5,
        memory_gb_per_s=360,
        link_gb_per_s=31.5,
    ),
    # NVIDIA Ada AD107: 8 GB GDDR6, 272 GB/s, 15.1 / 30 TFLOPS, PCIe 4.0 x8
    _from_data_sheet(
        "rtx4060",
        gib=8,
        tflops_float32=15.1,
        tflops_float16=30.0,
        memory_gb_per_s=272,
        link_gb_per_s=15.75,
        host_memory_gb_per_s=60,
    ),
    # NVIDIA Ada whitepaper, AD102: 24 GB GDDR6X, 1008 GB/s, 82.6 / 165.2 TFLOPS, PCIe 4.0 x16;
    # host with two channels of DDR5-5600 (89.6 GB/s peak)
    _from_data_sheet(
        "rtx4090",
        gib=24,
        tflops_float32=82.6,
        tflops_float16=165.2,
        memory_gb_per_s=1008,
        link_gb_per_s=31.5,
        host_memory_gb_per_s=60,
        host_tflops=1.0,
    ),
    # NVIDIA Ampere whitepaper, A100 80GB PCIe: 1935 GB/s, 19.5 / 312 TFLOPS, PCIe 4.0 x16;
    # server host with eight channels of DDR4-3200
    _from_data_sheet(
        "a100",
        gib=80,
        tflops_float32=19.5,
        tflops_float16=312,
        memory_gb_per_s=1935,
        link_gb_per_s=31.5,
        host_memory_gb_per_s=140,
        host_tflops=3.0,
    ),
    # NVIDIA H200 data sheet, SXM: 141 GB (of 10^9) HBM3e, 4.8 TB/s, 67 / 989 TFLOPS, PCIe 5.0 x16;
    # server host with eight channels of DDR5-4800
    _from_data_sheet(
        "h200",
        gib=141 * GB / GIB,
        tflops_float32=67,
        tflops_float16=989,
        memory_gb_per_s=4800,
        link_gb_per_s=63.0,
        host_memory_gb_per_s=200,
        host_tflops=5.0,
    ),
    # NVIDIA RTX 4050 Laptop, AD107: 6 GB GDDR6, 192 GB/s, about 9 / 18 TFLOPS sustained, x8
    _from_data_sheet(
        "laptop",
        gib=6,
        tflops_float32=9.0,
        tflops_float16=18.0,
        memory_gb_per_s=192,
        link_gb_per_s=15.75,
        host_memory_gb_per_s=50,
    ),
)

#: Known devices by name.
SPECS: dict[str, DeviceSpec] = {spec.name: spec for spec in _NAMED}

#: What plain "sim" stands for: the smallest desktop card of the list.
DEFAULT_SPEC_NAME = "rx6600xt"
