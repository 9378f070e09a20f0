"""What a program asks of a tensor's type, and what torch's C++ classes are given: as plain torch.

Injection is on where torch has to be patched for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ..support.programs import Bring, assert_right

LEGACY = (
    torch.FloatTensor,
    torch.DoubleTensor,
    torch.HalfTensor,
    torch.BFloat16Tensor,
    torch.LongTensor,
    torch.IntTensor,
    torch.ByteTensor,
    torch.BoolTensor,
    torch.cuda.FloatTensor,
    torch.sparse.FloatTensor,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_legacy_classes(right, dtype):
    def program(bring: Bring) -> Any:
        x = bring(torch.ones(3).to(dtype))
        several = [x, x[1:], x + 1, bring(torch.ones(3).bool()), bring(torch.rand(2).to_sparse())]
        return [
            *[[isinstance(tensor, kind) for kind in LEGACY] for tensor in several],
            [x.type(kind) for kind in LEGACY[:8]],
            [tensor.type() for tensor in several],
            isinstance(x, (int, torch.FloatTensor)),
            isinstance(bring(nn.Linear(2, 2)).weight, torch.FloatTensor),
            [issubclass(type(x), kind) for kind in LEGACY],
        ]

    right(program)


def test_legacy_constructors(right):
    def program(bring: Bring) -> Any:
        x, i = bring(torch.rand(3)), bring(torch.arange(3))
        return [
            torch.FloatTensor(x),
            torch.LongTensor(i),
            torch.Tensor(x),
            torch.FloatTensor(2, 3).size(),
            torch.FloatTensor(x.tolist()),
            x.new([1, 2]),
            torch.FloatTensor([1, 2]) + x[:2],
        ]

    right(program, plain_because="legacy constructors make plain tensors without injection")


def test_states_of_generators(right):
    def program(bring: Bring) -> Any:
        generator = torch.Generator().manual_seed(5)
        state = bring(generator.get_state())
        x = bring(torch.empty(4))
        first = x.uniform_(generator=generator).clone()
        generator.set_state(state)
        again = x.uniform_(generator=generator).clone()
        other = torch.Generator()
        other.set_state(state + 0)
        with pytest.raises((RuntimeError, TypeError)) as caught:
            other.set_state(bring(torch.rand(3)))
        return [first, again, x.uniform_(generator=other), other.get_state(), str(caught.value)]

    right(program, plain_because="C++ makes the state of a generator")


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_results_on_the_meta_device(manage, strategy):
    """Also of operands that are ready on the accelerator, where nothing has to be decided."""

    def program(bring: Bring) -> Any:
        x = bring(torch.rand(300)) + 0
        results = [
            torch.empty_like(x, device="meta"),
            torch.zeros_like(x, device="meta", dtype=torch.int8),
            torch.rand_like(x, device="meta"),
            x.new_empty(3, device="meta"),
            x.new_full((2, 3), 7, device="meta"),
            x.to("meta"),
            x.double().to(device="meta", dtype=torch.float16),
        ]
        return [[(r.device.type, r.dtype, tuple(r.size())) for r in results], x, x.to("cpu")]

    assert_right(program, manage(strategy))


def test_named_tensors(right):
    """Torch gives them up; where it has them, we refuse them in words."""
    x = torch.rand(3)
    calls = (
        lambda x: x.rename("rows"),
        lambda x: x.refine_names("rows"),
        lambda x: x.align_to("rows"),
        lambda x: torch.zeros(2, names=("rows",)),
    )

    def program(bring: Bring) -> Any:
        return [_failure(call, bring(torch.rand(3))) for call in calls]

    if hasattr(x, "refine_names"):
        pytest.skip("this torch has named tensors, and a TensorRef refuses them")
    right(
        program,
        plain_because="errors have no tensors",
        on_host_because="the calls fail before anything is computed",
    )


def _failure(call: Callable[[Any], Any], x: Any) -> Any:
    try:
        call(x)
    except (AttributeError, TypeError, RuntimeError) as error:
        return type(error).__name__
    return "none"


def test_results_that_are_still_to_be_conjugated(manage):
    """Some solvers leave that to whoever reads them, also where operands are ready."""

    def program(bring: Bring) -> Any:
        lu, pivots = torch.linalg.lu_factor(bring(torch.rand(3, 3, dtype=torch.complex64)) * 1)
        right = (bring(torch.rand(3, 4, dtype=torch.complex64)) * 1).mT.contiguous().mT
        x = torch.linalg.lu_solve(lu, pivots, right.mT[:, :3] * 1, left=False, adjoint=True)
        return [x, x.is_conj(), x * 2, x.imag + 1, x.resolve_conj().tolist()]

    assert_right(program, manage("lru"))


def test_solvers_that_conjugate_between_their_steps(manage):
    """Kernels made of others, which read what is lazily conjugated, on operands that are ready."""

    def program(bring: Bring) -> Any:
        results = []
        for _ in range(2):
            a, b = (bring(torch.randn(4, 3, dtype=torch.complex64)) * 1 for _ in range(2))
            results += torch.linalg.lstsq(a, b, driver="gels")
            results += [
                torch.linalg.pinv(a),
                torch.linalg.cond(a),
                torch.cov(a),
                torch.vdot(a[:, 0], b[:, 0]),
            ]
            results += torch.linalg.qr(a)
            results += [torch.linalg.lu_solve(*torch.linalg.lu_factor(a[:3] * 1), b[:3] * 1)]
        return results

    assert_right(program, manage("lru"))
