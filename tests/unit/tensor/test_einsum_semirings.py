"""Every family of equations in every semiring, forward and backward, against all terms."""

import pytest
import torch

from tests.support.naive_einsum import FAMILIES, naive_einsum
from tests.support.sweeps import in_turn
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.tensor.einsum import SEMIRINGS, Equation, Semiring, einsum

WITH_GRADIENTS = ("real", "log", "max-plus", "min-plus")
BLOCKS = {"automatic": None, "one": 1, "by index": {"i": 2, "j": 2}}


def operands_for(shapes, semiring, dtype=torch.float64):
    if semiring == "boolean":
        return [torch.rand(shape) > 0.6 for shape in shapes]
    if semiring == "counting":
        return [torch.randint(0, 4, shape) for shape in shapes]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(("text", "semiring"), in_turn(FAMILIES, SEMIRINGS, each=3))
def test_results_are_those_of_all_terms(text, semiring):
    torch.manual_seed(1)
    operands = operands_for(FAMILIES[text], semiring)
    expected = naive_einsum(text, *operands, semiring=semiring)
    for block_size in (None, 2):
        found = einsum(text, *operands, semiring=semiring, block_size=block_size)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("text", "semiring"), in_turn(FAMILIES, WITH_GRADIENTS))
def test_gradients_are_those_of_all_terms(text, semiring):
    torch.manual_seed(2)
    operands = [x.requires_grad_() for x in operands_for(FAMILIES[text], semiring)]
    expected = naive_einsum(text, *operands, semiring=semiring)
    g = torch.randn(expected.shape, dtype=torch.float64)
    theirs = torch.autograd.grad(expected, operands, g, allow_unused=True, materialize_grads=True)
    for block_size in (None, 2):
        found = einsum(text, *operands, semiring=semiring, block_size=block_size)
        ours = torch.autograd.grad(found, operands, g)
        for one, other in zip(ours, theirs, strict=True):
            # Where a result is the logarithm of nothing, torch's gradient is NaN; ours is 0.
            torch.testing.assert_close(one, other.nan_to_num())


@pytest.mark.parametrize("block_size", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("semiring", WITH_GRADIENTS)
@pytest.mark.parametrize("text", ["ij,jk->ik", "bij,bkj->ib", "ii,ij,jk->k", "...ij,...j->i..."])
def test_derivatives_are_right_twice(text, semiring, block_size):
    torch.manual_seed(3)
    sizes = dict(zip("bijk", (2, 2, 3, 2), strict=True))
    shapes = [
        [sizes[label] for label in labels.replace("...", "b")]
        for labels in text.partition("->")[0].split(",")
    ]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def function(*operands):
        return einsum(text, *operands, semiring=semiring, block_size=block_size)

    assert torch.autograd.gradcheck(function, operands, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, operands, fast_mode=True)


def test_complex_numbers_have_gradients():
    operands = [
        torch.randn(shape, dtype=torch.complex128, requires_grad=True)
        for shape in ((3, 4), (4, 2), (2,))
    ]
    for text in ("ij,jk,k->i", "ij,jk,k->ijk"):
        torch.testing.assert_close(einsum(text, *operands), torch.einsum(text, *operands))
        assert torch.autograd.gradcheck(
            lambda *x, text=text: einsum(text, *x), operands, fast_mode=True
        )
        assert torch.autograd.gradgradcheck(
            lambda *x, text=text: einsum(text, *x), operands, fast_mode=True
        )


@pytest.mark.parametrize("semiring", WITH_GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_are_added_in_float32(semiring, dtype):
    """One rounding at the end, however sums are cut: 4096 terms in 16 parts."""
    torch.manual_seed(4)
    a, b = torch.rand(6, 4096).to(dtype), torch.rand(4096, 5).to(dtype)
    a.requires_grad_()
    expected = naive_einsum("ij,jk->ik", a, b, semiring=semiring)
    found = einsum("ij,jk->ik", a, b, semiring=semiring, block_size=256)
    g = torch.rand(6, 5).to(dtype)
    (ours,) = torch.autograd.grad(found, a, g)
    (theirs,) = torch.autograd.grad(expected, a, g.double())
    bound = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    assert found.dtype == ours.dtype == dtype
    assert ((found.double() - expected).abs() <= bound * expected.abs()).all()
    if semiring in ("real", "log"):  # several halves are the greatest, and ours takes the first
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("block_size", [None, 1, 2])
def test_logarithms_know_infinities(block_size):
    inf = torch.inf
    a = torch.tensor([[-inf, -inf, -inf], [0.0, -inf, 1.0], [inf, 0.0, -inf], [-inf, inf, 1e30]])
    b = torch.tensor([[0.0, -inf], [-inf, 2.0], [1.0, -inf]])
    a.requires_grad_()
    found = einsum("ij,jk->ik", a, b, semiring="log", block_size=block_size)
    expected = naive_einsum("ij,jk->ik", a, b, semiring="log").float()
    torch.testing.assert_close(found, expected, equal_nan=True)
    found[:2].sum().backward()
    assert a.grad is not None
    assert a.grad[0].eq(0).all()
    torch.testing.assert_close(
        a.grad[1],
        torch.tensor([1.0, 0.0, 1.0])
        * torch.tensor([1 / (1 + torch.e**2), 0.0, torch.e**2 / (1 + torch.e**2)]),
    )


def test_logarithms_of_what_no_float_can_hold():
    """A maximum over a block is not that over all: it runs along, both up and down."""
    for rising in (True, False):
        a = torch.linspace(-2000, 2000, 64).view(1, 64)
        a = a if rising else a.flip(1)
        found = einsum("ij->i", a, semiring="log", block_size=5)
        torch.testing.assert_close(found, a.double().logsumexp(1).float())


@pytest.mark.parametrize("block_size", [None, 1, 3, {"j": 2, "k": 3, "i": 2}])
@pytest.mark.parametrize("semiring", ["max-plus", "min-plus"])
def test_the_best_path_leads_to_the_best_value(semiring, block_size):
    torch.manual_seed(5)
    a, b, c = torch.randn(5, 6), torch.randn(6, 7), torch.randn(7, 5)
    best, where = einsum(
        "ij,jk,kl->il", a, b, c, semiring=semiring, argmax=True, block_size=block_size
    )
    assert where.shape == (5, 5, 2)
    j, k = where.unbind(-1)
    i, ell = torch.arange(5)[:, None], torch.arange(5)
    torch.testing.assert_close(best, a[i, j] + b[j, k] + c[k, ell])
    torch.testing.assert_close(
        best, naive_einsum("ij,jk,kl->il", a, b, c, semiring=semiring).float()
    )


@pytest.mark.parametrize("block_size", [None, 1, 2, 3, {"a": 2, "b": 3}])
def test_of_equals_the_first_is_taken(block_size):
    same = torch.zeros(4, 5, 3)
    _, where = einsum("abi->i", same, semiring="max-plus", argmax=True, block_size=block_size)
    assert where.eq(0).all()
    same[2, 1] = same[1, 4] = 7
    _, where = einsum("abi->i", same, semiring="max-plus", argmax=True, block_size=block_size)
    assert where.tolist() == [[1, 4]] * 3
    same[3, 2, 0] = torch.nan
    best, where = einsum("abi->i", same, semiring="max-plus", argmax=True, block_size=block_size)
    assert best[0].isnan()
    assert where.tolist() == [[3, 2], [1, 4], [1, 4]]


@pytest.mark.parametrize("block_size", [None, 1, {"j": 3}])
@pytest.mark.parametrize("text", ["ijk,jk->i", "jjki,kj->", "ijk,kj,j->ik"])
def test_where_the_best_is_does_not_depend_on_who_broadcasts(text, block_size):
    torch.manual_seed(6)
    sizes = {"i": 2, "j": 4, "k": 3}
    names = text.partition("->")[0].split(",")
    whole = [[sizes[label] for label in name] for name in names]
    for one in "jk":
        shapes = [list(shape) for shape in whole]
        shapes[0] = [1 if name == one else n for name, n in zip(names[0], whole[0], strict=True)]
        parts = [torch.randint(5, shape).float().requires_grad_() for shape in shapes]
        full = [x.expand(shape).clone() for x, shape in zip(parts, whole, strict=True)]
        how = {"semiring": "max-plus", "argmax": True, "block_size": block_size}
        best, where = einsum(text, *parts, **how)
        expected, expected_where = einsum(text, *full, **how)
        assert best.tolist() == expected.tolist()
        assert where.tolist() == expected_where.tolist()
        ours, theirs = (torch.autograd.grad(y.sum(), parts) for y in (best, expected))
        assert [g.tolist() for g in ours] == [g.tolist() for g in theirs]


def test_integers_have_a_best():
    a = torch.tensor([[3, 9], [4, 1]])
    assert einsum("ij->i", a, semiring="max-plus").tolist() == [9, 4]
    nothing = torch.empty(2, 0, dtype=torch.int64)
    least = torch.iinfo(torch.int64).min
    assert einsum("ij->i", nothing, semiring="max-plus").tolist() == [least, least]


def test_a_best_of_nothing_is_nowhere():
    with pytest.raises(ValueError, match="a best of no terms is nowhere"):
        einsum("ij->i", torch.empty(2, 0), semiring="max-plus", argmax=True)


# -- one's own ------------------------------------------------------------------------------------

WIDEST = Semiring(torch.maximum, torch.minimum, zero=-torch.inf, one=torch.inf, sum=torch.amax)
ROOTS = Semiring(lambda a, b: (a**2 + b**2).sqrt(), torch.mul, zero=0, one=1)


@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_ones_own_semirings(block_size):
    torch.manual_seed(6)
    a, b = torch.rand(5, 6, dtype=torch.float64), torch.rand(6, 7, dtype=torch.float64)
    terms = torch.minimum(a[:, :, None], b[None])
    found = einsum("ij,jk->ik", a, b, semiring=WIDEST, block_size=block_size)
    assert found.equal(terms.amax(1))
    terms = (a[:, :, None] * b[None]) ** 2
    found = einsum("ij,jk->ik", a, b, semiring=ROOTS, block_size=block_size)
    torch.testing.assert_close(found, terms.sum(1).sqrt())
    assert einsum("ij->j", torch.empty(0, 2), semiring=WIDEST).tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("block_size", [None, 1, 4, {"i": 2, "k": 3}])
@pytest.mark.parametrize("semiring", [WIDEST, ROOTS], ids=["widest", "roots"])
def test_ones_own_semirings_have_gradients(semiring, block_size):
    torch.manual_seed(7)
    operands = [
        torch.rand(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5), (5, 4), (4,))
    ]

    def function(*operands):
        return einsum("ij,jk,k->i", *operands, semiring=semiring, block_size=block_size)

    assert torch.autograd.gradcheck(function, operands)
    with pytest.raises(RuntimeError, match="can be taken once"):
        torch.autograd.grad(function(*operands).sum(), operands, create_graph=True)


def test_order_is_kept_where_multiplication_is_not_commutative():
    """Words: the first letter wins, so a product is its first factor."""
    first = Semiring(
        torch.maximum, lambda a, b: a + 0 * b, zero=-torch.inf, one=0, commutative=False
    )
    a, b, c = (torch.full((3, 3), value) for value in (1.0, 2.0, 3.0))
    assert einsum("ij,jk,kl->il", a, b, c, semiring=first).eq(1).all()
    assert einsum("ij,jk,kl->il", c, b, a, semiring=first).eq(3).all()


# -- what is refused ------------------------------------------------------------------------------


def test_an_unknown_semiring_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'max-plus'") as caught:
        einsum("i->", torch.ones(2), semiring="maxplus")
    assert caught.value.nearest == "max-plus"
    with pytest.raises(ConfigError, match="of your own"):
        einsum("i->", torch.ones(2), semiring=3)


@pytest.mark.parametrize(
    ("semiring", "operand", "message"),
    [
        ("log", torch.ones(2, dtype=torch.int64), "about floating point"),
        ("counting", torch.ones(2), "about integers and booleans"),
        ("max-plus", torch.ones(2, dtype=torch.complex64), "have an order"),
        ("real", torch.ones(2, dtype=torch.bool), "about numbers"),
    ],
)
def test_dtypes_that_are_not_meant(semiring, operand, message):
    with pytest.raises(TypeError, match=message):
        einsum("i->", operand, semiring=semiring)


def test_dtypes_that_are_not_alike():
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.float64"):
        einsum("i,i->", torch.ones(2), torch.ones(2, dtype=torch.float64))
    ways = einsum(
        "i,i->", torch.ones(2, dtype=torch.bool), torch.tensor([3, 4]), semiring="counting"
    )
    assert ways == 7


def test_argmax_is_for_the_best():
    with pytest.raises(ValueError, match="max-plus"):
        einsum("i->", torch.ones(2), argmax=True)


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, "3", {"i": 0}])
def test_block_sizes_that_are_none(block_size):
    with pytest.raises(ConfigError, match="integer of at least 1"):
        einsum("i->", torch.ones(2), block_size=block_size)


def test_a_block_size_of_an_index_that_is_not_there():
    with pytest.raises(ConfigError, match="no index 'k'"):
        einsum("ij->", torch.ones(2, 2), block_size={"k": 1})
    equation = Equation("...j->...")
    found = einsum(equation, torch.ones(2, 3, 4), block_size={"...": 1, "j": 2})
    assert found.eq(4).all()
