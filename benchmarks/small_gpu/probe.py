"""What the link, the device's memory and its arithmetic units reach, measured in a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .machine import Machine, SimulatedMachine

MIB = 2**20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
REPEATS = 5


def probe(machine: Machine) -> dict[str, Any]:
    """Measure a machine.

    Returns
    -------
    dict
        `link`: direction and kind of host memory -> size in bytes -> bytes/s; the best of each
        direction as `h2d_bytes_per_s` and `d2h_bytes_per_s`; `memory_bytes_per_s` (read and
        written) and `flops_per_s` of a product of bfloat16 matrices.
    """
    found = _simulated(machine) if isinstance(machine, SimulatedMachine) else _real(machine)
    for direction in ("h2d", "d2h"):
        rates = [
            rate
            for name, by_size in found["link"].items()
            if name.startswith(direction)
            for rate in by_size.values()
        ]
        found[f"{direction}_bytes_per_s"] = max(rates)
    return found


def _best_s(machine: Machine, work: Callable[[], Any]) -> float:
    """The shortest of some times: a bound is about what can be reached."""
    work()
    took = []
    for _ in range(REPEATS):
        start = machine.now_s()
        work()
        took.append(machine.now_s() - start)
    return max(min(took), 1e-9)


def _real(machine: Machine) -> dict[str, Any]:
    sizes = SIZES[:3] if machine.is_host else SIZES
    link: dict[str, dict[int, float]] = {}
    for is_page_locked in (False, True):
        if is_page_locked and machine.is_host:
            continue  # torch locks pages for an accelerator only
        kind = "page-locked" if is_page_locked else "pageable"
        for nbytes in sizes:
            host = torch.zeros(nbytes, dtype=torch.uint8)
            host = host.pin_memory() if is_page_locked else host
            there = torch.zeros(nbytes, dtype=torch.uint8, device=machine.device)
            for name, target, source in (("h2d", there, host), ("d2h", host, there)):
                took_s = _best_s(machine, _copy(target, source))
                link.setdefault(f"{name} {kind}", {})[nbytes] = nbytes / took_s
    return {
        "link": link,
        "memory_bytes_per_s": _memory(machine),
        "flops_per_s": _flops(machine),
    }


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source, non_blocking=True)


def _memory(machine: Machine) -> float:
    nbytes = 16 * MIB if machine.is_host else 1024 * MIB
    source = torch.zeros(nbytes, dtype=torch.uint8, device=machine.device)
    return 2 * nbytes / _best_s(machine, _copy(torch.empty_like(source), source))


def _flops(machine: Machine) -> float:
    width = 256 if machine.is_host else 8192
    # Random numbers: a product of zeros is faster than any real one.
    a, b = (
        torch.randn(width, width, device=machine.device, dtype=torch.bfloat16) for _ in range(2)
    )
    return 2 * width**3 / _best_s(machine, lambda: a @ b)


def _simulated(machine: SimulatedMachine) -> dict[str, Any]:
    """Copies on the simulated device; the rest is said by its specification."""
    from torchTensorRef import disabled
    from torchTensorRef.devices.sim.device import SimDevice

    link: dict[str, dict[int, float]] = {"h2d": {}, "d2h": {}}
    with disabled():
        for nbytes in SIZES[:2]:
            device = SimDevice(machine.spec.scaled(capacity=nbytes), name="sim:probe")
            host, there = torch.zeros(nbytes, dtype=torch.uint8), device.allocate(nbytes)
            for name in ("h2d", "d2h"):
                start_ns = device.now_ns()
                if name == "h2d":
                    event = device.copy_in(host, there)
                else:
                    event = device.copy_out(there, host, after=device.record())
                event.synchronize()
                link[name][nbytes] = nbytes / (device.now_ns() - start_ns) * 1e9
    rates = machine.spec.flops_per_s
    return {
        "link": link,
        "memory_bytes_per_s": machine.spec.memory_bytes_per_s,
        "flops_per_s": rates.get("bfloat16", machine.spec.default_flops_per_s),
    }
