"""``torchtensorref check``: really use each device, and say PASS or FAIL."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..base import torch_versions
from ..base.options import settings
from ..base.units import format_nbytes
from ..devices import registry
from ..devices.base import Device
from ..devices.storages import fill_bytes

if TYPE_CHECKING:
    from torch import Tensor

#: What is copied to a device and back: enough to measure, little enough for a small one.
SAMPLE_NBYTES = 64 * 2**20
#: At most this share of what is free is used.
SAMPLE_SHARE = 8


class Finding(NamedTuple):
    """What came out for one device."""

    name: str
    #: "PASS", "FAIL", or "absent" for a kind of device that is not here.
    verdict: str
    text: str


def main(names: Sequence[str] | None = None) -> int:
    """Check the devices with these names, or all; print a line for each.

    Returns
    -------
    int
        0 if none failed, else 1. A device that is not here has not failed, unless it was named.
    """
    try:
        import torch
    except Exception as error:
        print(f"FAIL  torch   {type(error).__name__}: {error}")
        print(f"torchTensorRef needs {torch_versions.WANTED} (pip install torch).", file=sys.stderr)
        return 1
    print(f"torch {torch.__version__}")
    asked = [name.strip() for several in names or () for name in several.split(",")]
    if not asked:
        asked = list(dict.fromkeys(("cpu", *registry.REAL_KINDS, "sim", settings.device or "sim")))
    failed = 0
    for name in asked:
        finding = examine(name, is_asked_for=bool(names))
        failed += finding.verdict == "FAIL"
        print(f"{finding.verdict:7} {finding.name:10} {finding.text}")
    return 1 if failed else 0


def examine(name: str, *, is_asked_for: bool = False) -> Finding:
    """Allocate on a device, fill, copy there and back, compare, free. Never raises."""
    try:
        device = registry.resolve(name)
    except Exception as error:
        if is_asked_for:
            return Finding(name, "FAIL", str(error))
        return Finding(name, "absent", str(error).partition(". ")[0].removesuffix("."))
    try:
        return _exercise(device)
    except Exception as error:
        return Finding(device.name, "FAIL", f"{type(error).__name__}: {error}")


def _exercise(device: Device) -> Finding:
    import torch

    free_before = device.free_nbytes()
    nbytes = max(min(SAMPLE_NBYTES, free_before // SAMPLE_SHARE), 1)
    sent = torch.arange(nbytes, dtype=torch.int64).mul_(2654435761).to(torch.uint8)
    received = torch.zeros(nbytes, dtype=torch.uint8)
    base = device.allocate(nbytes)
    fill_bytes(base, 0)
    there_ns = _copy(device, sent, base, into=True)
    back_ns = _copy(device, base, received, into=False)
    same = torch.equal(sent, received)
    device.empty(base)
    del base
    size = f"{format_nbytes(device.capacity_nbytes)}, free {format_nbytes(free_before)}"
    if not same:
        return Finding(device.name, "FAIL", f"{size}: bytes came back changed")
    speed = f"{_rate(nbytes, there_ns)} there, {_rate(nbytes, back_ns)} back"
    clock = " (simulated time)" if device.has_virtual_clock else ""
    return Finding(device.name, "PASS", f"{size}   copies {speed}{clock}")


def _copy(device: Device, source: Tensor, destination: Tensor, *, into: bool) -> int:
    """Copy into or out of a device, and return the time it took on the device's clock."""
    if device.is_host:
        start_ns = time.perf_counter_ns()
        destination.copy_(source)
        return time.perf_counter_ns() - start_ns
    base = destination if into else source
    before = device.available(base) if into else None
    device.synchronize()
    start_ns = device.now_ns()
    copy = device.copy_in if into else device.copy_out
    event = copy(source, destination, after=before)
    event.wait()
    event.synchronize()
    return max(device.now_ns() - start_ns, 1)


def _rate(nbytes: int, took_ns: int) -> str:
    return f"{format_nbytes(round(nbytes * 1e9 / max(took_ns, 1)))}/s"
