"""Operators whose kernels a program has written in Python, and which make arrays of operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

LIBRARY = torch.library.Library("ttr_python_kernels", "DEF")
LIBRARY.define("blend(Tensor(a!) out, Tensor x) -> Tensor(a!)")
LIBRARY.impl("blend", lambda out, x: out.add_(torch.from_numpy(x.numpy())), "CPU")


@torch.library.custom_op("ttr_python_kernels::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    """Write through an array."""
    array = x.numpy()
    array += 1


@torch.library.custom_op("ttr_python_kernels::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor over an array."""
    return torch.from_numpy(np.sort(x.numpy()))


@torch.library.custom_op("ttr_python_kernels::both", mutates_args=())
def both(xs: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Take and return lists."""
    return [torch.from_numpy(x.numpy() * np.float32(factor)) for x in xs]


def program(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Three times: all of them through every kernel, among them views."""
    for _ in range(3):
        for i, x in enumerate(rows):
            y = x * 2
            grow(x)
            grow(y[1:3])
            y = in_order(y) + in_order(x.t())
            y, z = both([y, x[:2]], 0.5)
            torch.ops.ttr_python_kernels.blend(y[:2], z)
            rows[i] = x + y * 0.1
    return rows


@pytest.mark.parametrize("strategy", ["flow", "lru", "genoa"])
def test_kernels_that_make_arrays(manage, strategy):
    torch.manual_seed(0)
    plain = [torch.randn(64, 64) for _ in range(8)]
    manager = manage(strategy=strategy)
    manager.budget = 60_000
    rows = program([manager.adopt(x.clone()) for x in plain])
    for expected, got in zip(program(plain), rows, strict=True):
        assert torch.equal(manager.release(got), expected)
    assert manager.stats()["evict_count"] > 20
    assert manager.stats()["host_op_count"] == 0
    manager.check()
