"""A seeded sample of what `make conformance` runs: one in thirty, and what broke before."""

from __future__ import annotations

import os

import pytest
import torch

from torchTensorRef.strategy.choice import make_strategy

from ..support.operator_cases import DTYPES, Outcome, operators, run_operator, turn_of
from ..support.programs import Scatter
from ..support.shaking import Shaken
from ..support.sweeps import WHOLE, one_in
from .known_differences import KNOWN

#: Samples of each operator and dtype: `make conformance` takes them all.
SAMPLES = 1
#: One operator in so many is in the sample.
ONE_IN = 15 if WHOLE else 30

#: Operators that were wrong once, each for a reason of its own.
BROKE_BEFORE = frozenset(
    {
        "cholesky",
        "linalg.cond",
        "linalg.lstsq",
        "linalg.lu_solve",
        "linalg.matrix_rank",
        "masked_fill",
        "median",
        "native_batch_norm",
        "nn.functional.max_pool1d",
        "norm.nuc",
        "pinverse",
        "prod",
        "sparse.mm.reduce",
        "split_with_sizes_copy",
        "tensor_split",
        "unbind_copy",
    }
)

SAMPLE = [name for name in operators() if turn_of(name) % ONE_IN == 0 or name in BROKE_BEFORE]
if os.environ.get("TTR_CORE") == "python":  # what is not in the path is tested in C++
    SAMPLE = one_in(2, SAMPLE)


@pytest.fixture
def run(manage):
    """Give `run(name)`: all cases of a sample of an operator's inputs, its dtypes by turns."""
    torch.set_num_threads(1)
    strategies = [Shaken(make_strategy(name)) for name in ("genoa", "flow")]
    manager = manage(strategies[0])

    def compare(name: str) -> Outcome:
        total = Outcome()
        for number, dtype in enumerate(DTYPES):
            manager.strategy = strategies[(number + turn_of(name)) % 2]
            total.add(run_operator(operators()[name], dtype, samples=SAMPLES))
        return total

    yield compare
    torch.set_num_threads(torch.get_num_interop_threads())


@pytest.fixture
def run_on_two(manage):
    """Give `run(name)`: the same on two accelerators, over which operands are scattered."""
    torch.set_num_threads(1)
    manage(Scatter(1), count=2)

    def compare(name: str) -> Outcome:
        total = Outcome()
        for dtype in (DTYPES[0], DTYPES[1 + turn_of(name) % (len(DTYPES) - 1)]):
            total.add(run_operator(operators()[name], dtype, samples=SAMPLES))
        return total

    yield compare
    torch.set_num_threads(torch.get_num_interop_threads())


@pytest.mark.parametrize("name", one_in(4, [name for name in SAMPLE if name not in KNOWN]))
def test_the_operator_does_so_with_operands_on_two_accelerators(run_on_two, name):
    outcome = run_on_two(name)
    assert not outcome.failures
    assert outcome.passed or outcome.refused


@pytest.mark.parametrize("name", [name for name in SAMPLE if name not in KNOWN])
def test_the_operator_does_what_plain_torch_does(run, name):
    outcome = run(name)
    assert not outcome.failures
    assert outcome.passed


def test_few_operators_differ_and_each_is_explained():
    assert len(KNOWN) <= 10
    assert set(KNOWN) <= set(operators())
