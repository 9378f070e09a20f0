"""Einsum under a budget: what the device holds at most is counted there, byte by byte."""

import pytest
import torch

from torchTensorRef import Semiring, einsum
from torchTensorRef.base.errors import ConfigError

MIB = 1 << 20
WITH_GRADIENTS = ("real", "log", "max-plus", "min-plus")


def operands_of(manager, *shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [manager.adopt(torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("semiring", [*WITH_GRADIENTS, "counting", "boolean"])
def test_numbers_are_those_of_plain_tensors(manage, semiring):
    manager = manage()
    shapes = ((2, 30, 20), (2, 20, 10), (10, 30))
    if semiring in WITH_GRADIENTS:
        plain = [torch.randn(shape, requires_grad=True) for shape in shapes]
    else:
        plain = [torch.randint(0, 2, shape) for shape in shapes]
    refs = [manager.adopt(x.detach().clone()).requires_grad_(x.requires_grad) for x in plain]
    found = [einsum("bij,bjk,kl->il", *x, semiring=semiring, block_size=7) for x in (plain, refs)]
    assert torch.equal(found[0], manager.release(found[1].detach()))
    if semiring in WITH_GRADIENTS:
        g = torch.randn(30, 30)
        found[0].backward(g)
        found[1].backward(manager.adopt(g.clone()))
        for x, ref in zip(plain, refs, strict=True):
            assert torch.equal(x.grad, manager.release(ref.grad))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("semiring", WITH_GRADIENTS)
def test_all_that_is_held_stays_under_the_bytes_that_are_given(manage, semiring, backward):
    """All products at once would be 64 MiB."""
    manager = manage(nbytes=1 << 30)
    a, b = operands_of(manager, (256, 8, 32), (8, 32, 256))
    g = manager.adopt(torch.ones(256, 256))
    manager.reset_stats()
    with torch.set_grad_enabled(backward):
        found = einsum("abc,bcd->ad", a, b, semiring=semiring, budget="4MiB")
    if backward:
        found.backward(g)
    stats = manager.stats()
    assert 0 < stats["peak_resident_nbytes"] <= 4 * MIB
    assert stats["host_op_count"] == 0
    assert stats["out_of_budget_count"] == 0
    with torch.no_grad():  # as a check that it is right, in a row and a column
        expected = {
            "real": lambda terms: terms[1].sum(-1),
            "log": lambda terms: terms[0].logsumexp(-1),
            "max-plus": lambda terms: terms[0].amax(-1),
            "min-plus": lambda terms: terms[0].amin(-1),
        }
        x, y = manager.release(a).reshape(256, 256), manager.release(b).reshape(256, 256)
        row = (x[5, None, :] + y.T, x[5, None, :] * y.T)
        torch.testing.assert_close(
            manager.release(found)[5], expected[semiring](row), rtol=1e-4, atol=1e-4
        )


def test_gradients_of_terms_one_by_one_stay_under_the_bytes_that_are_given(manage):
    """Factors too far apart for a matrix product; all terms at once would be 8 MiB."""
    manager = manage(nbytes=1 << 30)
    torch.manual_seed(0)
    plain = [torch.randn(128, 128), torch.randn(128, 128)]
    plain[0][:, ::2] -= 300
    plain[1][1::2] -= 300
    a, b = (manager.adopt(x.clone()).requires_grad_() for x in plain)
    manager.reset_stats()
    found = einsum("ij,jk->ik", a, b, semiring="log", budget="1MiB")
    found.backward(manager.adopt(torch.ones(128, 128)))
    stats = manager.stats()
    assert 0 < stats["peak_resident_nbytes"] <= MIB
    assert stats["host_op_count"] == 0
    leaves = [x.double().requires_grad_() for x in plain]
    total = (leaves[0][:, :, None] + leaves[1]).logsumexp(1).sum()
    for x, other in zip((a, b), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(manager.release(x.grad).double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("semiring", WITH_GRADIENTS)
def test_the_budget_of_the_accelerator_is_kept_without_being_named(manage, semiring):
    """Nothing runs on the host, and nothing is evicted to make room for blocks."""
    manager = manage(nbytes=4 * MIB)
    a, b = operands_of(manager, (256, 8, 32), (8, 32, 256))
    einsum("abc,bcd->ad", a, b, semiring=semiring).backward(manager.adopt(torch.ones(256, 256)))
    stats = manager.stats()
    assert stats["host_op_count"] == 0
    assert stats["out_of_budget_count"] == 0
    assert stats["peak_resident_nbytes"] <= 4 * MIB
    manager.check()


@pytest.mark.parametrize("semiring", ["max-plus", "min-plus"])
def test_where_a_maximum_was_found_is_counted_once(manage, semiring):
    """12 bytes an element for the result and where it was found, 8 more with gradients."""
    manage(nbytes=32 << 20)
    a, b = torch.rand(600, 4, requires_grad=True), torch.rand(4, 600, requires_grad=True)
    einsum("ij,jk->ik", a, b, semiring=semiring, budget=600 * 600 * 20 + (1 << 20)).sum().backward()
    assert a.grad is not None
    assert a.grad.sum() == 600 * 600


def test_a_budget_that_is_too_small_says_which_would_do(manage):
    manager = manage(nbytes=1 << 30)
    a, b = operands_of(manager, (8, 8), (8, 8))
    with pytest.raises(ConfigError, match=r"Give budget=(\d+) or more") as caught:
        einsum("ij,jk->ik", a, b, semiring="log", budget=8 * 8 * 4)
    enough = int(str(caught.value).partition("budget=")[2].split()[0])
    manager.reset_stats()
    einsum("ij,jk->ik", a, b, semiring="log", budget=enough).sum()
    assert manager.stats()["peak_resident_nbytes"] <= enough


def test_what_is_made_on_the_way_is_counted(manage):
    """Left to right an outer product of 16 MiB would be made first: all are multiplied at once."""
    manager = manage(nbytes=1 << 30)
    a, b, c = operands_of(manager, (2048,), (2048,), (2048, 8))
    ring = Semiring(torch.maximum, torch.add, zero=-torch.inf, one=0, sum=torch.amax)
    ordered = Semiring(
        torch.maximum, torch.add, zero=-torch.inf, one=0, sum=torch.amax, commutative=False
    )
    for semiring in (ring, ordered, "max-plus"):
        manager.reset_stats()
        with torch.no_grad():
            found = einsum("i,j,jk->ik", a, b, c, semiring=semiring, budget="2MiB")
        assert manager.stats()["peak_resident_nbytes"] <= 2 * MIB
        expected = a[:, None] + (b[:, None] + c).amax(0)
        torch.testing.assert_close(manager.release(found), manager.release(expected.detach()))


def test_halves_are_widened_block_by_block(manage):
    manager = manage(nbytes=1 << 30)
    a, b = operands_of(manager, (512, 2048), (2048, 512), dtype=torch.bfloat16)
    for semiring in ("real", "log"):
        manager.reset_stats()
        einsum("ij,jk->ik", a, b, semiring=semiring, budget="14MiB", block_size={"j": 512}).sum()
        assert manager.stats()["peak_resident_nbytes"] <= 14 * MIB


def test_no_product_is_kept_for_the_gradient(manage):
    """After the forward pass the device holds operands and result, and where the best ones are."""
    manager = manage(nbytes=1 << 30)
    a, b = operands_of(manager, (200, 200), (200, 200))
    a.toGPU()
    b.toGPU()
    size = 200 * 200 * 4
    for semiring, results in (("real", 1), ("log", 1), ("max-plus", 3)):
        found = einsum("ij,jk->ik", a, b, semiring=semiring)
        manager.reset_stats()  # the peak begins with what is held now
        assert manager.stats()["peak_resident_nbytes"] <= (2 + results) * size + 4096
        del found


@pytest.mark.parametrize("strategy", ["lru", "flow", "genoa"])
def test_every_strategy_gives_the_same_numbers(manage, strategy):
    manager = manage(strategy=strategy, nbytes=48 << 10)
    a, b = operands_of(manager, (40, 50), (50, 60))
    plain = [manager.release(x.detach()).clone().requires_grad_() for x in (a, b)]
    for semiring in WITH_GRADIENTS:
        ours = einsum("ij,jk->ik", a, b, semiring=semiring, block_size={"i": 9, "j": 16})
        theirs = einsum("ij,jk->ik", *plain, semiring=semiring, block_size={"i": 9, "j": 16})
        assert torch.equal(manager.release(ours.detach()), theirs)
