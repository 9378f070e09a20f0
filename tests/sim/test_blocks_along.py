"""Operators of which one row alone is larger than the budget: cut along what they go along."""

import pytest
import torch
from torch.nn import functional as F

from torchTensorRef.base.options import options
from torchTensorRef.operators.blocked import along, table

from ..support.differential import differences
from ..support.sweeps import in_turn, one_in

aten = torch.ops.aten

BUDGET = 100_000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def whole(manager, function, tensors):
    """What plain torch makes of copies of some tensors, and what we make."""
    plain = function(*[t.clone() for t in tensors])
    return plain, function(*[manager.adopt(t.clone()) for t in tensors])


def in_doubles(value):
    return value.double() if value.is_floating_point() else value


def listed(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def assert_close(manager, function, tensors, ours):
    """As near to what comes of doubles as the dtype can say; half precision is rounded once."""
    exact = listed(function(*map(in_doubles, tensors)))
    for want, got in zip(exact, listed(ours), strict=True):
        got = manager.release(got)
        assert got.size() == want.size()
        if not got.dtype.is_floating_point:
            assert torch.equal(got, want)
            continue
        bound = max(1.01 * torch.finfo(got.dtype).eps, 1e-5)
        scale = float(want[want.isfinite()].abs().max())
        torch.testing.assert_close(
            got.double(), want, rtol=bound, atol=bound * scale, equal_nan=True
        )


def backward(function):
    def run(x):
        x = x.requires_grad_()
        out = function(x)
        weights = torch.linspace(-1, 1, out.size(-1), dtype=torch.float32)
        (grad,) = torch.autograd.grad(out, x, weights.to(out.dtype).expand_as(out))
        return grad

    return run


#: What operands of some are made of normally distributed numbers by.
MADE = {
    "prod": lambda x: x * 1e-3 + 1,
    "cumprod": lambda x: x * 1e-3 + 1,
    "var": lambda x: x + 100,
    "softmax": lambda x: x * 20,
}
#: Name: what is run on three rows of 40,000 numbers, of which no row fits.
CASES = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "sum of columns": lambda x: x.t().sum(0, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "nansum": lambda x: x.nansum(-1),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax(-1),
    "amin of all": lambda x: x.amin(),
    "max of all": lambda x: x.max(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "least norm": lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=-1),
    "norm of all": lambda x: torch.linalg.vector_norm(x, 0),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "gradient of softmax": backward(lambda x: x.softmax(-1)),
    "gradient of log_softmax": backward(lambda x: x.log_softmax(-1)),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "topk": lambda x: x.topk(300, -1).values,
    "least": lambda x: x.topk(5, 1, largest=False).values,
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, FLOATS))
def test_where_no_row_fits_it_is_cut(manage, name, dtype):
    manager, x = manage(nbytes=BUDGET), torch.randn(3, 160_000 // dtype.itemsize)
    x = MADE.get(name, torch.clone)(x).to(dtype)
    with options(blocks="any"):
        ours = CASES[name](manager.adopt(x.clone()))
    stats = manager.stats()
    assert stats["reordered_op_count"] >= 1
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert stats["peak_resident_nbytes"] <= BUDGET
    assert_close(manager, CASES[name], [x], ours)


EXACT = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax(-1),
    "min of all": lambda x: x.min(),
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(1, keepdim=True),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.t().argmin(0),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(),
    "cumsum": lambda x: x.cumsum(-1),
}


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(EXACT, [torch.int64, torch.int32, torch.uint8, torch.bool])
)
def test_what_keeps_every_bit_is_cut_without_being_asked(manage, name, dtype):
    if dtype is torch.bool and name.startswith("arg"):
        pytest.skip("torch refuses it")
    manager, x = manage(nbytes=BUDGET), torch.randint(-9, 9, (3, 160_000)).to(dtype)
    x[:, 1_000:] = 0 if name == "any" else x[:, 1_000:]
    plain, ours = whole(manager, EXACT[name], [x])
    stats = manager.stats()
    assert stats["blocked_op_count"] == 1
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert stats["reordered_op_count"] == 0
    assert stats["peak_resident_nbytes"] <= BUDGET
    assert not differences(plain, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_the_first_of_equal_ones_is_found(manage, name, dtype):
    """Zeros of both signs, NaNs, and few numbers many times."""
    manager, x = manage(nbytes=BUDGET), torch.randint(-2, 2, (6, 80_000)).to(dtype)
    x[1] = x[1].clamp(-1, 0) * -0.0
    x[2] = x[2].clamp(0, 0).where(torch.arange(80_000) % 7 != 3, -0.0)
    x[3, 70_000:] = torch.nan
    x[4, 100], x[4, 200] = torch.nan, -torch.nan
    x[5] = -torch.inf if name.endswith("max") else torch.inf
    plain, ours = whole(manager, EXACT[name], [x])
    assert manager.stats()["blocked_op_count"] == 1
    assert not differences(plain, ours)


def test_other_sums_run_at_home_unless_they_are_asked_for(manage):
    manager, x = manage(nbytes=BUDGET), torch.randn(40_000)
    plain, ours = whole(manager, lambda x: x.softmax(0), [x])
    assert manager.stats()["host_fallback_operators"] == {"aten._softmax.default": 1}
    assert not differences(plain, ours)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.logsumexp(-1),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: x.cumsum(-1, dtype=torch.bfloat16),
    ],
)
def test_what_makes_others_of_whole_numbers_is_no_sum_of_these(manage, function):
    manager, x = manage(nbytes=BUDGET), torch.randint(9_999_999, (2, 40_000))
    plain, ours = whole(manager, function, [x])
    assert manager.stats()["reordered_op_count"] == manager.stats()["blocked_op_count"] == 0
    assert not differences(plain, ours)


def test_rows_that_fit_are_not_cut(manage):
    """Exact rules first: two rows of the four fit."""
    manager, x = manage(nbytes=BUDGET), torch.randn(40, 4_000)
    with options(blocks="any"):
        plain, ours = whole(manager, lambda x: x.softmax(-1), [x])
    assert manager.stats()["reordered_op_count"] == 0
    assert not differences(plain, ours)


NOT_FINITE = ["softmax", "log_softmax", "logsumexp", "amax", "var", "sum"]


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", [*NOT_FINITE, *(name for name in CASES if "norm" in name)])
def test_numbers_that_are_none(manage, name, special):
    manager, x = manage(nbytes=BUDGET), torch.randn(4, 40_000)
    x[0, 30_000] = special
    x[1, :20_000] = special
    x[2] = special
    x[3, 100], x[3, 39_000] = torch.inf, special
    with options(blocks="any"):
        plain, ours = whole(manager, CASES[name], [x])
    assert manager.stats()["reordered_op_count"] == 1
    torch.testing.assert_close(manager.release(ours), plain, equal_nan=True, rtol=1e-4, atol=1e-6)


def test_the_first_dimension_is_read_as_it_lies(manage):
    """Pieces of whole rows are runs of memory: nothing is packed, and all of it moves once."""
    manager, x = manage(nbytes=BUDGET), torch.randn(4_000, 30)
    with options(blocks="any"):
        ours = manager.adopt(x.clone()).sum(0)
    assert_close(manager, lambda x: x.sum(0), [x], ours)
    assert manager.stats()["fetched_nbytes"] == x.nbytes


def test_a_softmax_reads_its_rows_twice(manage):
    manager, x = manage(nbytes=BUDGET), torch.randn(2, 40_000)
    with options(blocks="any"):
        manager.adopt(x).softmax(-1)
    # The last piece of the first pass is the first one of the second.
    assert 1.5 * x.nbytes < manager.stats()["fetched_nbytes"] < 2 * x.nbytes


# -- attention ----------------------------------------------------------------------------------


def qkv(dtype, heads, key_heads, queries, keys, width=32):
    return [
        torch.randn(1, n, length, width).to(dtype)
        for n, length in ((heads, queries), (key_heads, keys), (key_heads, keys))
    ]


ATTENTION = ("plain", "causal", "scale", "mask of keys", "mask", "shared keys", "shared and causal")


def attention(mask=None, **how):
    def run(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, None if mask is None else mask.to(q.dtype), **how
        )

    return run


@pytest.mark.parametrize(("case", "dtype"), one_in(2, in_turn(ATTENTION, FLOATS, each=1)))
def test_attention_whose_keys_do_not_fit(manage, case, dtype):
    shared = {"enable_gqa": True} if "shared" in case else {}
    queries, keys = (800, 800) if "causal" in case else (96, 1_024)
    tensors = qkv(dtype, 2, 1 if shared else 2, queries, keys)
    nbytes = 200_000 if dtype is torch.float64 else BUDGET
    mask = None
    if "mask" in case:
        mask = torch.randn(1, keys) if case == "mask of keys" else torch.randn(1, 1, queries, keys)
        mask = mask.where(mask < 1, -torch.inf)
        if case == "mask":
            mask[:, :, 7] = -torch.inf  # a query that sees nothing
    how = {"is_causal": "causal" in case} | ({"scale": 0.7} if case == "scale" else {}) | shared
    manager = manage(nbytes=nbytes)
    ours_mask = None if mask is None else manager.adopt(mask.to(dtype))
    with torch.no_grad(), options(blocks="any"):
        ours = attention(ours_mask, **how)(*[manager.adopt(t.clone()) for t in tensors])
    stats = manager.stats()
    assert stats["reordered_op_count"] == 1
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert stats["peak_resident_nbytes"] <= nbytes
    mask = None if mask is None else mask.to(dtype)
    with torch.no_grad():
        assert_close(manager, attention(mask, **how), tensors, ours)


def gradients(mask=None, **how):
    def run(q, k, v):
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = attention(mask, **how)(*leaves)
        return torch.autograd.grad(out.sin().sum(), leaves)

    return run


def test_the_gradient_of_attention_whose_keys_did_not_fit(manage):
    """What is left for it (a log-sum-exp) is as from torch's kernel."""
    manager = manage(nbytes=200_000)
    with options(blocks="any"):
        plain, ours = whole(manager, gradients(), qkv(torch.float32, 1, 1, 100, 1_000))
    assert manager.stats()["reordered_op_count"] == 1
    for want, got in zip(plain, ours, strict=True):
        torch.testing.assert_close(manager.release(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "mask"])
def test_the_gradient_of_attention_is_cut_by_samples_and_heads(manage, case, dtype):
    tensors = [torch.cat([t, t.flip(2)]) for t in qkv(dtype, 4, 4, 300, 300)]
    mask = torch.randn(2, 1, 300, 300).to(dtype) if case == "mask" else None
    manager = manage(nbytes=5 * tensors[0].nbytes // 2)
    plain = gradients(mask, is_causal=case == "causal")(*[t.clone() for t in tensors])
    ours_mask = None if mask is None else manager.adopt(mask)
    run = gradients(ours_mask, is_causal=case == "causal")
    ours = run(*[manager.adopt(t.clone()) for t in tensors])
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    stats = manager.stats()
    assert stats["blocked_operators"][name] == 1
    assert stats["reordered_op_count"] == stats["host_fallback_count"] == 0
    assert not differences(plain, ours)


# -- what does not fit --------------------------------------------------------------------------


def refusal(manager):
    story = [str(line) for line in manager.residency.books.log.tail(50)]
    return next(line for line in reversed(story) if "even in blocks: the smallest takes" in line)


@pytest.mark.parametrize("blocks", ["exact", "any"])
def test_the_smallest_budget_that_would_do_is_named_and_does(manage, blocks):
    manager, x = manage(nbytes=2_000), torch.randn(8, 4_000)
    with options(blocks=blocks):
        whole(manager, lambda x: x.softmax(-1), [x])
    text = refusal(manager)
    assert f"its lengths are {'2' if blocks == 'exact' else '1 x 256'};" in text
    least = int(text.split("a budget of ")[1].split()[0].replace(",", ""))
    for nbytes, falls_back in ((least, 0), (least - 1, 1)):
        manager = manage(nbytes=nbytes)
        with options(blocks=blocks):
            whole(manager, lambda x: x.softmax(-1), [x])
        assert manager.stats()["host_fallback_count"] == falls_back


def test_every_rule_has_its_case():
    """Those of the table above are tried in forced blocks, too (tests/conformance)."""
    assert set(along.RULES) - set(table.RULES) <= {
        aten.sum.default, aten.mean.default, aten.prod.default, aten.max.default,
        aten.min.default, aten.any.default, aten.any.dims, aten.all.default, aten.all.dims,
    }  # fmt: skip
