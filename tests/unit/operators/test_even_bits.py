"""Whether an elementwise operator has even bits is asked once for all numbers, not for each."""

from __future__ import annotations

import math

import pytest
import torch

import torchTensorRef.tensor.install  # noqa: F401 (only with it are operators asked)
from torchTensorRef.operators.blocked import elementwise

aten = torch.ops.aten
SIZES = (1000,)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(elementwise, "_even", {})


def asked(op, **numbers) -> bool:
    tensors = {
        argument.name: torch.ones(SIZES)
        for argument in op._schema.arguments
        if str(argument.type) == "Tensor"
    }
    return elementwise.has_even_bits(op, {**tensors, **numbers}, SIZES)


def test_a_step_size_that_is_another_each_time_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(elementwise, "_try", lambda op, *rest: not tried.append(op))
    for step in range(100):
        assert asked(aten.addcdiv_.default, value=-1e-3 / (1 - 0.9 ** (step + 1)))
    assert len(tried) == len(elementwise._even) == 1
    for value in (0, 1, -1, 0.0, -0.0, 1.0, 2, -2, 0.4, 0.6, math.inf, math.nan):
        asked(aten.addcdiv_.default, value=value)
    assert len(tried) == len(elementwise._even) == 13


def test_the_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(elementwise, "_try", lambda *_: True)
    monkeypatch.setattr(elementwise, "MOST_KNOWN", 8)
    for exponent in range(100):  # what is not rounded once is asked of each number
        elementwise.has_even_bits(
            aten.pow.Tensor_Scalar,
            {"self": torch.ones(SIZES, dtype=torch.int64), "exponent": exponent},
            SIZES,
        )
    assert 0 < len(elementwise._even) <= 8


def test_a_number_that_shows_nothing_does_not_speak_for_others():
    """A product with a power of two is exact: rounded or not, the sum has the same bits."""
    with torch.library._scoped_library("ttr_even_bits", "DEF") as library:
        library.define("add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor")

        def as_compiled(self, other, *, alpha=1):
            """Add as a loop whose vectors round once, and what is left over twice."""
            if self.numel() > 4:
                return (self.double() + other.double() * alpha).float()
            return self + other * alpha

        library.impl("add", as_compiled, "CPU")
        op = torch.ops.ttr_even_bits.add.default
        assert not asked(op, alpha=2.5)
        assert not asked(op, alpha=2.0)
        assert not asked(op, alpha=-1e-30)
        assert asked(op, alpha=1)


def test_a_weight_that_is_rounded_to_one_is_tried_itself():
    """`lerp` multiplies by what is left to one, and a zero gets another sign by it."""
    assert elementwise._standing_for(1 - 1e-12) == 1 - 1e-12
    assert elementwise._standing_for(0.5 - 1e-12) == 0.5 - 1e-12
    assert elementwise._standing_for(1e-40) == 1e-40
    assert elementwise._standing_for(0.9) == elementwise._standing_for(0.6)
    assert elementwise._standing_for(0.9) != elementwise._standing_for(0.4)
    assert elementwise._standing_for(True) is True
