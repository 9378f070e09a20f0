"""The ready path: what takes it; its results, books and views are those of the slow path."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.memory import ledger as ledgers
from torchTensorRef.memory.budget import OutOfBudgetError
from torchTensorRef.operators import peaks
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.operators.table import ROWS

from ..support.differential import differences

F = nn.functional
AMPLE_NBYTES = 1 << 24


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Any:
    """A manager with room for everything."""
    manager = manage("lru", AMPLE_NBYTES)
    return manager


@contextmanager
def counted(manager: Any) -> Iterator[Counter[str]]:
    """Count the operators that run inside: those that are `ready`, and those that are `slow`."""
    found: Counter[str] = Counter()
    before = manager.stats()
    yield found
    after = manager.stats()
    for name in ("ready", "slow"):
        found[name] = after[f"{name}_op_count"] - before[f"{name}_op_count"]


def ready(manager: Any, *values: Any) -> list[Any]:
    """The same tensors, managed and on the accelerator."""
    return [
        manager.adopt(value.clone(), sole=True).toGPU()
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


def test_whether_two_are_equal_is_read_where_they_are(ample):
    x, nan = torch.rand(3, 4), torch.tensor([1.0, float("nan")])
    pairs = [(x, x.clone()), (x, x + 1), (x, x.double()), (x, x[:2]), (nan, nan.clone())]
    ours = [ready(ample, *pair) for pair in pairs]
    for (a, b), pair in zip(ours, pairs, strict=True):
        with counted(ample) as found:
            got = torch.equal(a, b)
        assert got is torch.equal(*pair)
        assert (found["ready"], found["slow"]) == (1, 0)


def without_room(residency: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no result find room on the accelerator; return the bytes of those that have asked."""
    asked: list[int] = []
    born = residency.born

    def refuse(tensor: Any, device: Any) -> Any:
        if device.is_host:
            return born(tensor, device)
        asked.append(tensor.nbytes)
        raise OutOfBudgetError(device.name, tensor.nbytes, 0, 0)

    monkeypatch.setattr(type(residency), "born", lambda _, *call: refuse(*call))
    return asked


def assert_equal(plain: Any, ours: Any) -> None:
    found = differences(plain, ours)
    assert not found, found


def q(*size: int) -> tuple[int, ...]:
    """Name the size of an operand: what is made while a module is imported is managed."""
    return size


def made(sizes: Any) -> list[Any]:
    """Make plain operands, the same for the same sizes."""
    torch.manual_seed(0)
    return [torch.rand(size) for size in sizes]


#: Name: function, operands, whether it runs as one; None where its parts but one are views, which
#: nobody counts. Each is called with plain tensors, too.
COMPOSITES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool | None]] = {
    "linear": (F.linear, (q(2, 3, 8), q(5, 8)), True),
    "linear, bias": (F.linear, (q(1, 1, 8), q(5, 8), q(5)), True),
    "linear, one row": (F.linear, (q(8), q(5, 8), q(5)), True),
    "linear, one number": (F.linear, (q(8), q(8)), True),
    "linear, strided": (lambda x, w: F.linear(x.transpose(0, 1), w), (q(3, 2, 8), q(5, 8)), True),
    "linear, empty": (F.linear, (q(0, 8), q(5, 8), q(5)), True),
    "matmul": (torch.matmul, (q(2, 3, 4, 5), q(2, 3, 5, 6)), True),
    "matmul, strided": (lambda a, b: a @ b.mT, (q(2, 3, 4, 5), q(2, 3, 6, 5)), True),
    "matmul, broadcast": (torch.matmul, (q(2, 3, 4, 5), q(5, 6)), None),
    "matmul, vector": (torch.matmul, (q(3, 4, 5), q(5)), None),
    "attention": (F.scaled_dot_product_attention, (q(1, 2, 3, 8),) * 3, True),
    "attention, mask": (
        F.scaled_dot_product_attention,
        (q(1, 2, 3, 8), q(1, 2, 5, 8), q(1, 2, 5, 8), q(1, 1, 3, 5)),
        True,
    ),
    "attention, causal": (
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.3),
        (q(1, 2, 3, 8),) * 3,
        True,
    ),
    "attention, grouped": (
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, enable_gqa=True),
        (q(1, 4, 3, 8), q(1, 2, 5, 8), q(1, 2, 5, 8)),
        True,
    ),
    # Torch 2.15 makes it one of four dimensions, before and not after it comes to us.
    "attention, three dimensions": (F.scaled_dot_product_attention, (q(2, 3, 8),) * 3, None),
    "attention, dropout": (
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, dropout_p=0.5),
        (q(1, 2, 3, 8),) * 3,
        False,
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (q(2, 3, 8), q(8), q(8)), True),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (q(2, 4, 3), q(4)), True),
    "batch norm": (lambda x, m: F.batch_norm(x, m, m * m), (q(2, 4, 3), q(4)), None),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), (q(2, 3, 8), q(8)), True),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_run_as_one(ample: Any, name: str, inference: bool) -> None:
    function, sizes, as_one = COMPOSITES[name]
    operands = made(sizes)
    ours = ready(ample, *operands)
    with torch.inference_mode(inference), torch.no_grad():
        torch.manual_seed(1)
        expected = function(*operands)
        torch.manual_seed(1)
        with counted(ample) as found:
            got = function(*ours)
        assert as_one is None or (found["ready"] == 1) == as_one
        assert_equal(expected, got)
        assert got.is_inference() == inference
        ample.check()
        ample.bring_all_home()
        assert_equal(expected, got)


def test_what_passes_counts_against_the_budget(manage: Callable[..., Any]) -> None:
    operands = made((q(1, 2, 32, 8),) * 3)
    scarce_nbytes, peaks_nbytes = 3 * operands[0].nbytes + 8_000, []
    for nbytes in (AMPLE_NBYTES, scarce_nbytes):
        manager = manage("lru", nbytes)
        ours = ready(manager, *operands)
        with torch.no_grad():
            assert_equal(
                F.scaled_dot_product_attention(*operands), F.scaled_dot_product_attention(*ours)
            )
        peaks_nbytes.append(manager.stats()["peak_resident_nbytes"])
    assert peaks_nbytes[0] > scarce_nbytes >= peaks_nbytes[1]


@pytest.mark.parametrize("where", ["gradients", "autocast", "vmap", "jvp", "mode"])
def test_composites_are_taken_apart_where_somebody_looks(ample: Any, where: str) -> None:
    x, w = made((q(4, 3, 8), q(5, 8)))

    def run(x: Any, w: Any) -> Any:
        if where == "gradients":
            w = w.detach().requires_grad_()
            return torch.autograd.grad(F.linear(x, w).sum(), w)
        if where == "autocast":
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                return F.linear(x, w)
        if where == "vmap":
            return torch.vmap(lambda row: F.linear(row, w))(x)
        if where == "jvp":
            return torch.func.jvp(lambda w: F.linear(x, w), (w,), (w,))
        with torch.no_grad(), torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            F.linear(x, w)
        return torch.tensor(counter.get_total_flops())

    assert_equal(run(x, w), run(*ready(ample, x, w)))


@pytest.mark.filterwarnings("ignore:.*beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_composites_with_operands_of_other_kinds(ample: Any) -> None:
    w, x = made((q(8, 8), q(3, 8)))
    [ours] = ready(ample, w)
    nested = torch.nested.nested_tensor([x, x[:2]])
    sparse = x.relu().sub(0.5).relu().to_sparse()
    with torch.no_grad():
        expected, got = F.linear(nested, w), F.linear(nested, ours)
        assert_equal(list(expected.unbind()), [ample.release(part) for part in got.unbind()])
        assert_equal(torch.matmul(sparse, w), ample.release(torch.matmul(sparse, ours)))
        assert_equal(F.linear(x, w), F.linear(x, ours))


def test_composites_run_in_parts_while_something_is_away(ample: Any) -> None:
    x, w = made((q(2, 3, 8), q(5, 8)))
    there, away = ample.adopt(x.clone()).toGPU(), ample.adopt(w.clone())
    with torch.no_grad():
        for expected in (False, True):
            with counted(ample) as found:
                got = F.linear(there, away)
            assert (found == {"ready": 1, "slow": 0}) == expected
            assert_equal(F.linear(x, w), got)


# -- several results, lists, conditions ------------------------------------------------------------


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "several results": (lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5), (q(3, 8),)),
    "some results": (
        lambda x, y: (
            torch.ops.aten.convolution_backward(
                y, x, torch.ones(2, 3, 1), None, [1], [0], [1], False, [0], 1, [False, True, False]
            )[1]
            + 0 * x.sum()
        ),
        (q(1, 3, 5), q(1, 2, 5)),
    ),
    "list of operands": (lambda x, y: torch.cat([x, y, x]), (q(3, 8), q(2, 8))),
    "lists": (lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2), (q(3, 8), q(3, 8))),
    "lists written": (
        lambda x, y: (torch._foreach_addcmul_([x, y], [y, y], [x, x], 0.5), x, y),
        (q(3, 8), q(3, 8)),
    ),
    "lists by a number": (lambda x, y: (torch._foreach_mul_([x, y], 3.0), x, y), (q(3), q(3))),
    "new strides": (lambda x: x.t().contiguous(), (q(256, 256),)),
    "same strides": (lambda x: x.clone().mul_(2), (q(256, 256),)),
    "another dtype": (lambda x: x.double(), (q(256, 256),)),
    "no dropout": (lambda x: F.dropout(x, 0.5, training=False), (q(3, 8),)),
    "sizes of nothing": (lambda x: x.view([]), (q(1),)),
    "sizes": (lambda x: (x.view(2, 12), x.view(24, 1), x.view(-1)), (q(3, 8),)),
    "view of another dtype": (lambda x: x.view(torch.int32), (q(3, 8),)),
    "offset": (lambda x: (x[1:, ::2], x[:, 3], x[2:, 1:2]), (q(3, 8),)),
    "strides of one": (lambda x: (x[:, :1] + 1, x.t()[:1] * 2, x[:0].neg()), (q(3, 8),)),
    "batch norm": (lambda x, m, v, w: F.batch_norm(x, m, v, w), (q(2, 4, 3), q(4), q(4), q(4))),
    "instance norm": (lambda x, w: F.instance_norm(x, weight=w), (q(2, 4, 3), q(4))),
    "parts": (lambda x: (*torch.unsafe_chunk(x, 2), x.unsafe_split(2, 1)[1]), (q(4, 6),)),
    "silu backward": (torch.ops.aten.silu_backward.default, (q(3, 8), q(3, 8))),
    "transforms": (lambda x: torch.fft.irfft2(torch.fft.fft2(torch.fft.rfft2(x))), (q(4, 6),)),
    "reductions": (lambda x: (x.mean(-1, keepdim=True), x.sum([0, 1]), x.argmax()), (q(3, 8),)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_ready_operands(ample: Any, name: str) -> None:
    function, sizes = OPERATORS[name]
    plain = made(sizes)
    ours = ready(ample, *plain)
    with torch.no_grad():
        expected, got = function(*plain), function(*ours)
        assert_equal(expected, got)
        ample.check()
        ample.bring_all_home()
        assert_equal([expected, plain], [got, ours])


@pytest.mark.parametrize(
    "name",
    [
        "several results",
        "list of operands",
        "lists",
        "lists written",
        "new strides",
        "sizes",
        "batch norm",
        "instance norm",
        "parts",
        "silu backward",
        "transforms",
    ],
)
def test_they_take_the_ready_path(ample: Any, name: str) -> None:
    function, sizes = OPERATORS[name]
    ours = ready(ample, *made(sizes))
    with torch.no_grad():
        function(*ours)  # what was adopted is written for the first time
        with counted(ample) as found:
            function(*ours)
    assert found["slow"] == 0
    assert found["ready"] or name in ("sizes", "parts")  # those are views


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_batch_norm_writes_its_statistics_only_in_training(ample: Any, mode: Any) -> None:
    plain, (x,) = torch.nn.BatchNorm1d(3), made((q(4, 3),))
    ours = ample.adopt(copy.deepcopy(plain))
    there = ready(ample, x)[0]
    block = ours.running_mean._ttr_block
    host = ample.residency.books.host
    for training in (False, True, False):
        plain.train(training), ours.train(training)
        with mode():
            assert_equal(plain(x), ours(there))
        assert (block.readable_on(host) is None) == training
        assert_equal(list(plain.buffers()), list(ours.buffers()))
        ample.bring_all_home()


def test_what_an_operator_makes_beside_what_it_writes_goes_home_for_want_of_room(
    ample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot run again: its statistics would be written twice."""
    plain, (x,) = torch.nn.BatchNorm1d(3), made((q(4, 3),))
    ours, (there,) = ample.adopt(copy.deepcopy(plain)), ready(ample, x)
    with torch.no_grad():
        for _ in range(2):  # what was adopted is written for the first time
            assert_equal(plain(x), ours(there))
        residency = ample.residency
        full = without_room(residency, monkeypatch)
        with counted(ample) as found:
            expected, got = plain(x), ours(there)
    assert full
    assert found["slow"] == 0
    assert got._ttr_block.readable_on(residency.books.host) is not None
    monkeypatch.undo()
    assert_equal([expected * 2, *plain.buffers()], [got * 2, *ours.buffers()])
    ample.check()


def test_labels_are_asked_for_where_they_differ(
    ample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real accelerator, what may make its result anywhere is looked at in the slow path."""
    (x,) = ready(ample, torch.rand(3, 8))
    anywhere = dataclasses.replace(plan_of(torch.ops.aten.neg.default), minds_labels=True)
    monkeypatch.setattr(torch.ops.aten.neg.default, "_ttr_plan", anywhere)
    assert plan_of(torch.ops.aten.linspace.Tensor_Tensor).minds_labels
    found = []
    for differ in (False, True, False):
        monkeypatch.setattr(ample.residency.books, "labels_differ", differ)
        with counted(ample) as counts, torch.no_grad():
            torch.zeros_like(x), x.to("cpu", torch.float64), torch.neg(x)
        found.append((counts["ready"], counts["slow"]))
    assert found == [(3, 0), (2, 1), (3, 0)]


def test_training_takes_the_ready_path(ample: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = ample.adopt(nn.Sequential(layer, nn.LayerNorm(16), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = ample.adopt(torch.rand(2, 5, 16)).toGPU()

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step(), step()
    with counted(ample) as found:
        step()
    assert found["slow"] <= 2
    assert found["ready"] > 50


# -- books -----------------------------------------------------------------------------------------


def test_exact_operators_take_the_bytes_of_their_elements() -> None:
    """The ledger counts what they make by its elements, without a look at the storage."""
    a, b, ids = torch.rand(3, 4), torch.rand(4, 5), torch.tensor([[1, 2]])
    aten, c, d = torch.ops.aten, torch.rand(2, 3, 4), torch.rand(2, 4, 5)
    calls: dict[Any, tuple[Any, ...]] = {
        aten.mm.default: (a, b),
        aten.bmm.default: (c, d),
        aten.addmm.default: (torch.rand(5), a, b),
        aten.baddbmm.default: (torch.rand(5), c, d),
        aten.linear.default: (c.transpose(0, 1), torch.rand(5, 4), torch.rand(5)),
        aten.mean.dim: (c, [1], False),
        aten.sum.dim_IntList: (c.transpose(0, 2), [0], True),
        aten.argmax.default: (c, 1),
        aten.embedding.default: (a, ids),
        aten.cat.default: ([a, a.t().reshape(3, 4)],),
        aten._fft_c2c.default: (torch.complex(c, c).transpose(0, 2), [1, 2], 0, True),
        aten._fft_c2r.default: (torch.complex(c, c), [0, 2], 0, 6),
        aten._fft_r2c.default: (c.transpose(1, 2), [2, 0], 0, False),
    }
    assert set(calls) == {row.op for row in ROWS if row.is_exact}
    for op, args in calls.items():
        made_of = op(*args)
        assert made_of.untyped_storage().nbytes() == made_of.nbytes, op


def test_what_is_borne_is_counted_until_it_dies(ample: Any) -> None:
    ledger = ample.residency.books.ledgers[ample.residency.books.main]
    x = ample.adopt(torch.rand(64, 64)).toGPU()
    with torch.no_grad():
        before = ledger.resident_nbytes
        results = [x + i for i in range(5)]
        results.append(results[0].t() @ x)
        assert ledger.resident_nbytes == before + 6 * x.nbytes
        assert results[1]._ttr_block.replicas  # settled: counted once
        ample.check()
        assert ledger.both_sums() == (before + 6 * x.nbytes,) * 2
        del results
        gc.collect()
        ample.residency.books.bury()
        assert ledger.resident_nbytes == before


def test_a_result_borne_while_another_is_borne_is_counted(
    ample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making objects can collect garbage, whose finalizers may run operators."""
    ledger = ample.residency.books.ledgers[ample.residency.books.main]
    monkeypatch.setattr(ledger, "_is_witnessed", False)
    results, blocks, make = [torch.rand(4), torch.rand(8)], [], ledgers.Block

    def make_and_bear_another(*args: Any) -> Any:
        if len(results) == 1:
            blocks.append(ledger.bear_if_room(results.pop(), 32, 0))
        return make(*args)

    before = ledger.resident_nbytes
    monkeypatch.setattr(ledgers, "Block", make_and_bear_another)
    blocks.append(ledger.bear_if_room(results.pop(0), 16, 0))
    assert ledger.both_sums() == (before + 48,) * 2
    blocks.clear()
    ample.residency.books.bury()
    assert ledger.resident_nbytes == before


def test_threads_bear_and_settle_at_once(ample: Any) -> None:
    x = ample.adopt(torch.rand(8, 8)).toGPU()
    ledger, done = ample.residency.books.ledgers[ample.residency.books.main], threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for i in range(400):
                    assert (x + i - i).shape == (8, 8)
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        try:
            while not done.is_set():
                with ample.residency.books.lock:
                    ledger.replicas()
        except BaseException as error:
            errors.append(error)

    looker = threading.Thread(target=look)
    workers = [threading.Thread(target=work) for _ in range(3)]
    for thread in (looker, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    looker.join()
    assert not errors
    ample.check()


def test_a_table_is_fetched_when_it_is_read_again_and_there_is_room(
    manage: Callable[..., Any],
) -> None:
    table = torch.rand(100, 16)
    for nbytes, comes in ((AMPLE_NBYTES, True), (table.nbytes + 500, False)):
        manager = manage("lru", nbytes)
        ours, ids = manager.adopt(table.clone()), manager.adopt(torch.tensor([[3, 5]]))
        with torch.no_grad():
            for _ in range(6):
                assert_equal(F.embedding(torch.tensor([[3, 5]]), table), F.embedding(ids, ours))
                manager.check()
        assert (manager.ownership.where(ours._ttr_block) is manager.residency.books.main) == comes
        del ours, ids


@pytest.mark.parametrize("share", range(0, 21, 2))
def test_what_passes_and_the_result_fit_the_budget_together(
    manage: Callable[..., Any], share: int
) -> None:
    """The device has more room than the budget, so only the budget keeps the peak down."""
    manager = manage("lru", AMPLE_NBYTES)
    values = [torch.rand(2, 4, 12, 16) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*values)
    taken_nbytes = peaks.attention(*values)
    assert taken_nbytes is not None
    held_nbytes = sum(value.nbytes for value in values)
    manager.budget = limit_nbytes = held_nbytes + taken_nbytes * share // 16
    ours = ready(manager, *values)
    manager.reset_stats()
    with torch.no_grad():
        assert_equal(expected, F.scaled_dot_product_attention(*ours))
    assert manager.stats()["peak_resident_nbytes"] <= limit_nbytes
    manager.check()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("room", ["ready", "slow"])
def test_fresh_results_that_share_memory_share_a_block(manage, mode, room):
    """One of them took the bytes of the others along when it was evicted."""
    mask, rows, bias = torch.rand(9, 9) > 0.5, torch.rand(2, 5, 12), torch.rand(12)
    split = torch.ops.aten._transform_bias_rescale_qkv  # three views of what it has made
    manager = manage("lru", AMPLE_NBYTES)
    our_mask, *ours = ready(manager, mask, rows, bias)
    if room == "slow":
        manager.bring_all_home()
        manager.strategy = "genoa"
    with mode():
        found = [*torch.where(our_mask), *split(*ours, num_heads=2)]
        wanted = [*torch.where(mask), *split(rows, bias, num_heads=2)]
    assert len({result._ttr_block.block_id for result in found}) == 2
    del found[1]  # the others have its bytes, too
    manager.bring_all_home()
    assert_equal([wanted[0], *wanted[2:]], found)


def test_what_is_written_before_another_in_a_list_is_refused_has_another_version(ample):
    """Else a gradient is worked out from what was saved for it and is not there any more."""
    leaf, x, single = ready(ample, torch.rand(4), torch.rand(4), torch.rand(1))
    before = x.tolist()
    product = leaf.requires_grad_() * x
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        torch._foreach_add_([x, single.expand(4)], 1.0)
    assert x.tolist() == [value + 1 for value in torch.tensor(before)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
