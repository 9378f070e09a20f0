"""Devices that can be simulated by name, with the figures of their data sheets; and a user's own.

Peak figures, turned into what programs see. Half precision: dense products that add in float32. The
link: PCI Express in one direction after line coding, 15.75 GB/s for 3.0 x16 and 4.0 x8, 31.5 for
4.0 x16 and 5.0 x8, 63.0 for 5.0 x16 (PCI-SIG).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import ConfigError, did_you_mean, nearest
from .spec import DeviceSpec

__all__ = ["DEFAULT_SPEC_NAME", "SPECS", "read_specs"]

GB = 10**9  # data sheets count bandwidth in powers of ten
GIB = 2**30  # and memory in powers of two
TERA = 10**12

#: Shares of a data sheet's peak that programs see (THEORY.md, 4): large matrix products reach 60
#: to 80 % of the arithmetic, streaming kernels 60 to 85 % of the memory, large page-locked copies
#: about 80 % of PCI Express.
COMPUTE_SHARE = 0.70
MEMORY_SHARE = 0.80
LINK_SHARE = 0.80


class Host(NamedTuple):
    """What a device is plugged into: effective figures, of memory and of its processor's cores."""

    memory_gb_per_s: float
    tflops: float
    source: str


#: 75 to 80 % of the peak of the memory's channels, which streaming programs reach.
HOSTS = {
    "ddr4": Host(40, 0.5, "two channels of DDR4-3200, 51.2 GB/s at their peak (JEDEC); 8 cores"),
    "ddr5": Host(60, 0.5, "two channels of DDR5-5600, 89.6 GB/s at their peak (JEDEC); 8 cores"),
    "ddr5-12": Host(60, 1.0, "two channels of DDR5-5600, 89.6 GB/s at their peak; 12 cores"),
    "laptop": Host(50, 0.5, "two channels of LPDDR5-4800, 76.8 GB/s at their peak; 8 cores"),
    "server": Host(140, 3.0, "eight channels of DDR4-3200, 204.8 GB/s at their peak; 32 cores"),
    "server5": Host(200, 5.0, "eight channels of DDR5-4800, 307.2 GB/s at their peak; 48 cores"),
}


class Card(NamedTuple):
    """One row of a data sheet: GiB, TFLOPS in float32 and half, GB/s of memory and of the link."""

    gib: float
    tflops_float32: float
    tflops_half: float
    memory_gb_per_s: float
    link_gb_per_s: float
    host: str
    source: str
    #: What a kernel of the host takes of its memory, measured on that very machine; None: nobody
    #: has, so that no operator is computed at home because it would be sooner there.
    host_kernels_gb_per_s: float | None = None

    def spec(self, name: str) -> DeviceSpec:
        """Return what programs see of it."""
        half = self.tflops_half * TERA * COMPUTE_SHARE
        single = self.tflops_float32 * TERA * COMPUTE_SHARE
        host = HOSTS[self.host]
        return DeviceSpec(
            name=name,
            capacity_nbytes=int(self.gib * GIB),
            flops_per_s={"float16": half, "bfloat16": half, "float32": single, "default": single},
            memory_bytes_per_s=self.memory_gb_per_s * GB * MEMORY_SHARE,
            h2d_bytes_per_s=self.link_gb_per_s * GB * LINK_SHARE,
            d2h_bytes_per_s=self.link_gb_per_s * GB * LINK_SHARE,
            host_memory_bytes_per_s=host.memory_gb_per_s * GB,
            host_flops_per_s=host.tflops * TERA,
            host_kernel_bytes_per_s=(
                None if self.host_kernels_gb_per_s is None else self.host_kernels_gb_per_s * GB
            ),
        )


CARDS = {
    # -- the least that is still used
    "rtx2060": Card(6, 6.5, 25.8, 336, 15.75, "ddr4", "NVIDIA Turing whitepaper, TU106"),
    "rtx2080ti": Card(11, 13.4, 53.8, 616, 15.75, "ddr4", "NVIDIA Turing whitepaper, TU102"),
    "rtx3050": Card(8, 9.1, 18.2, 224, 15.75, "ddr4", "NVIDIA product page, GA106; x8"),
    "rtx3060": Card(12, 12.7, 25.5, 360, 31.5, "ddr4", "NVIDIA product page, GA106"),
    "rtx3060ti": Card(8, 16.2, 32.4, 448, 31.5, "ddr4", "NVIDIA product page, GA104"),
    "rtx3070": Card(8, 20.3, 40.6, 448, 31.5, "ddr4", "NVIDIA Ampere GA102 whitepaper"),
    "rtx3080": Card(10, 29.8, 59.5, 760, 31.5, "ddr4", "NVIDIA Ampere GA102 whitepaper"),
    "rtx3090": Card(24, 35.6, 71.0, 936, 31.5, "ddr4", "NVIDIA Ampere GA102 whitepaper"),
    "rx6600xt": Card(8, 10.6, 21.2, 256, 15.75, "ddr4", "AMD product page; 4.0 x8"),
    # -- today's
    "laptop": Card(6, 9.0, 18.0, 192, 15.75, "laptop", "RTX 4050 Laptop, AD107, sustained; x8"),
    "rtx4060": Card(8, 15.1, 30.0, 272, 15.75, "ddr5", "NVIDIA product page, AD107; x8"),
    "rtx4060ti": Card(16, 22.1, 44.0, 288, 15.75, "ddr5", "NVIDIA product page, AD106; x8"),
    "rtx4070": Card(12, 29.1, 58.3, 504, 31.5, "ddr5-12", "NVIDIA product page, AD104"),
    "rtx4070tisuper": Card(16, 44.1, 88.2, 672, 31.5, "ddr5-12", "NVIDIA product page, AD103"),
    "rtx4080": Card(16, 48.7, 97.5, 717, 31.5, "ddr5-12", "NVIDIA Ada whitepaper, AD103"),
    "rtx4090": Card(24, 82.6, 165.2, 1008, 31.5, "ddr5-12", "NVIDIA Ada whitepaper, AD102"),
    "rtx5060ti": Card(16, 23.7, 47.4, 448, 31.5, "ddr5", "NVIDIA product page, GB206; 5.0 x8"),
    "rtx5070": Card(12, 30.9, 61.7, 672, 63.0, "ddr5-12", "NVIDIA Blackwell whitepaper, GB205"),
    "rtx5080": Card(16, 56.3, 112.6, 960, 63.0, "ddr5-12", "NVIDIA Blackwell whitepaper, GB203"),
    "rtx5090": Card(32, 104.8, 209.5, 1792, 63.0, "ddr5-12", "NVIDIA Blackwell whitepaper, GB202"),
    "rx7900xtx": Card(24, 61.4, 122.8, 960, 31.5, "ddr5-12", "AMD product page, Navi 31"),
    "arca770": Card(16, 19.7, 137.6, 560, 31.5, "ddr4", "Intel product page, ACM-G10"),
    "arcb580": Card(12, 13.7, 116.5, 456, 15.75, "ddr5", "Intel product page, BMG-G21; x8"),
    # -- in a server
    "t4": Card(16, 8.1, 65.0, 320, 15.75, "server", "NVIDIA T4 data sheet"),
    "v100": Card(32, 14.0, 112, 900, 15.75, "server", "NVIDIA V100 PCIe data sheet"),
    "a10": Card(24, 31.2, 125, 600, 31.5, "server", "NVIDIA A10 data sheet"),
    "l4": Card(24, 30.3, 121, 300, 31.5, "server5", "NVIDIA L4 data sheet"),
    "a6000": Card(48, 38.7, 154.8, 768, 31.5, "server", "NVIDIA RTX A6000 data sheet"),
    "l40s": Card(48, 91.6, 366, 864, 31.5, "server5", "NVIDIA L40S data sheet"),
    "a100": Card(80, 19.5, 312, 1935, 31.5, "server", "NVIDIA A100 80GB PCIe data sheet"),
    "h100": Card(80, 51.0, 756, 2000, 63.0, "server5", "NVIDIA H100 PCIe data sheet"),
    "h200": Card(141e9 / GIB, 67.0, 989, 4800, 63.0, "server5", "NVIDIA H200 SXM data sheet"),
    "mi210": Card(64, 22.6, 181, 1638, 31.5, "server", "AMD Instinct MI210 data sheet"),
    "mi300x": Card(192, 163.4, 1307, 5300, 63.0, "server5", "AMD Instinct MI300X data sheet"),
}

#: Known devices by name.
SPECS: dict[str, DeviceSpec] = {name: card.spec(name) for name, card in CARDS.items()}

#: What plain "sim" stands for: the smallest desktop card of the first list.
DEFAULT_SPEC_NAME = "rx6600xt"


def read_specs(path: str | Path) -> dict[str, DeviceSpec]:
    """Read a user's own devices from a TOML file, and make them known by their names.

    Parameters
    ----------
    path : str or Path
        A table for each device: ``[mine]``, then the fields of `Card`; `host` may be a name of
        `HOSTS`; ``source`` and ``host_kernels_gb_per_s`` may be left out.

    Raises
    ------
    ConfigError
        It is no such file; the message says where.
    """
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}", name=str(path)) from error
    found = {name: _spec(path, name, table) for name, table in tables.items()}
    SPECS.update(found)
    return found


def _spec(path: Any, name: str, table: Any) -> DeviceSpec:
    card = _card(path, name, table)
    try:
        return card.spec(name)
    except OverflowError as error:
        raise ConfigError(
            f"{path}: [{name}]: a size or speed is more than any device can have: {error}.",
            name=name,
        ) from error


def _card(path: Any, name: str, table: Any) -> Card:
    fields = {"source": str(path), "host": "ddr4"} | (table if isinstance(table, dict) else {})
    for given in fields:
        if given not in Card._fields:
            raise ConfigError(
                f"{path}: [{name}] has a field {given!r}. {did_you_mean(given, Card._fields)}",
                name=given,
                known=Card._fields,
                nearest=nearest(given, Card._fields),
            )
    missing = [field for field in Card._fields[:-1] if field not in fields]
    if missing:
        raise ConfigError(f"{path}: [{name}] lacks {', '.join(missing)}.", name=name)
    if not isinstance(fields["host"], str) or fields["host"] not in HOSTS:
        raise ConfigError(
            f"{path}: [{name}] names a host {fields['host']!r}. "
            f"{did_you_mean(str(fields['host']), HOSTS)}",
            name=str(fields["host"]),
            known=tuple(HOSTS),
        )
    numbers = [fields[field] for field in Card._fields[:5]]
    numbers += [fields[field] for field in Card._fields[-1:] if field in fields]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise ConfigError(f"{path}: [{name}]: sizes and speeds are numbers above 0.", name=name)
    return Card(**fields)  # type: ignore[arg-type]  # numbers are looked at above
