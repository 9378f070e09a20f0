"""The watched path: operators that lack nothing but that the strategy hears of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.interception.ready_path import SLOW
from torchTensorRef.interception.slow_path import SlowPath
from torchTensorRef.interception.watched_path import _run_opened
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.strategies.lru import LeastRecentlyUsed
from torchTensorRef.strategy import Access

from ..support.differential import differences

F = nn.functional
aten = torch.ops.aten
ROOM = 64 << 10


class Listener(LeastRecentlyUsed):
    """LRU that writes down what it is told."""

    name = "listener"
    watches_accesses = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_access(self, access: Access) -> None:
        self.heard.append(("use", access))

    def on_birth(self, block_id: int, nbytes: int, place: int) -> int:
        self.heard.append(("birth", block_id))
        return 1000

    def uses(self) -> list[Access]:
        return [what for kind, what in self.heard if kind == "use"]


@pytest.fixture
def listener(manage: Callable[..., Any]) -> Any:
    """A manager under pressure, and the strategy that listens."""
    strategy = Listener()
    manager = manage(strategy, ROOM)
    # More than there is room for: from now on memory is short.
    filler = [manager.adopt(torch.zeros(ROOM // 16)).toGPU() for _ in range(6)]
    assert manager.residency.books.is_pressed
    yield manager, strategy
    del filler


def weight_on(manager: Any, *shape: int) -> Any:
    """A parameter on the accelerator."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.rand(shape), requires_grad=False)
    weight = manager.adopt(module).weight.toGPU()
    assert weight._ttr_block.is_persistent
    return weight


def ran(manager: Any, function: Callable[[], Any]) -> tuple[Any, int, int]:
    """Run something; return its result, and how many operators were ready and slow."""
    before = manager.stats()
    result = function()
    after = manager.stats()
    ready, slow = (after[f"{k}_op_count"] - before[f"{k}_op_count"] for k in ("ready", "slow"))
    return result, ready, slow


def test_what_is_there_takes_no_phases_and_is_told_of_once(listener):
    manager, strategy = listener
    weight, x = weight_on(manager, 16, 16), manager.adopt(torch.rand(4, 16)).toGPU()
    x = x + 0  # a result, of which nothing has to be decided
    for _ in range(3):
        strategy.heard.clear()
        _, ready, slow = ran(manager, lambda: torch.mm(x, weight))
        assert (ready, slow) == (1, 0)
        told = [access.block_id for access in strategy.uses()]
        assert sorted(told) == sorted({x._ttr_block.block_id, weight._ttr_block.block_id})
        assert all(access.was_resident for access in strategy.uses())
        assert weight._ttr_block.ready is None  # the next use is heard of as well


def test_uses_are_told_before_results_are_there(listener):
    manager, strategy = listener
    weight, x = weight_on(manager, 16, 16), manager.adopt(torch.rand(4, 16)).toGPU() + 0
    strategy.heard.clear()
    kept = [torch.mm(x, weight) for _ in range(3)]
    kinds = [kind for kind, _ in strategy.heard]
    # Each operator tells of its two operands, and before that of the result of the one before.
    assert kinds[-8:] == ["use", "use", "birth", "use", "use", "birth", "use", "use"]
    assert kept[0]._ttr_block.block_id in [what for kind, what in strategy.heard if kind == "birth"]


def test_what_is_there_and_at_home_is_written_without_phases(listener, monkeypatch):
    manager, strategy = listener
    weight = weight_on(manager, 16, 16)
    before = weight.tolist()
    assert not weight._ttr_block.owned
    monkeypatch.setattr(SlowPath, "run", lambda path: pytest.fail(f"{path.plan.name} was slow"))
    strategy.heard.clear()
    with torch.no_grad():
        weight.mul_(2)
        weight.add_(1)
    assert [access.is_write for access in strategy.uses()] == [True, True]
    monkeypatch.undo()
    assert weight.tolist() == (torch.tensor(before) * 2 + 1).tolist()
    manager.check()


def test_a_result_that_counts_as_what_stays_at_its_first_use_takes_no_phases(listener, monkeypatch):
    manager, strategy = listener
    monkeypatch.setattr(strategy, "on_birth", lambda *_: 0)
    weight, x = weight_on(manager, 16, 16), manager.adopt(torch.rand(4, 16)).toGPU() + 0
    made = torch.mm(x, weight)
    assert not made._ttr_block.is_persistent
    monkeypatch.setattr(SlowPath, "run", lambda path: pytest.fail(f"{path.plan.name} was slow"))
    torch.mm(made, weight)
    assert made._ttr_block.is_persistent
    assert made._ttr_block.ready is weight._ttr_block.ready is None


def test_operands_and_result_count_as_used_by_the_same_operator(listener):
    manager, _ = listener
    weight, x = weight_on(manager, 16, 16), manager.adopt(torch.rand(4, 16)).toGPU() + 0
    y = torch.mm(x, weight)
    assert x._ttr_block.last_use == weight._ttr_block.last_use == y._ttr_block.last_use


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        (aten.linear.default, aten.addmm.default),
        (aten.linear.default, aten.mm.default),
        (aten.matmul.default, aten.bmm.default),
        (aten.layer_norm.default, aten.native_layer_norm.default),
        (aten.group_norm.default, aten.native_group_norm.default),
        (
            aten.scaled_dot_product_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ),
    ],
    ids=str,
)
def test_a_composite_operator_looks_like_what_it_is_made_of(whole, parts):
    assert plan_of(whole).kind == plan_of(parts).kind
    assert plan_of(whole).number != plan_of(parts).number


def test_a_layer_looks_the_same_whole_and_in_parts(listener):
    manager, strategy = listener
    weight, bias = weight_on(manager, 16, 16), weight_on(manager, 16)
    x = manager.adopt(torch.rand(4, 16)).toGPU() + 0

    def told() -> list[tuple[int, int, int]]:
        strategy.heard.clear()
        with torch.no_grad():
            F.linear(x, weight, bias)
        return [(a.block_id, a.nbytes, a.struct) for a in strategy.uses()]

    whole = told()
    assert len(whole) == 3
    weight.toCPU()  # it has to be fetched: the operator takes the slow path, in its parts
    assert told() == whole


def test_a_plain_tensor_that_is_written_is_left_to_the_slow_path(listener):
    manager, _ = listener
    weight, plain = weight_on(manager, 8, 8), torch.zeros(8, 8)
    expected = plain.clone().addcmul_(weight.detach().cpu().clone(), torch.ones(8, 8), value=0.5)
    ours = plain.addcmul_(weight, manager.adopt(torch.ones(8, 8)), value=0.5)
    assert not differences(expected, ours)


def test_a_device_that_was_exchanged_meanwhile_is_left_to_the_slow_path(listener, monkeypatch):
    manager, _ = listener
    weight, x = weight_on(manager, 16, 16), manager.adopt(torch.rand(4, 16)).toGPU() + 0
    residency = manager.residency
    monkeypatch.setattr(residency.readiness, "open_watched", pytest.fail)
    blocks = [x._ttr_block, weight._ttr_block]
    gone = residency.books.host  # any device that is not the main one by now
    plan = plan_of(aten.mm.default)
    operands = dict.fromkeys(blocks)
    assert _run_opened(plan, (x, weight), {}, residency, gone, operands, [], blocks[1:]) is SLOW


def test_what_fits_again_for_long_is_watched_no_more(listener):
    manager, strategy = listener
    books, weight = manager.residency.books, weight_on(manager, 16, 16)
    x = manager.adopt(torch.rand(4, 16)).toGPU() + 0
    expected = x.cpu() @ weight.cpu().T
    books.calm_count = 50
    for _ in range(60):
        F.linear(x, weight)
    assert not books.is_pressed
    F.linear(x, weight)  # opens it
    strategy.heard.clear()
    _, ready, slow = ran(manager, lambda: [F.linear(x, weight) for _ in range(10)])
    assert (ready, slow) == (10, 0)
    assert not strategy.uses()

    filler = [manager.adopt(torch.zeros(ROOM // 16)).toGPU() for _ in range(6)]
    assert books.is_pressed
    strategy.heard.clear()
    out = F.linear(x, weight)
    assert [access.block_id for access in strategy.uses()].count(weight._ttr_block.block_id) == 1
    assert not differences(out, expected)
    del filler
    for _ in range(60):
        F.linear(x, weight)
    assert books.is_pressed  # it has been wrong once: it takes twice as long
    for _ in range(60):
        F.linear(x, weight)
    assert not books.is_pressed


def test_other_devices_know_nothing_of_pressure_before(listener, manage):
    manager, _ = listener
    books, before = manager.residency.books, manager.residency.books.calm_count
    books.calm_count *= 2  # as after it was wrong
    manage(Listener(), ROOM)
    assert (books.is_pressed, books.calm_count) == (False, before)


def test_what_is_computed_at_home_is_a_want_of_room(listener):
    manager, _ = listener
    books, weight = manager.residency.books, weight_on(manager, 16, 16)
    x = manager.adopt(torch.rand(4, 16)).toGPU() + 0
    books.calm_count = 50
    for _ in range(60):
        F.linear(x, weight)
        manager.residency.note_operator(books.host, (), (), 1, instead_of=books.main)
    assert books.is_pressed


def test_a_composite_operator_that_comes_in_parts_is_told_of_by_these_only(listener):
    """Its weight wants gradients, and rows do not lie in a row: torch asks the weight itself."""
    manager, strategy = listener
    weight = weight_on(manager, 16, 16).requires_grad_().toCPU()
    x = manager.adopt(torch.rand(4, 16, 3)).toGPU() + 0
    strategy.heard.clear()
    with torch.no_grad():
        out = F.linear(x.transpose(1, 2), weight)
    used = [access.block_id for access in strategy.uses()]
    assert used.count(weight._ttr_block.block_id) == 1
    assert not differences(out, F.linear(x.cpu().transpose(1, 2), weight.cpu()).detach())


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "at home"])
def test_tensors_in_keywords_are_told_of_with_the_others(listener: Any, is_there: bool) -> None:
    """The ready path takes no such call: what is told of the others before it, is told alone."""
    manager, strategy = listener
    query = weight_on(manager, 1, 2, 4, 8)
    mask = weight_on(manager, 1, 2, 4, 4)
    query = query if is_there else query.toCPU()
    strategy.heard.clear()
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    out, _ = attend(query, query, query, attn_mask=mask)
    used = [access.block_id for access in strategy.uses()]
    assert used == [query._ttr_block.block_id, mask._ttr_block.block_id]
    plain = query.cpu()
    assert not differences(out, attend(plain, plain, plain, attn_mask=mask.cpu())[0])


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "at home"])
def test_a_plain_number_is_written(listener: Any, is_there: bool) -> None:
    """What a formula makes for the gradient of a single number is one, and is filled."""
    manager, _ = listener
    weight = weight_on(manager)
    if not is_there:
        weight = weight.toCPU()
    plain = torch.zeros(())
    out = aten.add.out(weight, 1.0, out=plain)
    assert out is plain
    assert plain.item() == weight.item() + 1
    index = manager.adopt(torch.zeros((), dtype=torch.int64)).toGPU()
    same = torch.zeros(()).scatter_(0, index, weight)
    assert same.item() == weight.item()
    manager.check()


def test_gradients_of_single_numbers_under_pressure(listener: Any) -> None:
    manager, _ = listener
    for function in (torch.mode, torch.median, torch.cummax):
        plain = torch.rand(()).requires_grad_()
        ours = manager.adopt(plain.detach().clone()).toGPU().requires_grad_()
        expected = torch.autograd.grad(function(plain, 0)[0], plain)
        assert differences(expected, torch.autograd.grad(function(ours, 0)[0], ours)) == []


@pytest.mark.parametrize("strategy", ["lru", "genoa"])
def test_what_does_not_fit_runs_at_home_each_time(
    manage: Callable[..., Any], strategy: str
) -> None:
    """Its parts found ready what had been fetched for it, and gave that up for their results."""
    weight, x = torch.rand(64, 64), torch.rand(8, 64)
    manager = manage(strategy, weight.nbytes + 2 * x.nbytes - 1)
    ours = manager.adopt(weight.clone()), manager.adopt(x.clone())
    for count in range(1, 4):
        assert not differences(x @ weight, ours[1] @ ours[0])
        assert manager.stats()["host_fallback_count"] == count


def test_where_all_is_given_back_a_composite_operator_runs_as_one(
    manage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, took_phases = manage("genoa"), []
    weight, bias, x = torch.rand(64, 32), torch.rand(64), torch.rand(8, 32)
    ours = [manager.adopt(one.clone()) for one in (x, weight, bias)]
    with monkeypatch.context() as patch:
        patch.setattr(SlowPath, "run", lambda path: took_phases.append(path.plan.name))
        out = F.linear(*ours)
    stats = manager.stats()
    assert (took_phases, stats["slow_op_count"], stats["resident_nbytes"]) == ([], 1, 0)
    assert not differences(F.linear(x, weight, bias), out)
