"""How equations are written and read, what is refused, and equations that nobody has thought of."""

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive_einsum import naive_terms
from torchTensorRef.base.activation import disabled
from torchTensorRef.tensor.einsum import SEMIRINGS, Equation, einsum
from torchTensorRef.tensor.einsum.equation import compiled
from torchTensorRef.tensor.einsum.paths import steps

with disabled():  # another file may have brought injection on already
    A, B = torch.randn(3, 4), torch.randn(4, 5)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("ij,jk", "ij,jk->ik"),
        ("ba", "ba->ab"),
        ("ii", "ii->"),
        ("bij,bjk", "bij,bjk->ik"),
        ("...ij,jk", "...ij,jk->...ik"),
        (" i j , j k -> k i ", "ij,jk->ki"),
        ("aB,Bc", "aB,Bc->ac"),
    ],
)
def test_what_is_not_said_is_implied_as_torch_does(text, output):
    assert str(Equation(text)) == output


def test_an_equation_is_compiled_once_and_used_with_any_sizes():
    assert compiled("ij,jk->ik") is compiled("ij,jk->ik")
    equation = Equation("ij,jk->ik")
    for size in (1, 2, 300):
        x = torch.randn(size, size)
        torch.testing.assert_close(einsum(equation, x, x), x @ x)
    assert "ij,jk->ik" in repr(equation)


def test_lists_of_integers_say_the_same():
    torch.testing.assert_close(einsum(A, [0, 1], B, [1, 2], [0, 2]), A @ B)
    torch.testing.assert_close(einsum(A, [7, 300], B, [300, 5]), (A @ B).T)
    torch.testing.assert_close(einsum(A, [..., 0], B, [0, 1], [..., 1]), A @ B)
    torch.testing.assert_close(einsum("ij,jk->ik", [A, B]), A @ B)


def test_more_indices_than_there_are_letters():
    """60 of them, two elements in ten: a chain of factors, each shared with the next one."""
    assert len(string.ascii_letters) < 60
    factors, labels = [], []
    for at in range(60):
        size = 2 if at % 6 == 0 else 1
        following = 2 if (at + 1) % 6 == 0 else 1
        factors.append(torch.rand(size, following, dtype=torch.float64))
        labels.append([at, at + 1])
    mixed = [part for pair in zip(factors, labels, strict=True) for part in pair]
    product = factors[0]
    for factor in factors[1:]:
        product = product @ factor
    torch.testing.assert_close(einsum(*mixed, [0, 60]), product)
    wide = torch.rand([1] * 55 + [3], dtype=torch.float64)
    torch.testing.assert_close(einsum(wide, list(range(56)), [55]), wide.flatten())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ij->ik", "the index 'k', which no operand has"),
        ("ij->ii", "the index 'i' twice"),
        ("i1->i", "'1' is neither a letter"),
        ("i..->i", "neither a letter nor part"),
        ("i...j...->i", "`...` twice"),
        ("ij,jk->ik", "about 2 operands, and 1 are given"),
        ("ijk->i", "has 2 dimensions, and the equation has 3"),
        ("i->i", "has 2 dimensions, and the equation has 1"),
        ("ii->i", "has one index for dimensions of different sizes"),
    ],
)
def test_what_is_no_equation_is_refused_in_words(text, message):
    with pytest.raises(ValueError, match=message):
        einsum(text, torch.ones(1, 3) if text == "ii->i" else A)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"the index 'j' has 4 elements, and 3 in operand 1"):
        einsum("ij,jk->ik", A, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"1 from the right of `\.\.\.` has 4 elements"):
        einsum("...,...->...", A, torch.ones(3))
    with pytest.raises(ValueError, match="-1 is no index"):
        einsum(A, [0, -1])
    with pytest.raises(TypeError, match="Operand 1 is a float"):
        einsum("ij,->ij", A, 2.0)


def test_what_only_one_operand_has_is_summed_first():
    found = steps((("i", "j"), ("j", "k")), ("k",), (("i", 9), ("j", 9), ("k", 9)), True)
    assert [step.places for step in found] == [(0,), (0, 1)]
    assert found[0].output == ("j",)


@pytest.mark.parametrize("installed", [True, False])
def test_several_operands_with_and_without_opt_einsum(installed, monkeypatch):
    """The order is another one, and the result the same."""
    if installed:
        pytest.importorskip("opt_einsum")
    else:
        monkeypatch.setitem(__import__("sys").modules, "opt_einsum", None)
    steps.cache_clear()
    sizes = dict(zip("abcdef", (2, 90, 3, 80, 2, 1), strict=True))
    text = "ab,bc,cd,de,ef->af"
    operands = [
        torch.rand([sizes[x] for x in part], dtype=torch.float64)
        for part in text.partition("->")[0].split(",")
    ]
    for semiring, expected in (("real", torch.einsum(text, *operands)), ("max-plus", None)):
        equation = Equation(text)  # one without plans
        found = einsum(equation, *operands, semiring=semiring)
        if expected is None:
            inputs = [list(part) for part in text.partition("->")[0].split(",")]
            small = [x[:4, :4] for x in operands]
            found = einsum(equation, *small, semiring=semiring)
            expected = naive_terms(inputs, list("af"), small, semiring)
        torch.testing.assert_close(found, expected)
    steps.cache_clear()


@st.composite
def equations(draw):
    """Labels and shapes of up to three operands of up to three dimensions, any result of them."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))
    inputs, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        labels = draw(st.lists(st.integers(0, 3), max_size=3))
        # Some dimensions broadcast: all of a label in an operand, so that its diagonal is one.
        ones = draw(st.sets(st.integers(0, 3), max_size=1))
        inputs.append(labels)
        shapes.append([1 if label in ones else sizes[label] for label in labels])
    known = sorted({label for labels in inputs for label in labels})
    output = draw(
        st.permutations(known).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    lengths = (
        draw(
            st.none()
            | st.integers(1, 4)
            | st.dictionaries(st.sampled_from(known), st.integers(1, 4))
        )
        if known
        else None
    )
    return inputs, list(output), shapes, lengths


@settings(max_examples=150, deadline=None, derandomize=True)
@given(equations(), st.sampled_from(list(SEMIRINGS)), st.booleans())
def test_any_equation_in_any_semiring(equation, semiring, reverse):
    inputs, output, shapes, lengths = equation
    generator = torch.Generator().manual_seed(len(inputs) + len(output))
    operands = []
    for shape in shapes:
        x = torch.randint(-3, 4, shape, generator=generator)
        if semiring == "boolean":
            x = x > 0
        elif semiring != "counting":
            x = x + torch.rand(shape, generator=generator, dtype=torch.float64)
        operands.append(x.flip(list(range(x.dim()))) if reverse else x)
    differentiable = semiring not in ("boolean", "counting")
    if differentiable:
        operands = [x.requires_grad_() for x in operands]
    expected = naive_terms(inputs, output, tuple(operands), semiring)
    mixed = [part for pair in zip(operands, inputs, strict=True) for part in pair]
    found = einsum(*mixed, output, semiring=semiring, block_size=lengths)
    torch.testing.assert_close(found, expected)
    if differentiable:
        g = torch.rand(expected.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad(found, operands, g, allow_unused=True, materialize_grads=True)
        theirs = torch.autograd.grad(
            expected, operands, g, allow_unused=True, materialize_grads=True
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other.nan_to_num())
