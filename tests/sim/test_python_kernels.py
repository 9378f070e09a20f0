"""Operators whose kernels a program has written in Python, and which make arrays of operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchTensorRef.operators.plan import plan_of

LIBRARY = torch.library.Library("ttr_python_kernels", "DEF")
LIBRARY.define("blend(Tensor(a!) out, Tensor x) -> Tensor(a!)")
LIBRARY.impl("blend", lambda out, x: out.add_(torch.from_numpy(x.numpy())), "CPU")


def grow_two(xs, y=None, *, z):
    """Write through an array and by an operator, and return something fresh."""
    xs[1].numpy()[...] += 2
    if y is not None:
        y.mul_(3)
    return z * 2


def grow_and_look(x):
    """Write, and return a part."""
    x.add_(1)
    return x[1:]


#: What they write and return of their operands is not marked, as in torch's own `fully_shard`.
for SCHEMA, KERNEL in {
    "grow_two(Tensor[] xs, Tensor? y=None, *, Tensor z) -> Tensor": grow_two,
    "grow_and_look(Tensor x) -> Tensor": grow_and_look,
    "itself(Tensor x) -> Tensor": lambda x: x,
    "twice(Tensor x) -> Tensor": lambda x: x * 2,
}.items():
    LIBRARY.define(SCHEMA)
    LIBRARY.impl(SCHEMA.partition("(")[0], KERNEL, "CPU")


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


def unmarked(bring):
    """Each three times: what has been seen once is known; `y` is not there at the first call."""
    mine = torch.ops.ttr_python_kernels
    a, b, y, z = (bring(torch.arange(4.0) + i) + 0 for i in range(4))
    twin, results = a.clone(), []
    for _ in range(3):
        results += [mine.grow_two([b, a], z=z), mine.grow_two([a, b], y, z=z)]
        part = mine.grow_and_look(b)
        part.mul_(2)
        mine.grow_and_look(a[1:3])
        mine.itself(y).add_(1)
        results.append(mine.twice(twin))
    return [a, b, y, z, twin, part, *results]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "none"])
@pytest.mark.parametrize("budget", [100, 10_000])
def test_kernels_that_write_what_their_schema_does_not_mark(manager, mode, budget):
    manager.budget = budget
    with mode():
        expected, got = unmarked(lambda x: x), unmarked(manager.adopt)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(other, one)


def test_a_kernel_that_writes_nothing_is_believed_when_it_has_been_seen(manager):
    op = torch.ops.ttr_python_kernels.twice.default
    x = manager.adopt(torch.rand(4)) + 0
    torch.ops.ttr_python_kernels.twice(x)
    plan = plan_of(op)
    assert plan.write_names == ()
    x.toGPU()
    torch.ops.ttr_python_kernels.twice(x)
    assert plan_of(op) is plan
