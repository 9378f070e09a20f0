"""Operators that are larger than the budget: in blocks, with the bits of plain torch."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchTensorRef import disabled
from torchTensorRef.base.options import options
from torchTensorRef.interception.blocks import Blocks
from torchTensorRef.operators.blocked import probe, products

from ..support.differential import bits, differences
from ..support.processes import python
from ..support.sweeps import in_turn, usual

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def rand(*sizes, dtype=torch.float32):
    return torch.randn(sizes).to(dtype)


def halves(*sizes):
    return rand(*sizes, dtype=torch.bfloat16)


def signs(*sizes):
    return rand(*sizes) > 0


def longs(most, *sizes):
    return torch.randint(most, sizes)


def both(manager, function, tensors):
    """What plain torch makes, and what we make, of copies of the same tensors."""
    plain = function(*[t.clone() for t in tensors])
    return plain, function(*[manager.adopt(t.clone()) for t in tensors])


#: Name, what is run, what its operands are made by (in the test: here they would be ours), the
#: budget as a share of the operands.
CASES = {
    "mm": (torch.mm, [(rand, 1500, 500), (rand, 500, 2000)], 0.9),
    "mm of a transposed": (lambda a, b: a @ b.t(), [(rand, 3, 256), (rand, 9000, 256)], 0.3),
    "mm in half precision": (torch.mm, [(halves, 70, 300), (halves, 300, 999)], 0.5),
    "mm of integers": (torch.mm, [(longs, 9, 100, 300), (longs, 9, 300, 100)], 0.4),
    "addmm": (torch.addmm, [(rand, 1900), (rand, 800, 300), (rand, 300, 1900)], 1.4),
    "bmm": (torch.bmm, [(rand, 8, 100, 200), (rand, 8, 200, 100)], 0.4),
    "baddbmm": (torch.baddbmm, [(rand, 100), (rand, 8, 100, 200), (rand, 8, 200, 100)], 0.4),
    "add": (torch.add, [(rand, 300, 400), (rand, 300, 400)], 0.25),
    "add a row": (torch.add, [(rand, 300, 400), (rand, 400)], 0.25),
    "add a column": (torch.add, [(rand, 300, 400), (rand, 300, 1)], 0.25),
    "compare columns": (lambda a: a[:, :300] > a[:, 100:], [(rand, 300, 400)], 0.25),
    "exp": (torch.exp, [(rand, 300, 401)], 0.25),
    "gelu": (F.gelu, [(rand, 300, 400)], 0.25),
    "relu of a transposed": (lambda a: F.relu(a.t()), [(rand, 300, 401)], 0.25),
    "where": (torch.where, [(signs, 300, 400), (rand, 300, 400), (rand, 300, 400)], 0.25),
    "add in place": (lambda a, b: a.add_(b), [(rand, 300, 400), (rand, 300, 400)], 0.25),
    "mul in place": (lambda a, b: a.mul_(b), [(rand, 300, 400), (rand, 300, 1)], 0.25),
    "copy": (lambda a, b: a.copy_(b), [(rand, 300, 400), (rand, 400)], 0.25),
    "columns in place": (lambda a: a[:, 50:].mul_(2), [(rand, 300, 400)], 0.25),
    "zero": (lambda a: a.zero_(), [(rand, 300, 400)], 0.25),
    "cast": (lambda a: a.to(torch.float64), [(rand, 300, 400)], 0.3),
    "sum": (lambda a: a.sum(-1), [(rand, 300, 400)], 0.25),
    "mean of two": (lambda a: a.mean((1, 2), keepdim=True), [(rand, 300, 20, 20)], 0.25),
    "amax": (lambda a: a.amax(-1), [(rand, 300, 400)], 0.25),
    "amax of integers": (lambda a: a.amax(0), [(longs, 9, 300, 400)], 0.25),
    "var": (lambda a: a.var(1), [(rand, 300, 400)], 0.25),
    "max": (lambda a: a.max(1), [(rand, 300, 400)], 0.25),
    "softmax": (lambda a: a.softmax(-1), [(rand, 300, 400)], 0.25),
    "log_softmax": (lambda a: a.log_softmax(1), [(rand, 40, 3000)], 0.25),
    "softmax of another": (lambda a: a.softmax(1), [(rand, 30, 40, 100)], 0.25),
    "cumsum": (lambda a: a.cumsum(0), [(rand, 300, 400)], 0.25),
    "topk": (lambda a: a.topk(3, dim=0), [(rand, 300, 400)], 0.25),
    "sort": (lambda a: a.sort(1, descending=True), [(rand, 300, 400)], 0.25),
    "layer_norm": (
        lambda a, w: F.layer_norm(a, (400,), w, w),
        [(rand, 300, 400), (rand, 400)],
        0.25,
    ),
    "group_norm": (lambda a, w: F.group_norm(a, 4, w, w), [(rand, 30, 16, 250), (rand, 16)], 0.25),
    "cat": (lambda a, b: torch.cat([a, b]), [(rand, 300, 400), (rand, 100, 400)], 0.25),
    "cat of columns": (
        lambda a, b: torch.cat([a, b], 1),
        [(rand, 300, 400), (rand, 300, 50)],
        0.25,
    ),
    "stack": (lambda a, b: torch.stack([a, b], -1), [(rand, 300, 400), (rand, 300, 400)], 0.25),
    "a table's gradient": (
        lambda g, i: aten.embedding_dense_backward(g, i, 50, -1, False),
        [(rand, 30, 20, 100), (longs, 50, 30, 20)],
        0.3,
    ),
    "convolution": (
        lambda a, w, b: F.conv2d(a, w, b),
        [(rand, 2, 8, 32, 32), (rand, 512, 8, 3, 3), (rand, 512)],
        7,
    ),
    "grouped convolution": (
        lambda a, w: F.conv1d(a, w, groups=4),
        [(halves, 32, 8, 500), (halves, 8, 2, 3)],
        0.25,
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [(rand, 4, 4, 500, 16), (rand, 4, 4, 300, 16), (rand, 4, 4, 300, 16)],
        0.25,
    ),
    "attention of many": (
        F.scaled_dot_product_attention,
        [(rand, 1, 1, 4000, 32), (rand, 1, 1, 300, 32), (rand, 1, 1, 300, 32)],
        1.1,
    ),
    "nll_loss of each": (
        lambda a, t: F.nll_loss(a, t, reduction="none"),
        [(rand, 300, 400), (longs, 400, 300)],
        0.25,
    ),
}


@pytest.mark.parametrize(("name", "strategy"), in_turn(CASES, ["lru", "genoa", "flow"], each=1))
def test_it_runs_in_blocks_with_the_bits_of_plain_torch(manage, name, strategy):
    function, operands, share = CASES[name]
    tensors = [make(*sizes) for make, *sizes in operands]
    nbytes = int(share * sum(t.nbytes for t in tensors))
    manager = manage(strategy, nbytes=nbytes)
    with torch.no_grad():
        plain, ours = both(manager, function, tensors)
    stats = manager.stats()
    assert stats["blocked_op_count"] == 1
    assert stats["blocked_tile_count"] > 1
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert 0 < stats["peak_resident_nbytes"] <= nbytes
    assert not differences(plain, ours)


def zeros_of_both_signs(*sizes):
    return torch.where(rand(*sizes) > 0, 0.0, -0.0)


ZEROS = {
    "maximum": lambda a, b: torch.maximum(a[:, ::2], b[:, 1::2]),
    "minimum of a row": lambda a, b: torch.minimum(a[:, ::2], b[0, 1::2]),
    "clamp": lambda a, b: torch.clamp(a[:, ::2], b[:, 1::2]),
    "neg": lambda a, b: -torch.complex(a, b)[:, ::2],
    "angle": lambda a, b: (-torch.complex(a + 1, b)[:, ::2]).angle(),
    "amax": lambda a, b: a.amax(0),
    "amin": lambda a, b: b.amin(0),
    "amax of rows": lambda a, b: a.amax(1),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_keep_their_signs(manage, name):
    manager = manage(nbytes=60_000)
    tensors = [zeros_of_both_signs(150, 406) for _ in range(2)]
    assert not differences(*both(manager, ZEROS[name], tensors))


@pytest.mark.parametrize(
    "function", [torch.add, torch.mul, torch.div, F.relu], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic_is_cut_for_all_that_zeros_tell(manage, function, dtype):
    """Also beside something that is expanded, and where a zero by a zero is no number."""
    manager = manage(nbytes=50_000)
    tensors = [rand(150, 406, dtype=dtype), rand(150, 1, dtype=dtype)][: 1 + (function != F.relu)]
    plain, ours = both(manager, lambda a, *b: function(a[:, ::2], *b), tensors)
    assert manager.stats()["blocked_op_count"] == 1
    assert not differences(plain, ours)


def test_what_is_written_in_place_is_written_for_all_who_look_at_it(manage):
    manager = manage(nbytes=100_000)
    plain, ours = rand(300, 400), None
    ours = manager.adopt(plain.clone())
    rows, plain_rows = ours[10:20], plain[10:20]
    version = ours._version
    ours.add_(1)
    plain.add_(1)
    assert manager.stats()["blocked_op_count"] == 1
    assert ours._version == version + 1
    assert not differences(plain_rows * 2, rows * 2)


def test_a_copy_that_shares_bytes_is_not_written(manage):
    manager = manage(nbytes=100_000)
    ours = manager.adopt(rand(300, 400))
    before = manager.release(ours.clone()).clone()
    twin = ours.clone()
    twin.mul_(3)
    assert manager.stats()["blocked_op_count"] == 1
    assert not differences(before, ours)
    assert not differences(before * 3, twin)


def test_what_was_made_on_the_accelerator_is_cut_too(manage):
    manager = manage(nbytes=450_000)
    small = rand(100, 500)
    plain, ours = both(manager, lambda a: (a + 1).expand(20, 100, 500) * 2, [small])
    assert manager.stats()["blocked_op_count"] == 1
    assert not differences(plain, ours)


def test_both_gradients_of_a_layer_are_cut(manage):
    manager = manage(nbytes=6_000_000)
    x, w = rand(800, 700), rand(2500, 700)

    def loss(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        F.relu(x @ w.t()).sum(-1).sum().backward()
        return x.grad, w.grad

    plain, ours = both(manager, loss, [x, w])
    stats = manager.stats()
    assert stats["blocked_operators"]["aten.mm.default"] == 3
    assert "aten.threshold_backward.default" in stats["blocked_operators"]
    assert not differences(plain, ours)


def test_the_host_runs_what_blocks_would_add_in_another_order(manage):
    """Two rows: MKL takes another way for them, by the number of columns."""
    manager = manage(nbytes=2_000_000)
    tensors = [rand(2, 500), rand(500, 2525)]
    plain, ours = both(manager, torch.mm, tensors)
    assert manager.stats()["host_fallback_operators"] == {"aten.mm.default": 1}
    assert not differences(plain, ours)
    with options(blocks="any"):
        _, ours = both(manager, torch.mm, tensors)
    stats = manager.stats()
    assert stats["host_fallback_operators"] == {"aten.mm.default": 1}
    assert stats["blocked_op_count"] == stats["reordered_op_count"] == 1
    assert "1 added in another order: mm.default 1x" in manager.report()
    torch.testing.assert_close(manager.release(ours), plain)


def doubles(*sizes):
    return rand(*sizes, dtype=torch.float64)


#: What is computed one by one, and to other bits where it begins elsewhere in memory.
ONE_BY_ONE = {
    "a row by matrices of odd rows": (torch.bmm, [(rand, 16, 1, 64), (rand, 16, 64, 65)]),
    "the same in double precision": (torch.bmm, [(doubles, 16, 3, 65), (doubles, 16, 65, 33)]),
    "one column": (torch.bmm, [(rand, 4, 40, 65), (rand, 4, 65, 1)]),
    "odd heads": (F.scaled_dot_product_attention, [(rand, 1, 5, 65, 15)] * 3),
    "samples in double precision": (F.conv1d, [(doubles, 9, 2, 7), (doubles, 3, 2, 5)]),
    "channels by the vector and a rest": (
        lambda x, w: F.conv1d(x, w, padding=1),
        [(rand, 3, 16, 9), (rand, 129, 16, 1)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_is_laid_out_as_its_tiles_are(manage, dtype):
    """Torch does not foretell that a convolution of channels last gives such a result."""
    x = rand(2, 320, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    tensors = [x, rand(640, 320, 1, 1, dtype=dtype)]
    manager = manage(nbytes=int(0.8 * tensors[1].nbytes))
    with options(blocks="any"):
        plain, ours = both(manager, F.conv2d, tensors)
    assert ours.stride() == plain.stride()
    assert manager.stats()["blocked_op_count"] == 1
    torch.testing.assert_close(manager.release(ours), plain)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_channels_that_lie_last_are_not_cut(manage, dtype, kernel):
    x = rand(1, 640, 16, 16, dtype=dtype).contiguous(memory_format=torch.channels_last)
    tensors = [x, rand(320, 640, kernel, kernel, dtype=dtype)]
    manager = manage(nbytes=int(x.nbytes + 0.7 * tensors[1].nbytes))
    plain, ours = both(manager, F.conv2d, tensors)
    assert not differences(plain, ours)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.2, 1.5])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_where_a_tile_begins_changes_no_bit(manage, name, share):
    function, operands = ONE_BY_ONE[name]
    tensors = [make(*sizes) for make, *sizes in operands]
    manager = manage(nbytes=int(share * sum(t.nbytes for t in tensors)))
    plain, ours = both(manager, function, tensors)
    assert not differences(plain, ours)


@pytest.mark.parametrize("is_by_vectors", [True, False])
def test_products_are_cut_where_they_begin_alike(manage, is_by_vectors):
    columns = 64 if is_by_vectors else 65
    manager = manage(nbytes=40_000)
    tensors = [rand(8, 3, 64), rand(8, 64, columns)]
    plain, ours = both(manager, torch.bmm, tensors)
    assert not differences(plain, ours)
    assert manager.stats()["blocked_op_count"] == is_by_vectors


@pytest.mark.parametrize("is_in_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_powers_of_two_keep_their_bits(manage, dtype, is_in_columns):
    """Kernels have ways of their own for them: tiles of 512 in double precision differ there."""
    a, b = rand(1024, 256, dtype=dtype), rand(256, 1024, dtype=dtype)
    b = rand(1024, 256, dtype=dtype).t() if is_in_columns else b
    nbytes = int(0.8 * (a.nbytes + b.nbytes + 1024 * 1024 * a.element_size()))
    plain, ours = both(manage(nbytes=nbytes), torch.mm, [a, b])
    assert not differences(plain, ours)


def test_another_processors_tiles_are_not_trusted(manage, monkeypatch):
    monkeypatch.setattr(probe, "_is_alike", lambda *_: False)
    probe._are_alike.cache_clear()
    manager = manage(nbytes=4_000_000)
    plain, ours = both(manager, torch.mm, [rand(1500, 500), rand(500, 2000)])
    assert not differences(plain, ours)
    assert manager.stats()["host_fallback_operators"] == {"aten.mm.default": 1}
    probe._are_alike.cache_clear()


@pytest.mark.parametrize("rows", [1, 65, 300])
@pytest.mark.parametrize("inner", [1, 8, 64, 100])
@pytest.mark.parametrize("columns", [1, 3, 64, 300])
def test_no_tile_in_half_precision_is_small_where_the_whole_is_not(rows, inner, columns):
    """Torch takes another kernel for few multiplications, which adds in another order."""
    shape = products.mm({"self": halves(rows, inner), "mat2": halves(inner, columns)})
    several = products.bmm({"self": halves(9, rows, inner), "mat2": halves(9, inner, columns)})
    as_linear = products.linear(
        {"input": halves(9, rows, inner), "weight": halves(columns, inner), "bias": None}
    )
    for cut, count in ((shape, 1), (several, 9), (as_linear, 9)):
        axes = cut.axes[: 2 if cut is shape else 3]
        finest = [
            min(end - start for start, end in axis.ranges(axis.step))
            if axis.keeps_bits
            else axis.extent
            for axis in (
                axis._replace(step=axis.exact_step, keeps_bits=True) if axis.exact_step else axis
                for axis in axes
            )
        ]
        is_small = count * rows * inner * columns <= products.SMALL_PRODUCT
        assert is_small or inner * math.prod(finest) > products.SMALL_PRODUCT


def test_tiles_are_compared_on_the_host_whatever_the_default_device_is():
    """Backward passes ask while a default device holds (`torch.autograd.backward`)."""
    probe._are_alike.cache_clear()
    expected = probe.tiles_are_alike(torch.float32, 64)
    probe._are_alike.cache_clear()
    with torch.device("meta"):
        assert probe.tiles_are_alike(torch.float32, 64) is expected


def test_half_precision_is_cut_where_tiles_have_the_bits_of_the_whole(manage, monkeypatch):
    """They have not on a processor with AMX, in bfloat16."""
    manager = manage(nbytes=100_000)
    tensors = [halves(512, 256), halves(256, 512)]
    assert not differences(*both(manager, torch.mm, tensors))
    assert manager.stats()["blocked_op_count"] == 1
    monkeypatch.setattr(products, "tiles_are_alike", lambda *_: False)
    for function in (torch.mm, lambda a, b: torch.nn.functional.linear(a, b.t())):
        manager = manage(nbytes=100_000)
        assert not differences(*both(manager, function, tensors))
        assert manager.stats()["blocked_op_count"] == 0
        assert manager.stats()["host_fallback_count"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_cut_where_nothing_else_fits(manage, dtype):
    manager = manage(nbytes=2_000_000)
    tensors = [rand(130, 9000, dtype=dtype), rand(9000, 130, dtype=dtype)]
    with options(blocks="any"):
        plain, ours = both(manager, torch.mm, tensors)
    stats = manager.stats()
    assert stats["blocked_op_count"] == stats["reordered_op_count"] == 1
    assert stats["host_fallback_count"] == 0
    assert stats["peak_resident_nbytes"] <= 2_000_000
    exact = tensors[0].double() @ tensors[1].double()
    error = (manager.release(ours).double() - exact).abs().max()
    assert ours.dtype is dtype
    last_bit = exact.abs().max() * torch.finfo(dtype).eps  # in double precision plain is `exact`
    assert error <= 1.5 * max((plain.double() - exact).abs().max(), last_bit)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0, 7])
def test_cross_entropy_over_a_large_vocabulary(manage, reduction, ignored):
    manager = manage(nbytes=150_000)
    target = longs(4000, 60)
    target[::7] = ignored

    def loss(x, target):
        x = x.requires_grad_()
        found = F.cross_entropy(x, target, reduction=reduction, ignore_index=ignored)
        found.sum().backward()
        return found.detach(), x.grad

    plain, ours = both(manager, loss, [rand(60, 4000), target])
    assert not differences(plain, ours)
    stats = manager.stats()
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert stats["blocked_op_count"] == 4


def test_a_target_that_is_no_column_is_the_program_s_own_mistake(manage):
    manager = manage(nbytes=150_000)
    x, target = manager.adopt(rand(60, 4000)), manager.adopt(longs(4000, 60) + 4000)
    with pytest.raises(IndexError, match="is out of bounds"):
        F.nll_loss(x, target)


def test_blocks_can_be_turned_off(manage):
    manager = manage(nbytes=100_000)
    with options(blocks="off"):
        plain, ours = both(manager, torch.neg, [rand(300, 400)])
    assert manager.stats()["blocked_op_count"] == 0
    assert manager.stats()["host_fallback_count"] == 1
    assert not differences(plain, ours)


def test_random_operators_are_never_cut(manage):
    manager = manage(nbytes=100_000)
    ours = manager.adopt(rand(300, 400))
    torch.manual_seed(1)
    dropped = F.dropout(ours, 0.5)
    torch.manual_seed(1)
    assert not differences(F.dropout(manager.release(ours.clone()), 0.5), dropped)
    assert "bernoulli" not in str(manager.stats()["blocked_operators"])


def test_no_tile_at_all_fits(manage):
    manager = manage(nbytes=1000)
    plain, ours = both(manager, lambda a: a.softmax(-1), [rand(4, 4000)])
    assert manager.stats()["host_fallback_count"] == 1
    assert not differences(plain, ours)
    story = "\n".join(map(str, manager.residency.books.log.tail(50)))
    assert "even in blocks: the smallest takes" in story


def test_the_copies_of_the_next_tile_go_on_while_one_is_computed(manage):
    """One after the other they would take as long as both."""
    size = 1024
    manager = manage(nbytes=6 << 20, flops_per_s={"default": 2e12})
    ours = [manager.adopt(rand(size, size)) for _ in range(2)]
    device = manager.residency.books.main
    began = device.now_ns()
    torch.mm(*ours)
    device.synchronize()
    stats = manager.stats()
    assert stats["blocked_tile_count"] > 3
    link_ns = stats["fetched_nbytes"] / device.spec.h2d_bytes_per_s * 1e9
    assert device.now_ns() - began < 0.9 * (link_ns + stats["compute_ns"])


@pytest.mark.parametrize("strategy", usual(["flow"], ["lru", "genoa"]))
def test_turns_are_waited_at_where_rows_are_long(manage, strategy):
    """320 of 512 rows and columns fit: 192 rows stay, and twice 64 columns pass by."""
    row = 2 * 2048
    manager = manage(nbytes=340 * row, strategy=strategy)
    plain, ours = both(manager, torch.mm, [halves(512, 2048), halves(2048, 512)])
    stats = manager.stats()
    assert stats["blocked_tile_count"] == 3 * 8
    # With two of each, 64 rows would stay, and all columns pass by eight times.
    assert stats["fetched_nbytes"] <= row * (3 * 512 + 512)
    assert stats["peak_resident_nbytes"] <= 340 * row
    assert not differences(plain, ours)


@pytest.mark.parametrize("number", range(1, 30, 3))
@pytest.mark.parametrize("kind", ["copy", "alloc"])
def test_a_copy_or_an_allocation_fails_in_between(manage, kind, number):
    manager = manage(nbytes=100_000)
    device = manager.residency.books.main
    plain = rand(300, 400)
    ours, other = manager.adopt(plain.clone()), manager.adopt(plain.clone())
    for more in range(3 if kind == "copy" else 1):
        device.fail_next(kind, number + more)
    ours.add_(other, alpha=2)
    assert not differences(plain.add(plain, alpha=2), ours)
    assert not differences(plain, other)


def test_a_program_s_own_mistake_is_raised(manage):
    manager = manage(nbytes=10_000)
    ours = [manager.adopt(rand(300, 40)), manager.adopt(rand(300, 41))]
    with pytest.raises(RuntimeError, match="must match"):
        ours[0] + ours[1]
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        ours[0] @ ours[1]
    index = manager.adopt(torch.full((3000,), 400))
    with pytest.raises(IndexError, match="index out of range"):
        ours[0].index_select(0, index)


def test_what_is_written_twice_is_refused_in_pieces_too(manage, monkeypatch):
    def by_rows(cut, tiling):
        return replace(tiling, lengths=(1, *tiling.lengths[1:]))

    monkeypatch.setattr(Blocks, "forced", staticmethod(by_rows))
    manager = manage(nbytes=100_000)
    ours, other = manager.adopt(rand(1, 40)), manager.adopt(rand(2, 40))
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        ours.expand(2, 40).copy_(other)


@pytest.mark.parametrize(
    "windows",
    [
        lambda x: x.unfold(0, 50, 40),
        lambda x: x.as_strided((100, 80), (50, 1)),
        lambda x: x.as_strided((80, 100), (1, 50)),
    ],
)
def test_windows_that_overlap_are_written_one_after_the_other(manage, windows):
    """Each is written upon what the one before has left; a piece was copied home over that."""

    def program(x):
        windows(x).mul_(1.5)
        return x

    manager = manage(nbytes=8_000)
    plain, ours = both(manager, program, [rand(6000)])
    assert torch.equal(bits(plain), bits(manager.release(ours)))
    assert manager.stats()["blocked_op_count"] == 0


def test_what_is_written_with_gaps_is_cut_all_the_same(manage):
    manager = manage(nbytes=8_000)
    plain, ours = both(manager, lambda x: x[:, 3:40].t().mul_(1.5), [rand(100, 60)])
    assert torch.equal(bits(plain), bits(manager.release(ours)))
    assert manager.stats()["blocked_op_count"] == 1


def test_the_report_says_what_ran_in_blocks(manage):
    manager = manage(nbytes=100_000)
    both(manager, torch.neg, [rand(300, 400)])
    count = manager.stats()["blocked_tile_count"]
    assert f"in blocks: 1 operators in {count} blocks: neg.default 1x" in manager.report()


def test_a_head_three_times_the_budget_writes_the_same_tokens(manage):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=24576, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[1, 17, 4, 33, 256, 12]])
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(prompt, **how)
    head: nn.Module = model.lm_head
    manager = manage("flow", nbytes=head.weight.nbytes // 3)
    model = manager.adopt(model)
    tokens = model.generate(manager.adopt(prompt.clone()), **how)
    assert not differences(plain, tokens)
    stats = manager.stats()
    assert stats["blocked_operators"] == {"aten.mm.default": 4}
    assert stats["host_fallback_count"] == stats["host_op_count"] == 0
    assert stats["parts_op_count"] == 4  # the words that are looked up


def test_layouts_that_can_be_read_in_two_ways_keep_their_strides_and_bits(manage):
    """By the strides of dimensions of one element the next kernel chooses its way."""
    x = torch.randn(8, 256, 32).as_strided((1, 32, 16, 16), (32, 1, 512, 32))
    one_channel = torch.randn(4, 1, 32, 64).contiguous(memory_format=torch.channels_last)
    permuted = torch.randn(32, 8, 32).permute(1, 2, 0)
    for plain, run in (
        (x, lambda t: F.group_norm(t * 2.0, 8)),
        (one_channel, torch.sigmoid),
        (permuted, lambda t: F.log_softmax(t, 1)),
    ):
        manager = manage("lru", nbytes=20_000)
        expected, found = run(plain), run(manager.adopt(plain))
        assert found.stride() == expected.stride()
        assert torch.equal(manager.release(found), expected)


def _permuted_and_expanded(dtype):
    x = torch.rand(3, 10, 11, 30).to(dtype).permute(0, 3, 1, 2)
    return x, torch.ones((), dtype=dtype).expand(3, 30, 10, 11)


LAID_OUT = {
    "mul": (
        lambda x, g: g * x,
        lambda: _permuted_and_expanded(torch.bfloat16),
        (8_000, 16_000, 30_000),
    ),
    "maximum": (
        lambda x, g: torch.maximum(g, x),
        lambda: _permuted_and_expanded(torch.float16),
        (8_000, 16_000, 30_000),
    ),
    "bmm of columns with gaps": (
        lambda x, y: torch.bmm(x, y.mT),
        lambda: (rand(3, 130, 30), rand(3, 384, 60)[..., ::2]),
        (90_000, 120_000, 200_000, 300_000),
    ),
    "add with alpha": (
        lambda x, y: torch.add(x, y, alpha=0.3),
        lambda: (rand(3, 7093), rand(3, 1)),
        (20_000, 40_000, 60_000, 100_000),
    ),
    "add of a row and a column": (
        lambda x, y: torch.add(x, y, alpha=0.3),
        lambda: (rand(1, 7093), rand(3, 1)),
        (20_000, 40_000, 60_000, 100_000),
    ),
    "maximum of a row and a column": (
        torch.maximum,
        lambda: (zeros_of_both_signs(1, 9001), zeros_of_both_signs(3, 1)),
        (30_000, 60_000, 100_000),
    ),
    "clamp of a column by a row": (
        torch.clamp,
        lambda: (zeros_of_both_signs(3, 1), *[zeros_of_both_signs(1, 9001)] * 2),
        (30_000, 60_000, 100_000),
    ),
}


@pytest.mark.parametrize("case", LAID_OUT)
def test_results_lie_and_are_rounded_as_kernels_do_it(manage, case):
    function, make, budgets = LAID_OUT[case]
    with disabled():
        torch.manual_seed(0)
        plain = make()
        expected = function(*plain)
    for budget in budgets:
        manager = manage("lru", budget)
        torch.manual_seed(0)
        found = manager.release(function(*map(manager.adopt, make())))
        with disabled():
            assert torch.equal(bits(expected), bits(found))
        assert expected.stride() == found.stride()
        manager.check()


def test_a_sparse_gradient_that_shares_an_operands_indices_survives_an_eviction(manage):
    def trained(adopt):
        torch.manual_seed(0)
        bag = adopt(nn.EmbeddingBag(200, 64, mode="mean", sparse=True))
        ids = adopt(torch.randint(0, 200, (40,)))
        offsets = adopt(torch.tensor([0, 5, 5, 20, 39]))
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        for _ in range(2):
            bag(ids, offsets).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bag.weight.detach()

    with disabled():
        expected = trained(lambda x: x)
    manager = manage("genoa", 25_600)
    assert torch.equal(expected, manager.release(trained(manager.adopt)))
    manager.check()


def test_what_takes_a_process_of_its_own(script, monkeypatch):
    """The first elementwise operator loads no compiler; where a part begins changes no bit.

    Torch foretells results in Python, and imports its compiler for it: a second and more. Parts as
    torchdiffeq's state, or flat parameters: MKL's own ways mind where an operand begins. And as
    attention's matrices, each of which begins elsewhere.
    """
    program = """
        import sys
        import torchTensorRef, torch
        from torch.nn import functional as F
        from torchTensorRef import disabled, tensorsManager
        torch.set_num_threads(1)  # several may share it otherwise than its tiles: on the host then
        tensorsManager.device, tensorsManager.budget = "sim", 100_000
        x = torch.ones(200, 200)
        y = torch.nn.functional.gelu(x + x * 2).mul_(x)
        assert y.dtype is torch.float32 and (x > y).dtype is torch.bool
        assert tensorsManager.stats()["blocked_op_count"] >= 4
        assert "torch._dynamo" not in sys.modules, "the compiler"
        del x, y

        tensorsManager.strategy = "lru"
        parts = [
            lambda x, w: F.linear(x[1:33].view(2, 16), w),
            lambda x, w: F.linear(w[:2], x[5:517].view(32, 16)),
            lambda x, _: F.scaled_dot_product_attention(*x[1:721].view(3, 1, 1, 20, 12)),
        ]
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensorsManager.budget = 1800 * dtype.itemsize
            for part in parts:
                with disabled():
                    x, w = torch.randn(3001).to(dtype), torch.randn(32, 16).to(dtype)
                    expected = part(x, w)
                found = part(tensorsManager.adopt(x.clone()), tensorsManager.adopt(w.clone()))
                assert torch.equal(expected, tensorsManager.release(found)), (dtype, part)

        # Each of several matrices, of an odd number of tokens: a tile's rows begin elsewhere in it.
        cases = [((33, 715, 17), 5, 0.31), ((5, 715, 16), 5, 0.32), ((5, 257, 64), 5, 0.61)]
        for size, columns, share in cases:
            with disabled():
                x, y = torch.rand(size), torch.rand(size[0], size[2], columns)
                expected = torch.bmm(x, y)
            tensorsManager.budget = int(x.nbytes * share) + 4096
            found = torch.bmm(tensorsManager.adopt(x.clone()), tensorsManager.adopt(y.clone()))
            assert torch.equal(expected, tensorsManager.release(found)), size
        """
    monkeypatch.delenv("MKL_CBWR", raising=False)  # which has it not mind
    done = python("-W", "ignore", script(program))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_threads_share_a_softmax_otherwise_than_its_tiles(manage, function, threads):
    manager = manage("lru", 100_000)
    torch.set_num_threads(threads)
    for size in ((33, 17, 64), (100, 16, 17), (257, 17, 17), (8, 100, 80)):
        for dim in (1, 2):
            with disabled():
                x = torch.rand(size)
                expected = function(x, dim)
            found = function(manager.adopt(x.clone()), dim)
            assert torch.equal(expected, manager.release(found)), (size, dim)
    manager.check()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_share_a_product_otherwise_than_its_tiles(manage, threads):
    """With MKL's compatible kernels, as tests have them: the probe sees that on this machine."""
    manager = manage("lru", 75_000)
    torch.set_num_threads(threads)
    for rows, inner, columns in ((3300, 9, 20), (2470, 16, 100), (1000, 64, 16)):
        with disabled():
            x, y = torch.rand(rows, inner), torch.rand(inner, columns)
            expected = [x @ y, x @ y.t().contiguous().t()]
        x, y = manager.adopt(x.clone()), manager.adopt(y.clone())
        found = [x @ y, x @ y.t().contiguous().t()]
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, manager.release(other)), (rows, inner, columns)
    manager.check()
