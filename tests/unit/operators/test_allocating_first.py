"""Operators in place that make their result aside: the same numbers, nothing written too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef.operators import allocating_first
from torchTensorRef.operators.plan import plan_of

aten = torch.ops.aten

REDUCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "scatter_reduce_": (allocating_first.scatter_reduce_, aten.scatter_reduce_.two),
    "index_reduce_": (allocating_first.index_reduce_, aten.index_reduce_.default),
}


class NoMemoryForCounts(TorchDispatchMode):
    """A device on which whatever allocates finds no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


def operands(name: str) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    index = torch.randint(4, (6, 3)) if name == "scatter_reduce_" else torch.randint(4, (6,))
    return torch.rand(4, 3), 0, index, torch.rand(6, 3)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_it_computes_the_same(name: str, reduce: str, include_self: bool) -> None:
    aside, op = REDUCTIONS[name]
    expected, *how = operands(name)
    found = expected.clone()
    op(expected, *how, reduce, include_self=include_self)
    assert aside(found, *how, reduce, include_self=include_self) is found
    assert found.equal(expected)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_without_memory_nothing_is_written(name: str) -> None:
    aside, op = REDUCTIONS[name]
    target, *how = operands(name)
    before = target.clone()
    with pytest.raises(torch.OutOfMemoryError), NoMemoryForCounts():
        aside(target, *how, "mean")
    assert target.equal(before)
    assert plan_of(op).op._elsewhere is aside  # type: ignore[union-attr]
