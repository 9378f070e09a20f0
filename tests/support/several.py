"""Several simulated accelerators that share a host, and a model that is spread over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory import once

from .differential import bits


def on_several(*budgets: int, strategy: Any = "venice", **spec: Any) -> Any:
    """The manager on accelerators that hold so many bytes, and poison what is freed."""
    specs = [DeviceSpec(name="test", capacity_nbytes=n, **spec) for n in budgets]
    machine = Machine.of(specs[0])
    tensorsManager.device = [
        SimDevice(spec, k, machine=machine, poison=True, name=f"sim:test{k}")
        for k, spec in enumerate(specs)
    ]
    tensorsManager.strategy = strategy
    tensorsManager.budget = {f"sim:test{k}": n for k, n in enumerate(budgets)}
    tensorsManager.reset_stats()
    once.said.update(("room", "thrash"))
    return tensorsManager


def tower(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(part for layer in parts for part in layer))


def assert_plain_torchs(manager: Any) -> None:
    """Use and train a tower, plain and managed: results and weights have the same bits."""
    plain = tower()
    ours = manager.adopt(tower())
    for module in (plain, ours):
        x = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))
        x = x if module is plain else manager.adopt(x)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(5):
            with torch.no_grad():
                module.seen = module(x)
            module(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(bits(plain.seen), bits(ours.seen))
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(bits(a.detach()), bits(b.detach()))
