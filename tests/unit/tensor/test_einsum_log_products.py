"""Logarithms of sums by matrix products: as exact as one by one, and else one by one."""

import pytest
import torch

from tests.support.naive_einsum import naive_einsum
from torchTensorRef.tensor.einsum import Equation, einsum, log_products
from torchTensorRef.tensor.einsum.kernels import LogSum
from torchTensorRef.tensor.einsum.log_products import LogProduct, LogShares

INF, NAN = torch.inf, torch.nan


@pytest.fixture
def used(monkeypatch):
    """Names of the kernels that ran to the end, of sums and of their gradients."""
    names = []

    def wrap(kernel, method):
        original = getattr(kernel, method)

        def noted(self, *args):
            found = original(self, *args)
            names.append(kernel.__name__)
            return found

        monkeypatch.setattr(kernel, method, noted)

    wrap(LogProduct, "finish")
    wrap(LogSum, "finish")
    wrap(LogShares, "finish")
    return names


def gradients(function, operands):
    operands = [x.detach().requires_grad_() for x in operands]
    found = function(*operands)
    g = torch.linspace(-1, 2, found.numel()).view(found.shape).to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, operands, g)]


def one_by_one(operands, monkeypatch):
    """The same of "ik,kj->ij", without matrix products."""
    with monkeypatch.context() as patch:
        patch.setattr(log_products, "FEWEST_TERMS", 1 << 60)
        equation = Equation("ik,kj->ij")  # one without plans
        return gradients(lambda *x: einsum(equation, *x, semiring="log"), operands)


def assert_as_exact(text, *operands, **how):
    """Compare a result and its gradients with those of all terms in float64."""
    ours = gradients(lambda *x: einsum(text, *x, semiring="log", **how), operands)
    theirs = gradients(
        lambda *x: naive_einsum(text, *x, semiring="log"), [x.double() for x in operands]
    )
    bound = 8 * torch.finfo(torch.promote_types(ours[0].dtype, torch.float32)).eps
    if ours[0].dtype.itemsize == 2:
        bound = torch.finfo(ours[0].dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == operands[0].dtype
        other = other.nan_to_num(nan=0, posinf=INF, neginf=-INF)
        scale = other[other.isfinite()].abs().max()
        assert one.double().isfinite().equal(other.isfinite())
        difference = torch.where(other.isfinite(), one.double() - other, 0)
        assert difference.abs().max() <= bound * max(scale, 1)


TEXTS = {
    "ik,kj->ij": ((50, 60), (60, 70)),
    "ki,jk->ji": ((60, 50), (70, 60)),
    "bik,bkj->ijb": ((3, 40, 50), (3, 50, 60)),
    "abc,bcd->ad": ((40, 6, 8), (6, 8, 50)),
    "xik,kjy->ij": ((2, 40, 50), (50, 60, 3)),
    "ikb,kj->bij": ((20, 30, 3), (30, 40)),
}


@pytest.mark.parametrize("how", [{}, {"block_size": 7}, {"budget": 500_000}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", TEXTS)
def test_they_are_as_exact_as_one_by_one(text, dtype, how, used):
    torch.manual_seed(1)
    operands = [(4 * torch.randn(shape)).to(dtype) for shape in TEXTS[text]]
    assert_as_exact(text, *operands, **how)
    assert {"LogProduct", "LogShares"} <= set(used)
    # What one factor alone is summed over may come first.
    assert "LogSum" not in used or text == "xik,kjy->ij"


@pytest.mark.parametrize("block_size", [None, 16])
def test_what_is_impossible_is_no_reason_for_one_by_one(block_size, used, monkeypatch):
    """A band: most terms of most sums are impossible, and of some all are."""
    torch.manual_seed(2)
    a, b = 3 * torch.randn(80, 80), 3 * torch.randn(80, 80)
    band = (torch.arange(80)[:, None] - torch.arange(80)).abs() > 9
    a[band], b[band] = -INF, -INF
    a[7], b[:, 9] = -INF, -INF
    ours = gradients(
        lambda *x: einsum("ik,kj->ij", *x, semiring="log", block_size=block_size), [a, b]
    )
    assert set(used) == {"LogProduct", "LogShares"}
    for one, other in zip(ours, one_by_one([a.double(), b.double()], monkeypatch), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"block_size": 7}], ids=str)
def test_what_is_far_apart_is_added_one_by_one(how, used):
    """The greatest of one row and of one column are at places where the other has next to none."""
    torch.manual_seed(3)
    a, b = torch.randn(40, 50), torch.randn(50, 40)
    a[3, ::2] -= 300
    b[1::2, 5] -= 300
    assert_as_exact("ik,kj->ij", a, b, **how)
    assert set(used) == {"LogSum"}


def test_sums_of_which_little_is_left_have_their_gradients(used):
    """1e-13 of the greatest possible: small, and all there."""
    a, b = torch.zeros(40, 50), torch.zeros(50, 40)
    a[:, ::2] -= 30
    b[1::2] -= 30
    assert_as_exact("ik,kj->ij", a, b)
    assert set(used) == {"LogProduct", "LogShares"}


@pytest.mark.parametrize("value", [INF, NAN, 3e38, 1.5e38, -1.5e38, -3e38])
@pytest.mark.parametrize("both", [False, True], ids=["one", "and its opposite"])
def test_what_is_no_number_or_nearly_none(value, both, monkeypatch):
    torch.manual_seed(4)
    a, b = torch.randn(40, 50), torch.randn(50, 40)
    a[3, 7] = value
    if both:
        b[7, 5] = -value
    expected = (a[:, :, None] + b).logsumexp(1)
    ours = gradients(lambda *x: einsum("ik,kj->ij", *x, semiring="log"), [a, b])
    torch.testing.assert_close(ours[0], expected, equal_nan=True)
    for one, other in zip(ours, one_by_one([a, b], monkeypatch), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_second_derivatives_are_those_of_all_terms():
    torch.manual_seed(5)
    operands = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((30, 40), (40, 30))
    ]
    weights = [torch.randn_like(x) for x in operands]

    def second(result):
        first = torch.autograd.grad((result**2).sum(), operands, create_graph=True)
        total = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
        return torch.autograd.grad(total, operands)

    ours = second(einsum("ik,kj->ij", *operands, semiring="log"))
    theirs = second(naive_einsum("ik,kj->ij", *operands, semiring="log"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_small_ones_and_thin_ones_are_added_one_by_one(used):
    for shapes in (((8, 8), (8, 8)), ((1, 30_000), (30_000, 1))):
        einsum("ik,kj->ij", *[torch.randn(shape) for shape in shapes], semiring="log")
    assert set(used) == {"LogSum"}
