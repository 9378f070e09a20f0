"""Run a program unmodified: once where torch is plain, once where what it makes is injected."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only

import torchTensorRef
from torchTensorRef.inject import hooks

from .differential import copied
from .programs import accelerator_work, assert_same


@contextmanager
def injected() -> Iterator[None]:
    """What is made inside is a TensorRef, also in a test whose fixture says otherwise."""
    with hooks.is_disabled.entered(False):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: tiny operators gain nothing, and the other cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seed(number: int = 0) -> None:
    """Start every generator that a program may draw from."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def plain_result(program: Callable[[], Any]) -> Any:
    """What plain torch makes of a program; copied, since it may write on what it has returned."""
    seed()
    with torchTensorRef.disabled(), one_thread():
        return tree_map_only(torch.Tensor, copied, program())


def assert_same_injected(
    program: Callable[[], Any],
    manager: Any,
    *,
    plain_because: str = "",
    on_host_because: str = "",
) -> None:
    """A program that nothing was changed in gives the bits of plain torch; see `assert_same`."""
    plain, before = plain_result(program), accelerator_work(manager)
    seed()
    with injected(), one_thread():
        ours = program()
    manager.check()
    worked = accelerator_work(manager) > before
    assert worked or on_host_because, "the accelerator ran no operator of the program"
    assert_same(plain, ours, plain_because=plain_because, on_host_because=on_host_because)


def kind_of(value: Any) -> type:
    """The class `TensorRef` for what is one, of whatever class it is in C++; else its class."""
    is_ref = isinstance(value, torchTensorRef.TensorRef)
    return torchTensorRef.TensorRef if is_ref else type(value)
