"""Modules as people write them, on a device that refuses what a card refuses; also with C++.

Factories without a device, branches on `x.device`, labels and autocast inside `forward`: where all
labels say "cpu", everything that is made has to be where the operands are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import TensorRef
from torchTensorRef.base import core_build
from torchTensorRef.memory import core

from ..support.device_double import LateDevice, LateModule, MetaDevice
from ..support.injection import injected, one_thread

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TIMES = 3  # seen first, then on the ready path


@pytest.mark.skipif(core.library is not None, reason="it is on in this process")
def test_with_ready_operators_in_cpp() -> None:
    wanted = core_build.of_this_process()
    if not wanted.library.exists():
        pytest.skip(wanted.state)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TTR_CORE": "c++"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


class WithoutDevice(nn.Module):
    """What it makes names no device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.project = nn.Linear(16, 16)
        self.register_buffer("rates", torch.arange(8) / 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = tokens.shape[1]
        x = self.table(tokens) + torch.arange(count).float().unsqueeze(-1)
        mask = torch.triu(torch.full((count, count), float("-inf")), 1)
        scores = torch.softmax(x @ x.transpose(1, 2) + mask, -1)
        angles = torch.outer(torch.arange(count).float(), self.rates)
        x = scores @ x + torch.cat([angles.cos(), angles.sin()], -1)
        x = torch.where(torch.ones(count, 1, dtype=torch.bool), x, torch.zeros(()))
        return self.project(x * torch.tensor(0.5)) + torch.linspace(0, 1, 16)


class WithBranches(nn.Module):
    """It looks at labels, and makes and moves by them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.seen: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(x.device.type)
        if x.device != self.scale.device or x.is_cuda:
            raise RuntimeError("operands on several devices")
        weight = self.scale.to(x.device)
        ones = torch.ones(x.shape, device=x.device, dtype=x.dtype)
        if x.device.type == "cpu":
            ones = ones + torch.eye(16)[0].to(x)
        y = (x * weight + ones).to(x.device, torch.float64).float()
        return y.to(torch.zeros(1).device) + torch.zeros_like(x, device=x.device)


class WithAutocast(nn.Module):
    """Mixed precision by the label of what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.second(torch.relu(self.first(x)))
            with torch.autocast(x.device.type, enabled=False):
                z = self.norm(y.float())
            return y + z.to(y.dtype)


def tokens() -> torch.Tensor:
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))


def numbers() -> torch.Tensor:
    return torch.rand(2, 7, 16, generator=torch.Generator().manual_seed(2))


CASES = [(WithoutDevice, tokens), (WithBranches, numbers), (WithAutocast, numbers)]


@pytest.fixture(params=[MetaDevice, lambda: LateDevice(LateModule(seed=3))], ids=["meta", "late"])
def manager(request: pytest.FixtureRequest) -> Any:
    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager

    device = request.param()
    tensorsManager.device = device
    tensorsManager.budget = 1 << 26
    tensorsManager.strategy = "lru"
    tensorsManager.reset_stats()
    with torchTensorRef.disabled():
        yield tensorsManager
    tensorsManager.check()
    if device.torch_device.type == "meta":
        tensorsManager.residency.books.ledgers.clear()  # there are no bytes to bring home
    tensorsManager.budget = None
    tensorsManager.device = "sim"


def is_there(manager: Any, ref: Any) -> bool:
    return ref._ttr_block.readable_on(manager.residency.books.main) is not None


@pytest.mark.parametrize(("kind", "inputs"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_a_module_stays_on_the_device(manager: Any, kind: type[nn.Module], inputs: Any) -> None:
    with one_thread():
        torch.manual_seed(0)
        model = kind()
        plain = [model(inputs()) for _ in range(TIMES)]
        plain[-1].float().square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        with injected():
            torch.manual_seed(0)
            model = kind()
            ours = [model(inputs()) for _ in range(TIMES)]
            ours[-1].float().square().mean().backward()
    stats = manager.stats()
    assert stats["host_fallback_reasons"] == {}
    for was, found in zip(plain, ours, strict=True):
        assert isinstance(found, TensorRef)
        assert (found.dtype, found.shape, found.device) == (was.dtype, was.shape, was.device)
        assert is_there(manager, found)
    for was, p in zip(grads, model.parameters(), strict=True):
        assert is_there(manager, p.grad)
        assert p.grad.dtype == was.dtype
    if manager.residency.books.main.torch_device.type == "cpu":  # it has values
        for was, found in zip(plain, ours, strict=True):
            assert torch.equal(manager.release(found), was)
        for was, p in zip(grads, model.parameters(), strict=True):
            assert torch.equal(manager.release(p.grad), was)


def test_labels_say_where_the_program_believes_to_be(manager: Any) -> None:
    with injected():
        model = WithBranches()
        model(numbers())
        made = torch.zeros(3)
        assert made.device == torch.ones(2, device=made.device).device
    assert model.seen == {"cpu"}
