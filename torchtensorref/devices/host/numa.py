"""Which processors are near a card, so that host memory for its copies lies on their side.

Linux puts a page where the thread runs that touches it first. So the thread that page-locks needs
no more than to run on the processors of the card's node; there is no call to place memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["cpus_near", "run_on"]

SYSTEM = Path("/sys")


def cpus_near(properties: Any, system: Path = SYSTEM) -> frozenset[int]:
    """Return the processors of a card's NUMA node; none where there is one node, or none is told.

    Parameters
    ----------
    properties : object
        As `torch.cuda.get_device_properties` gives: the place of the card on the PCI bus.
    system : Path
        Where Linux tells about its hardware.
    """
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in place):
        return frozenset()
    domain, bus, slot = place
    card = system / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    nodes = system / "devices" / "system" / "node"
    try:
        node = int((card / "numa_node").read_text())
        if node < 0 or not (nodes / "node1").exists():  # not told, or all memory is as near
            return frozenset()
        return parse_cpus((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):  # another system, or one that hides it, as many containers do
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Read Linux's lists of processors.

    Examples
    --------
    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def run_on(cpus: frozenset[int]) -> bool:
    """Have the calling thread run on those of some processors that it may use; False if none."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return False
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        return False  # the whole process was put elsewhere, by somebody who will have known why
    try:
        os.sched_setaffinity(0, allowed)  # 0: this thread, and no other
    except OSError:
        return False
    return True
