"""What torch and torch_semiring_einsum document and test of their einsum, in every semiring."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.einsum_equations import EVERYONES, spelt_out
from tests.support.naive_einsum import naive_einsum
from tests.support.sweeps import in_turn, one_in
from torchTensorRef.tensor.einsum import SEMIRINGS, einsum

WITH_GRADIENTS = ("real", "log", "max-plus", "min-plus")
INF, NAN = torch.inf, torch.nan


def operands_of(shapes, semiring, layout="plain"):
    """Tensors of these shapes; every second element of larger ones, or transposed, if asked."""
    generator = torch.Generator().manual_seed(20)
    found = []
    for shape in shapes:
        if layout == "strided":
            x = torch.rand([2 * size for size in shape], generator=generator, dtype=torch.float64)
            x = x[tuple(slice(None, None, 2) for _ in shape)]
        else:
            x = torch.rand(shape[::-1], generator=generator, dtype=torch.float64)
            x = x.permute(list(range(len(shape)))[::-1])
        if semiring == "boolean":
            x = x > 0.6
        elif semiring == "counting":
            x = (x * 4).long()
        else:
            x = x * 6 - 3
        found.append(x)
    return found


def assert_right(text, operands, semiring, **how):
    """Compare a result and its gradients with those of a tensor of all terms."""
    if semiring in WITH_GRADIENTS:
        operands = [x.detach().requires_grad_() for x in operands]
    expected = naive_einsum(spelt_out(text), *operands, semiring=semiring)
    found = einsum(text, *operands, semiring=semiring, **how)
    torch.testing.assert_close(found, expected)
    if semiring not in WITH_GRADIENTS:
        return
    g = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    g = g.to(expected.dtype)
    ours = torch.autograd.grad(found, operands, g)
    theirs = torch.autograd.grad(expected, operands, g, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        # Where a result is the logarithm of nothing, torch's gradient is NaN; ours is 0.
        torch.testing.assert_close(one, other.nan_to_num())


#: Each equation in three semirings and one of two layouts each, by turns; in a whole sweep in all.
EVERYWHERE = [
    (*equation, semiring, layout)
    for (equation, semiring), layout in in_turn(
        in_turn(EVERYONES, SEMIRINGS, each=3), ["transposed", "strided"], each=1
    )
]


@pytest.mark.parametrize(
    ("text", "shapes", "semiring", "layout"),
    EVERYWHERE,
    ids=lambda x: str(x).strip() or "nothing",
)
def test_every_equation_of_others_forward_and_backward(text, shapes, semiring, layout):
    operands = operands_of(shapes, semiring, layout)
    for how in ({}, {"block_size": 3}, {"budget": "1MiB"}):
        assert_right(text, operands, semiring, **how)


@pytest.mark.parametrize(
    ("text", "shapes"), one_in(2, EVERYONES), ids=lambda x: str(x).strip() or "nothing"
)
def test_every_equation_of_others_in_complex_numbers(text, shapes):
    real, imaginary = operands_of(shapes, "real"), operands_of(shapes, "real", "strided")
    operands = [torch.complex(a, b) for a, b in zip(real, imaginary, strict=True)]
    assert_right(text, operands, "real")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_in_plain_tensors_have_the_bits_of_torch(dtype):
    for text, shapes in EVERYONES:
        operands = [(4 * x).to(dtype) for x in operands_of(shapes, "real", "strided")]
        assert torch.equal(einsum(text, *operands), torch.einsum(text, *operands))


def test_lists_say_what_torchs_say():
    """Each of torch's tests of lists of integers, beside the text that says the same."""
    x, y, a, b, c = operands_of(((5,), (7,), (3, 5), (2, 5), (2, 1, 3, 1, 4)), "real")
    left, middle, right = operands_of(((5, 10), (15, 10, 20), (5, 20)), "real", "strided")
    for mixed, text, operands in (
        ([x, [0]], "i", [x]),
        ([x, [0], []], "i->", [x]),
        ([x, [0], y, [1], [0, 1]], "i,j->ij", [x, y]),
        ([a, [0, 1], [1, 0]], "ij->ji", [a]),
        ([a, [0, 1], x, [1], [0]], "ij,j->i", [a, x]),
        ([a, [0, 1], b, [2, 1]], "ij,kj", [a, b]),
        ([a, [0, 1], b, [2, 1], [0, 2]], "ij,kj->ik", [a, b]),
        ([c, [0, 1, 2, 1, ...], [0, 2, 1, ...]], "ngrg...->nrg...", [c]),
        ([a.t(), [0, 1], b, [..., 0]], "ki,...k", [a.t(), b]),
        ([a.t(), [0, 1], b, [..., 0], [1, ...]], "ki,...k->i...", [a.t(), b]),
        ([a.t(), [0, ...], b, [1, 0], [...]], "k...,jk->...", [a.t(), b]),
        (
            [left, [40, 41], middle, [2, 41, 50], right, [40, 50], [40, 2]],
            "bn,anm,bm->ba",
            [left, middle, right],
        ),
    ):
        torch.testing.assert_close(einsum(*mixed), torch.einsum(text, *operands))


def test_sixty_four_indices():
    """All that a tensor can have dimensions for, shuffled, two of three in one operand."""
    labels = list(range(64))
    random.Random(20).shuffle(labels)
    sizes = [1] * 64
    sizes[30], sizes[33], sizes[34] = 2, 3, 5
    a, b = operands_of((tuple(sizes[:42]), tuple(sizes[22:])), "real")
    for semiring in WITH_GRADIENTS:
        found = einsum(a, labels[:42], b, labels[22:], labels[::2], semiring=semiring, block_size=3)
        assert found.shape == tuple(sizes[::2])
        expected = naive_einsum(
            "ijk,ijk->ik", a.reshape(2, 3, 5), b.reshape(2, 3, 5), semiring=semiring
        )
        torch.testing.assert_close(found.flatten(), expected.flatten())


def random_equation(draw):
    """An equation as torch's tests draw them: diagonals, `...` in any place, ones that broadcast.

    Unlike there, dimensions may have no elements, and `...` need not be in the result.
    """
    sizes = {label: draw(st.integers(0, 4)) for label in "aBcD"}
    dots = [draw(st.integers(1, 3)) for _ in range(2)]
    parts, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        labels = draw(st.lists(st.sampled_from("aBcD"), max_size=3))
        ones = draw(st.sets(st.sampled_from("aBcD"), max_size=1))
        part, shape = list(labels), [1 if x in ones else sizes[x] for x in labels]
        count = draw(st.none() | st.integers(0, 2))
        if count is not None:
            at = draw(st.integers(0, len(part)))
            part.insert(at, "...")
            shape[at:at] = [1 if draw(st.booleans()) else size for size in dots[2 - count :]]
        parts.append("".join(part))
        shapes.append(tuple(shape))
    known = sorted({letter for part in parts for letter in part} - {"."})
    text = ",".join(parts)
    if draw(st.booleans()):
        output = draw(st.permutations(known))[: draw(st.integers(0, len(known)))]
        if draw(st.booleans()):
            output.insert(draw(st.integers(0, len(output))), "...")
        text += "->" + "".join(output)
    return text, tuple(shapes)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.composite(random_equation)(), st.sampled_from(list(SEMIRINGS)), st.none() | st.just(2))
def test_equations_with_dots_in_any_place(equation, semiring, block_size):
    text, shapes = equation
    assert_right(text, operands_of(shapes, semiring), semiring, block_size=block_size)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("", (), "about 1 operands, and 0 are given"),
        (". ..", ((2,),), "nor part of"),
        ("... ...", ((2,),), "twice"),
        ("1", ((2,),), "neither a letter"),
        (",", ((2,),), "about 2 operands, and 1 are given"),
        ("", ((2,), (2,)), "about 1 operands, and 2 are given"),
        ("", ((2,),), "has 1 dimensions, and the equation has 0"),
        ("ai", ((2,),), "has 1 dimensions, and the equation has 2"),
        ("ai...", ((2,),), "has 1 dimensions, and the equation has 2"),
        ("a->... .", ((2,),), "nor part of"),
        ("a->..", ((2,),), "nor part of"),
        ("a->1", ((2,),), "neither a letter"),
        ("a->aa", ((2,),), "twice"),
        ("a->i", ((2,),), "which no operand has"),
        ("aa", ((2, 3),), "different sizes|has 2 elements, and 3"),
        ("a, ba", ((2,), (2, 3)), "has 2 elements, and 3 in operand 1"),
    ],
)
def test_what_torch_refuses_is_refused(text, shapes, message):
    operands = [torch.ones(shape) for shape in shapes]
    with pytest.raises((RuntimeError, ValueError)):
        torch.einsum(text, operands)
    with pytest.raises(ValueError, match=message):
        einsum(text, *operands)


def test_numbers_that_are_no_index():
    for label in (-1, True, 1.5, None):
        with pytest.raises(ValueError, match="is no index"):
            einsum(torch.ones(2), [label])


@pytest.mark.parametrize("block_size", [None, 3])
def test_infinities_and_nan_in_logarithms(block_size):
    """Rows: numbers; nothing possible, thrice; one term impossible; one NaN; one infinite."""
    a, b = torch.full((7, 7), 5.0), torch.full((7, 7), 5.0)
    a[1] = b[1] = a[2] = -INF
    a[3, [1, 4, 6]] = -INF
    b[3, [0, 2, 3, 5]] = -INF
    a[4, 3] = -INF
    a[5, 2] = NAN
    b[6, 5] = INF
    a.requires_grad_()
    b.requires_grad_()
    found = einsum("ab,ab->a", a, b, semiring="log", block_size=block_size)
    seven, six = 10 + torch.tensor(7.0).log(), 10 + torch.tensor(6.0).log()
    expected = torch.tensor([seven, -INF, -INF, -INF, six, NAN, INF])
    torch.testing.assert_close(found, expected, equal_nan=True)
    found.sum().backward()
    shares = torch.zeros(7, 7)
    shares[0], shares[4], shares[5] = 1 / 7, 1 / 6, NAN
    shares[4, 3] = 0
    shares[6, 5] = NAN  # infinity of infinity
    for x in (a, b):
        torch.testing.assert_close(x.grad, shares, equal_nan=True)
    large = einsum(",->", torch.tensor(2e38), torch.tensor(2e38), semiring="log")
    assert large.item() == INF


def test_the_best_of_one_term_is_nowhere_else():
    x = torch.arange(5.0)
    best, where = einsum("a,a->a", x, x, semiring="max-plus", argmax=True)
    assert best.tolist() == [0, 2, 4, 6, 8]
    assert where.shape == (5, 0)


@pytest.mark.parametrize("how", [{}, {"block_size": 3}, {"budget": "1MiB"}], ids=str)
@pytest.mark.parametrize("semiring", ["max-plus", "min-plus"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "abce,abde,abdf->acd",  # f is chosen first: nobody else has it
        "abc,b->a",  # not c: b comes before it, and not last
        "ab,ac,ad->a",  # d, then c
        "ab,ac,ad->",
        "ab,bc,c->a",
        "i,j->",
        "ab,c->ac",  # b alone, before the operands are multiplied
        "c,ab->ca",
        "ijk->j",
        "abf,afb->b",
        "xa,ay,x->",
    ],
)
def test_the_first_of_the_best_terms_is_told(text, semiring, ties, how):
    """With ties there are many of the best, and the first in the order of all summed dimensions."""
    sizes = dict(zip("abcdefijkxy", (2, 3, 5, 7, 4, 6, 4, 5, 6, 3, 4), strict=True))
    shapes = [[sizes[x] for x in part] for part in text.partition("->")[0].split(",")]
    operands = [x.round() if ties else x for x in operands_of(shapes, "real")]
    best, where = einsum(text, *operands, semiring=semiring, argmax=True, **how)
    parts, output = text.partition("->")[0].split(","), text.partition("->")[2]
    reduced = [x for x in dict.fromkeys("".join(parts)) if x not in output]
    assert where.shape == (*best.shape, len(reduced))
    every = naive_einsum(
        f"{text.partition('->')[0]}->{output}{''.join(reduced)}", *operands, semiring="max-plus"
    )
    terms = every.flatten(len(output))
    at = terms.argmax(-1) if semiring == "max-plus" else terms.argmin(-1)
    first = torch.stack(torch.unravel_index(at, [sizes[x] for x in reduced]), -1)
    torch.testing.assert_close(best, terms.gather(-1, at.unsqueeze(-1)).squeeze(-1))
    assert torch.equal(where, first)


@pytest.mark.parametrize("length", [255, 256, 257, 300, 320, 1000, 4097])
def test_long_rows_have_their_first_best(length):
    """Places are found group by group, and the last group begins in the one before."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(0, length // 3, (40, length), generator=generator).float()
    x[0] = 5
    x[1, -1] = x[2, -2] = length
    x[3, 100] = x[3, length - 20] = NAN
    x[4, length - 3], x[4, length - 50] = INF, INF
    x[5] = -INF
    for semiring, expected in (("max-plus", x.max(1)), ("min-plus", x.min(1))):
        best, where = einsum("ij->i", x, semiring=semiring, argmax=True)
        assert torch.equal(best.nan_to_num(nan=-1), expected.values.nan_to_num(nan=-1))
        assert torch.equal(where.squeeze(-1), expected.indices)
