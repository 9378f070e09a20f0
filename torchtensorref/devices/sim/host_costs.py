"""What management takes of the host's own time, by path; and processors where it was measured.

Virtual time knows what plain torch takes to issue an operator (`DeviceSpec.dispatch_ns`). What our
own Python and C++ take beyond that is told here, in nanoseconds of the program's own thread. The
figures are of `python -m benchmarks.host_time --calibrate`, which says how each is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...base.errors import ConfigError, did_you_mean, nearest

__all__ = ["HOST_COSTS", "HostCosts", "MeasuredHost", "host_costs_of"]


@dataclass(frozen=True)
class HostCosts:
    """What management takes of the program's own thread; all zero: it takes no time.

    Attributes
    ----------
    ready_ns : int
        For each operator, beyond what plain torch takes; all of it where operands are ready.
    decided_ns : int
        More, for an operator about which a strategy is told or asked.
    fetched_ns, evicted_ns : int
        More, for each block that is brought to a device, and for each that is given back.
    processor : str
        Where this was measured.
    """

    ready_ns: int = 0
    decided_ns: int = 0
    fetched_ns: int = 0
    evicted_ns: int = 0
    processor: str = ""

    def __post_init__(self) -> None:
        if min(self.ready_ns, self.decided_ns, self.fetched_ns, self.evicted_ns) < 0:
            raise ConfigError(f"{self}: a time is negative")

    def nbytes_meanwhile(self, bytes_per_s: float) -> int:
        """Bytes that a link copies while one block is decided about, given back and fetched."""
        return int((self.decided_ns + self.fetched_ns + self.evicted_ns) * bytes_per_s / 1e9)

    @classmethod
    def read(cls, path: str | Path) -> HostCosts:
        """Read what `--calibrate --save` has written.

        Raises
        ------
        ConfigError
            It is no such file.
        """
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read as costs of a host: {error}", name=str(path)
            ) from error


class MeasuredHost(NamedTuple):
    """A row of `HOST_COSTS`: the costs, and what they were measured with."""

    costs: HostCosts
    #: Which path operators took: "C++" or "Python".
    path: str
    python: str
    torch: str
    date: str


#: Known processors by name.
HOST_COSTS = {
    "epyc": MeasuredHost(
        HostCosts(580, 65_240, 90_930, 77_204, "AMD EPYC, 2 cores"),
        path="C++",
        python="3.11.7",
        torch="2.13.0",
        date="2026-11-24",
    ),
    "epyc-python": MeasuredHost(
        HostCosts(7_209, 63_025, 92_133, 74_708, "AMD EPYC, 2 cores; TTR_CORE=python"),
        path="Python",
        python="3.11.7",
        torch="2.13.0",
        date="2026-11-24",
    ),
}


def host_costs_of(host: str | Path | HostCosts | None) -> HostCosts:
    """Return the costs that a name means, or a file of `--calibrate --save`; none for None.

    Raises
    ------
    ConfigError
        There is no such processor; the nearest name is told.
    """
    if host is None:
        return HostCosts()
    if isinstance(host, HostCosts):
        return host
    name = str(host)
    if name in HOST_COSTS:
        return HOST_COSTS[name].costs
    if name.endswith(".json"):
        return HostCosts.read(name)
    raise ConfigError(
        f"Nobody has measured a host {name!r}. {did_you_mean(name, HOST_COSTS)} "
        "Or measure yours: python -m benchmarks.host_time --calibrate --save mine.json",
        name=name,
        known=tuple(HOST_COSTS),
        nearest=nearest(name, HOST_COSTS),
    )
