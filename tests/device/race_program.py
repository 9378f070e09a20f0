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
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchTensorRef
import torchTensorRef.tensor.install
from tests.support.device_double import LateDevice, LateLane
from tests.support.programs import RandomEviction
from torchTensorRef import tensorsManager
from torchTensorRef.devices.accelerator.copies import StreamLane
from torchTensorRef.interception import slow_path

MIB = 1 << 20


#: The sanitizer numbers what it hears without a lock, and staged copies come from other threads:
#: two that count at once leave a kernel without its number, and what waited for it looks unordered.
ONE_AT_A_TIME = threading.RLock()


class Listener(TorchDispatchMode):
    """Lets the sanitizer hear what touches bytes, and not what only makes views of them."""

    QUIET = ("aten::set_", "aten::empty", "aten::detach", "aten::alias")

    def __init__(self, sanitizer: Any) -> None:
        super().__init__()
        self.sanitizer = sanitizer
        self.heard = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in self.QUIET:
            return func(*args, **kwargs)
        self.heard += 1
        with ONE_AT_A_TIME, self.sanitizer:
            return func(*args, **kwargs)


def tell_of_queries() -> None:
    """Let the sanitizer, which hears of waits only, hear of events that are seen to have fired."""
    query = torch.cuda.Event.query

    def heard(self: torch.cuda.Event) -> bool:
        has_fired = bool(query(self))
        if has_fired:
            self.synchronize()
        return has_fired

    torch.cuda.Event.query = heard  # type: ignore[method-assign]


def listening(method: Any, listener: Listener) -> Any:
    """The same method, with a listener on while it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with listener:
            return method(*args, **kwargs)

    return call


def listen_on(kind: str) -> tuple[Listener, Listener]:
    """Put a listener around kernels and one around copies."""
    sanitizer: Any = contextlib.nullcontext()
    if kind == "cuda":
        from torch.cuda._sanitizer import cuda_sanitizer

        sanitizer = cuda_sanitizer.dispatch
        tell_of_queries()
    kernels, copies = Listener(sanitizer), Listener(sanitizer)
    slow_path.run_kernel = listening(slow_path.run_kernel, kernels)
    if kind == "late":
        LateLane._copy = staticmethod(listening(LateLane._copy, copies))  # type: ignore[method-assign]
    else:
        StreamLane.issue = listening(StreamLane.issue, copies)  # type: ignore[method-assign]
    return kernels, copies


def device_of(kind: str) -> Any:
    """The accelerator, or the double."""
    if kind == "late":
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
    kernels, copies = listen_on(kind)
    # With each operator traced, none takes the ready path, where nobody could listen.
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
        evicted = tensorsManager.stats()["evict_count"]
        print(kernels.heard, copies.heard, evicted)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
