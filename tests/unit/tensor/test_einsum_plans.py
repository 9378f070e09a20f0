"""Plans: made once, and only used for what they were made for."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.tensor.einsum import Equation, Semiring, einsum, plan

TEXT = "ij,jk->ik"


def operands_of(dtype=torch.float32, size=5, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(size, size).to(dtype).requires_grad_(requires_grad) for _ in range(2)]


@pytest.mark.parametrize("semiring", ["log", "max-plus", "boolean"])
def test_a_plan_is_made_once(semiring):
    equation = Equation(TEXT)
    for _ in range(3):
        einsum(equation, *operands_of(), semiring=semiring)
    assert len(equation.plans) == 1
    einsum(equation, *operands_of(size=6), semiring=semiring)
    assert len(equation.plans) == 2


CALLS = {
    "as it is": ({}, {}),
    "double": ({"dtype": torch.float64}, {}),
    "half": ({"dtype": torch.bfloat16}, {}),
    "larger": ({"size": 9}, {}),
    "with gradients": ({"requires_grad": True}, {}),
    "another semiring": ({}, {"semiring": "min-plus"}),
    "its place": ({}, {"semiring": "min-plus", "argmax": True}),
    "blocks": ({}, {"block_size": 2}),
    "blocks of one": ({}, {"block_size": 1}),
    "blocks by label": ({}, {"block_size": {"i": 2}}),
    "bytes": ({}, {"budget": "1MiB"}),
    "too few bytes": ({}, {"budget": 10}),
    "blocks that are none": ({}, {"block_size": True}),
    "blocks of no label": ({}, {"block_size": {"x": 2}}),
    "integers": ({"dtype": torch.int64}, {}),
}


def found_by(equation, made, how):
    """What a call returns, its gradients, and what it raises."""
    operands = operands_of(**made)
    try:
        found = einsum(equation, *operands, **{"semiring": "log", **how})
    except (ConfigError, TypeError) as error:
        return str(error)
    results = found if isinstance(found, tuple) else (found,)
    if made.get("requires_grad"):
        results += torch.autograd.grad(found, operands, torch.ones_like(found))
    return [(x.dtype, x.requires_grad, x.tolist()) for x in results]


def test_each_call_has_the_plan_that_it_needs():
    """One after the other in every order of two, on one equation: as on one of its own."""
    expected = {name: found_by(Equation(TEXT), *call) for name, call in CALLS.items()}
    assert len({str(one) for one in expected.values()}) >= 11
    for pair in itertools.product(CALLS, repeat=2):
        equation = Equation(TEXT)
        for name in pair:
            assert found_by(equation, *CALLS[name]) == expected[name]


def test_whether_gradients_are_wanted_is_asked_at_each_call():
    equation = Equation(TEXT)
    operands = operands_of(requires_grad=True)
    for wanted in (False, True, False):
        with torch.set_grad_enabled(wanted):
            assert einsum(equation, *operands, semiring="log").requires_grad is wanted


def test_operands_that_are_one_are_counted_as_one():
    equation = Equation(TEXT)
    a, b = operands_of(size=64)
    budget = 3 * a.nbytes  # an operand, the result, and blocks
    einsum(equation, a, a, semiring="log", budget=budget)
    with pytest.raises(ConfigError, match="too little"):
        einsum(equation, a, b, semiring="log", budget=budget)


def test_a_semiring_that_is_gone_leaves_no_plan_to_another():
    """Where it was in memory, the next one is."""
    equation, (a, b) = Equation(TEXT), operands_of()
    for turn in range(40):
        sums = torch.amax if turn % 2 else torch.amin
        ring = Semiring(torch.maximum, torch.add, zero=0, one=0, sum=sums)
        expected = sums(a[:, :, None] + b, 1)
        assert einsum(equation, a, b, semiring=ring).equal(expected)
        del ring


def test_no_more_plans_are_kept_than_are_of_use(monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    equation = Equation(TEXT)
    for size in range(1, 9):
        einsum(equation, *operands_of(size=size), semiring="log")
        assert len(equation.plans) <= 3


@pytest.mark.parametrize("text", [TEXT, "...i,i...->..."])
def test_copies_of_an_equation_have_no_plans(text):
    equation = Equation(text)
    einsum(equation, *operands_of(), semiring="log")
    for other in (copy.deepcopy(equation), pickle.loads(pickle.dumps(equation))):
        assert (str(other), other.text, other.plans) == (text, text, {})
        a = einsum(other, *operands_of(), semiring="log")
        assert a.equal(einsum(equation, *operands_of(), semiring="log"))


class Counted(TorchDispatchMode):
    """How often each operator has run."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("block_size", "blocks"), [(None, 1), ({"a": 2}, 2), ({"k": 2}, 3)])
def test_gradients_of_a_logarithm_compute_each_term_once(block_size, blocks):
    torch.manual_seed(1)
    operands = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = einsum(
        "ak,ak,ka->a", *operands[:2], operands[2].T, semiring="log", block_size=block_size
    )
    with Counted() as counted:
        gradients = torch.autograd.grad(found.sum(), operands)
    assert counted.counts["exp2_"] == blocks
    expected = torch.autograd.grad(sum(operands).logsumexp(1).sum(), operands)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_that_are_equal_are_not_one():
    """Each operand has one of its own, to be written."""
    operands = [x.requires_grad_() for x in operands_of()]
    einsum("ij,ij->i", *operands, semiring="log").sum().backward()
    before = operands[1].grad.clone()
    operands[0].grad.zero_()
    assert operands[1].grad.equal(before)
