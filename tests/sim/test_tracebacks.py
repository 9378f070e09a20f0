"""Tracebacks of a program's own mistakes have its frames; those of ours have ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef.autograd import overrides
from torchTensorRef.base.errors import TransferError
from torchTensorRef.base.options import options
from torchTensorRef.inject import classes, devices, factories
from torchTensorRef.interception import cpp_path, slow_path
from torchTensorRef.memory import core
from torchTensorRef.tensor import attributes, numbers, protocols, tensor_ref

from ..support.injection import injected

OURS = str(Path(torchTensorRef.__file__).parent)


def frames_of_ours(program: Callable[[], Any]) -> list[str]:
    """Run a program that ends in an error; name our functions in its traceback."""
    with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
        program()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[0].name == "frames_of_ours"
    return [frame.name for frame in frames if frame.filename.startswith(OURS)]


def mistakes(x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    """What a program may get wrong, with operands of other shapes than they should have."""
    linear = nn.Linear(3, 4)
    return {
        "mm": lambda: torch.mm(x, y),
        "view": lambda: x.view(7),
        "cat": lambda: torch.cat([x, y]),
        "linear": lambda: linear(x),
        "add_": lambda: torch.add(x, y, out=x),
        "conv": lambda: nn.functional.conv1d(x, y),
        "gather": lambda: torch.gather(x, 0, y.long()),
    }


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", mistakes(None, None))
def test_a_mistake_of_the_programs(manager: Any, name: str, grad: bool, is_there: bool) -> None:
    x, y = manager.adopt(torch.rand(30, 40)), manager.adopt(torch.rand(50, 60) + 50)
    if is_there:
        x.toGPU(), y.toGPU()
    program = mistakes(x, y)[name]
    with torch.set_grad_enabled(grad):
        assert frames_of_ours(program) == []
        with options(tracebacks="whole"):
            assert frames_of_ours(program) != []


#: Where Python of ours stands between a program, or torch's own Python, and torch's C++.
BETWEEN = (overrides, cpp_path, classes, devices, factories, attributes, numbers, protocols)


@pytest.mark.parametrize("module", [*BETWEEN, tensor_ref], ids=lambda module: module.__name__)
def test_pytest_leaves_our_frames_out(module: Any) -> None:
    assert module.__tracebackhide__(None)
    with options(tracebacks="whole"):
        assert not module.__tracebackhide__(None)


def seen_by_pytest(program: Callable[[], Any]) -> list[str]:
    """Run a program that ends in an error; name our files that pytest shows of its traceback."""
    with injected(), pytest.raises((RuntimeError, ValueError, OSError)) as caught:
        program()
    files = [str(entry.path) for entry in caught.traceback.filter(caught)]
    return [file for file in files if file.startswith(OURS)]


def backward_twice() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    y.backward()


@pytest.mark.parametrize(
    "program",
    [
        backward_twice,
        lambda: torch.load("nowhere.pt"),
        lambda: torch.rand(10**14),
        lambda: torch.tensor([[1], [2, 3]]),
        lambda: torch.ones(2).new_empty(-1),
        lambda: torch.ones(2, requires_grad=True).numpy(),
        lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.int)),
    ],
)
def test_pytest_shows_mistakes_without_our_frames(manager: Any, program: Any) -> None:
    assert seen_by_pytest(program) == []
    if program is not backward_twice or core.library is not None:  # in Python none of ours runs it
        with options(tracebacks="whole"):
            assert seen_by_pytest(program) != []


@pytest.mark.parametrize("error", [RuntimeError, KeyError, TransferError])
def test_a_mistake_of_ours_is_told_whole(manager: Any, monkeypatch: Any, error: type) -> None:
    def place(operands: Any, manager: Any, placed: Any) -> Any:
        raise error("ours")

    monkeypatch.setattr(slow_path, "place", place)
    x = manager.adopt(torch.rand(30, 40))
    with pytest.raises(error) as caught:
        torch.exp(x)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-4:] == ["_kept_from_modes", "run", "_run", "place"]


def test_what_others_run_inside_keeps_its_frames(manager: Any, monkeypatch: Any) -> None:
    """A strategy, a hook: torch raises in the end, and still it matters who had called it."""

    def place(operands: Any, manager: Any, placed: Any) -> Any:
        with torchTensorRef.disabled():
            return nn.functional.pad(torch.rand(2), (1, 1, 1, 1))

    monkeypatch.setattr(slow_path, "place", place)
    x = manager.adopt(torch.rand(30, 40))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.exp(x)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "place" in [frame.name for frame in frames]
    assert Path(frames[-1].filename).is_relative_to(Path(torch.__file__).parent)
