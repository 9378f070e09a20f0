"""A program for `test_races.py`: everything is moved all the time, and torch's sanitizer listens.

    python race_program.py cuda|late

`torch.cuda._sanitizer` sees each kernel, copy, event and wait, and raises where two streams touch
the same bytes with nothing between them. It is a dispatch mode, so it has to be on where the plain
operators run: around each kernel and each copy, not around the program. With `late` there is
nothing to listen to, and the program only shows that it runs.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import torchTensorRef
import torchTensorRef.tensor  # (wires the manager)
from tests.support.programs import RandomEviction
from torchTensorRef.devices.accelerator_copies import StreamLane
from torchTensorRef.manager import tensorsManager
from torchTensorRef.op_call import OpCall

MIB = 1 << 20


def listening(method: Any, listener: Callable[[], Any]) -> Any:
    """The same method, with the sanitizer on while it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with listener():
            return method(*args, **kwargs)

    return call


def listen_on(kind: str) -> None:
    """Put the sanitizer around kernels and copies."""
    if kind == "cuda":
        from torch.cuda._sanitizer import cuda_sanitizer

        dispatch = cuda_sanitizer.dispatch

        @contextlib.contextmanager
        def listener() -> Any:
            with dispatch:
                yield
    else:
        listener = contextlib.nullcontext  # type: ignore[assignment]
    OpCall._call_kernel = listening(OpCall._call_kernel, listener)  # type: ignore[method-assign]
    StreamLane.issue = listening(StreamLane.issue, listener)  # type: ignore[method-assign]


def device_of(kind: str) -> Any:
    """The accelerator, or the double."""
    if kind == "late":
        from tests.support.device_double import LateDevice

        return LateDevice()
    from torchTensorRef.devices import registry

    return registry.resolve(kind)


def step(model: nn.Module, optimizer: Any, count: int, width: int) -> None:
    """Forward, back, and an update in place: dirty replicas, too."""
    optimizer.zero_grad()
    model(tensorsManager.adopt(torch.rand(count, width))).square().mean().backward()
    optimizer.step()


def main(kind: str) -> int:
    """Move everything, all the time."""
    width = 256 if kind == "late" else 2048
    budget = 3 * MIB if kind == "late" else 192 * MIB
    listen_on(kind)
    # With each operator traced, none takes the fast path, where nobody could listen.
    with torchTensorRef.disabled(), torchTensorRef.options(trace=3):
        tensorsManager.device = device_of(kind)
        tensorsManager.budget = budget
        for strategy in ("lru", "flow", RandomEviction(3)):
            tensorsManager.strategy = strategy
            torch.manual_seed(0)
            parts = [nn.Linear(width, width) for _ in range(6)]
            model = tensorsManager.adopt(nn.Sequential(*parts))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for _ in range(4):
                step(model, optimizer, random.choice((1, 8, 64)), width)
            tensorsManager.check()
        print(f"evicted {tensorsManager.stats()['evict_count']}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
