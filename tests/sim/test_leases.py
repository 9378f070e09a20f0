"""Leases: uses that a strategy expects are not told one by one, and none is lost."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.interception.ready_path import SLOW
from torchTensorRef.interception.slow_path import SlowPath
from torchTensorRef.interception.watched_path import run_watched
from torchTensorRef.memory import leases
from torchTensorRef.memory.strategy_feed import StrategyFeed
from torchTensorRef.operators.plan import plan_of

from ..support.differential import differences
from ..support.sweeps import usual
from .test_watched_path import ROOM, Listener, ran, weight_on


class Teller(Listener):
    """One that says what it expects."""

    name = "teller"

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[int] = []

    def prefetch(self, device: Any, resident: Any) -> Any:
        return ()

    def expects(self, device: Any) -> list[int]:
        return self.expected


class World:
    """Weights on the accelerator under pressure, and what to multiply by them."""

    def __init__(self, manage: Callable[..., Any], count: int = 4, **spec: Any) -> None:
        self.strategy = Teller()
        self.manager = manage(self.strategy, ROOM, **{"decision_nbytes": ROOM, **spec})
        filler = [self.manager.adopt(torch.zeros(ROOM // 16)).toGPU() for _ in range(6)]
        assert self.manager.residency.books.is_pressed
        del filler
        self.weights = [weight_on(self.manager, 1, 2) for _ in range(count)]
        self.x = self.manager.adopt(torch.rand(1)).toGPU() + 0
        for index in range(count):
            self.use(index)
        self.strategy.heard.clear()

    def number(self, index: int) -> int:
        number: int = self.weights[index]._ttr_block.block_id
        return number

    def expect(self, *indices: int) -> None:
        """Have these weights expected, from the next watched operator on."""
        self.strategy.expected = [self.number(index) for index in indices]

    def use(self, index: int) -> tuple[int, int]:
        """Use a weight in an operator with a tiny result; return how many were ready and slow."""
        return ran(self.manager, lambda: self.weights[index] + self.x)[1:]

    def told(self) -> list[tuple[int, bool]]:
        """Return (weight, is written) of the uses of weights that were told, and forget them."""
        index_of = {self.number(i): i for i in range(len(self.weights))}
        uses = [u for u in self.strategy.uses() if u.block_id in index_of]
        self.strategy.heard.clear()
        assert all(use.was_resident and use.is_persistent for use in uses)
        assert len({use.struct for use in uses if not use.is_write}) <= 1  # told late or at once
        return [(index_of[use.block_id], use.is_write) for use in uses]


@pytest.fixture
def world(manage: Callable[..., Any]) -> Any:
    world = World(manage)
    return world


def test_what_is_expected_is_told_together_in_the_order_of_the_program(world):
    world.use(0)
    world.told()
    world.expect(1, 2)
    world.use(0)
    assert [index for index, _ in world.told()] == [0]
    world.use(2), world.use(1)  # in another order than expected
    assert world.told() == []
    world.use(3)
    assert [index for index, _ in world.told()] == [2, 1, 3]


def test_each_use_of_one_that_is_used_several_times_is_told(world):
    world.expect(1, 2)
    world.use(0)
    world.told()
    world.use(1), world.use(2), world.use(1), world.use(1)
    with torch.no_grad():
        world.weights[2].mul_(1)
    torch.add(world.weights[1], world.weights[1])
    world.use(3)
    told = world.told()
    assert told[:5] == [(1, False), (2, False), (1, False), (1, False), (2, True)]
    assert told[5:] == [(1, False), (3, False)]


def test_the_last_use_of_one_that_is_gone_since_is_told(world):
    number = world.number(1)
    world.expect(1, 2)
    world.use(0)
    world.told()
    world.use(1)
    gone = weakref.ref(world.weights[1]._ttr_block)
    world.weights[1] = world.weights[0]
    assert gone() is None  # what is noted of it keeps nothing alive
    world.use(3)
    assert number in [use.block_id for use in world.strategy.uses()]


def test_what_is_not_used_is_not_told(world):
    world.expect(1, 2)
    world.use(0)
    world.told()
    world.use(2)
    world.use(3)
    assert [index for index, _ in world.told()] == [2, 3]


def test_what_is_expected_and_missing_ends_no_lease_before_it_is_used(world):
    world.told()
    world.weights[1].toCPU()
    world.expect(1, 2, 3)
    world.use(0)
    world.told()
    assert world.use(2) == world.use(3) == (1, 0), "ready both"
    assert world.told() == []
    world.expect()
    world.use(1)
    told = [use.block_id for use in world.strategy.uses() if use.is_persistent]
    assert told == [world.number(2), world.number(3), world.number(1)]


def test_a_lease_ends_when_it_is_told(world):
    world.expect(1, 2)
    world.use(0)
    world.use(1)
    world.expect()
    world.use(3)
    world.told()
    assert all(weight._ttr_block.ready is None for weight in world.weights)
    world.use(2)
    assert [index for index, _ in world.told()] == [2]


def test_two_threads_begin_one_lease(world, monkeypatch):
    feed, accelerator = world.manager.residency.feed, world.manager.residency.books.main
    world.use(0)
    feed.catch_up()
    world.told()
    expects, threads = world.strategy.expects, []

    def meanwhile(device: Any) -> Any:
        threads.append(threading.Thread(target=feed.begin_lease, args=(accelerator,)))
        threads[-1].start()
        threads[-1].join(0.2)
        return expects(device)

    monkeypatch.setattr(world.strategy, "expects", meanwhile)
    world.expect(1, 2)
    feed.begin_lease(accelerator)
    for thread in threads:
        thread.join()
    assert len(threads) == 1
    assert list(feed.lease.nbytes) == [world.number(1), world.number(2)]


def test_an_operator_whose_operands_are_ready_does_not_end_it(world):
    """A composite one that is taken apart, say: its parts may be ready."""
    world.expect(1, 2)
    world.use(0)
    lease = world.manager.residency.feed.lease
    plan = plan_of(torch.ops.aten.scaled_dot_product_attention.default)
    assert run_watched(plan, (world.x, world.x, world.x), {}) is SLOW
    assert lease is not None
    assert world.manager.residency.feed.lease is lease
    assert world.use(1) == (1, 0)


def test_results_that_are_not_small_end_it(world):
    world.expect(1, 2)
    world.use(0)
    world.told()
    world.use(1)
    kept = world.x.expand(512).contiguous()
    assert world.weights[2]._ttr_block.ready is None
    world.use(2)
    told = world.strategy.heard
    number = kept._ttr_block.block_id
    births = [n for n, happened in enumerate(told) if happened == ("birth", number)]
    first, second = (
        n
        for n, (kind, what) in enumerate(told)
        if kind == "use" and what.block_id in (world.number(1), world.number(2))
    )
    assert [first < born < second for born in births] == [True]


def test_results_that_are_gone_again_do_not_end_it(world):
    world.expect(1, 2)
    world.use(0)
    for _ in range(20):
        assert (world.x.expand(200) + 1).numel() == 200
    assert world.weights[2]._ttr_block.ready is not None


def test_many_results_that_are_gone_again_end_it(world, monkeypatch):
    """Each leaves a dead reference: a loop over what is leased would gather them for ever."""
    monkeypatch.setattr(leases, "MOST_USES", 10)
    world.expect(1, 2)
    world.use(0)
    lease = world.manager.residency.feed.lease
    assert lease is not None
    world.expect()
    for _ in range(30):
        assert (world.x.expand(200) + 1).numel() == 200
    assert len(lease._results) == 10
    assert world.weights[2]._ttr_block.ready is None
    world.use(2)
    assert world.manager.residency.feed.lease is None


def test_a_write_of_what_is_at_home_too_does_not_end_it(world, monkeypatch):
    world.expect(1, 2)
    world.use(0)
    world.told()
    lease, weight = world.manager.residency.feed.lease, world.weights[2]
    before = weight.detach().cpu().tolist()
    assert not weight._ttr_block.owned
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(SlowPath, "run", lambda path: pytest.fail(f"{path.plan.name} was slow"))
        weight.mul_(3)
        weight.mul_(2)
    assert world.manager.residency.feed.lease is lease is not None
    world.use(3)
    assert world.told() == [(2, True), (2, True), (3, False)]
    assert weight.tolist() == (torch.tensor(before) * 6).tolist()


def test_what_is_evicted_while_it_is_about_to_be_written_is_written_right(world, monkeypatch):
    world.expect(1, 2)
    world.use(0)
    weight, residency = world.weights[2], world.manager.residency
    before, open_held = weight.detach().cpu().tolist(), residency.readiness.open_held

    def evicted(blocks: Any, device: Any) -> bool:
        opened = open_held(blocks, device)
        residency.evictor.evict_all()  # as another thread
        return opened

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(residency.readiness, "open_held", evicted)
        weight.mul_(3)
    assert weight.tolist() == (torch.tensor(before) * 3).tolist()


def test_small_results_are_told_between_the_uses_that_they_came_between(world):
    world.expect(1, 2)
    world.use(0)
    world.strategy.heard.clear()
    world.use(1)
    kept = world.x.expand(32).contiguous()
    world.use(2)
    assert not world.strategy.heard
    world.use(3)
    told = [what if kind == "birth" else what.block_id for kind, what in world.strategy.heard]
    assert told[:3] == [world.number(1), kept._ttr_block.block_id, world.number(2)]


def test_what_is_elsewhere_is_not_expected_to_be_there(world):
    world.weights[1].toCPU()
    world.expect(2, 1, 3)
    world.use(0)
    ready = [weight._ttr_block.ready is not None for weight in world.weights]
    assert ready == [False, False, True, True]


def test_what_was_evicted_since_can_be_used_and_is_told_once(world):
    before = (world.weights[1] + world.x).tolist()
    world.expect(1, 2)
    world.use(0)
    world.strategy.heard.clear()
    world.use(1)
    world.expect()
    world.manager.residency.evictor.evict_all()
    assert (world.weights[1] + world.x).tolist() == before
    uses = [use.was_resident for use in world.strategy.uses() if use.block_id == world.number(1)]
    assert len(uses) == 2


def test_no_lease_where_the_hosts_time_is_not_counted(manage):
    world = World(manage, decision_nbytes=0)
    world.expect(1, 2)
    world.use(0)
    assert all(weight._ttr_block.ready is None for weight in world.weights)


def test_one_that_another_strategy_was_given_is_forgotten(world):
    world.expect(1, 2)
    world.use(0)
    world.use(1)
    world.strategy.heard.clear()
    other = Teller()
    world.manager.strategy = other
    world.use(3)
    assert not world.strategy.uses()
    assert [u.block_id for u in other.uses() if u.is_persistent] == [world.number(3)]


def test_tiny_results_are_not_told(world):
    world.strategy.heard.clear()
    kept = [world.x + 1, world.x.expand(64) + 1]
    world.use(0)
    births = [what for kind, what in world.strategy.heard if kind == "birth"]
    assert births == [kept[1]._ttr_block.block_id]


# -- Flow ------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Many small weights, one after the other, and a result of one number from each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.rand(256) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = x * 0.5 + row.sum()
        return x


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For which accelerators the strategy was asked what it wants ahead."""
    names: list[str] = []
    wishes = StrategyFeed.wishes
    monkeypatch.setattr(
        StrategyFeed, "wishes", lambda feed, on: names.append(on.name) or wishes(feed, on)
    )
    return names


def followed(manager: Any, plain: nn.Module, asked: list[str]) -> tuple[nn.Module, dict[str, int]]:
    """Run a model as a strategy that knows it; return it, and what four runs have added up to."""
    x = torch.rand(1)
    model, x_there = manager.adopt(copy.deepcopy(plain)), manager.adopt(x.clone())
    with torch.no_grad():
        for _ in range(8):
            model(x_there)
        asked.clear()
        before = manager.stats()
        for _ in range(4):
            assert not list(differences(plain(x), model(x_there)))
        after = manager.stats()
    return model, {name: after[name] - before[name] for name in ("miss_count", "slow_op_count")}


@pytest.mark.parametrize("share", usual([0.5], [0.7]))
def test_flow_follows_many_small_weights_without_being_asked_at_each(manage, asked, share):
    plain = Rows(192)
    nbytes = sum(p.nbytes for p in plain.parameters())
    found = {}
    for decision_nbytes in (0, nbytes):
        spec = {"decision_nbytes": decision_nbytes, "copy_latency_ns": 0}
        manager = manage("flow", int(nbytes * share), **spec)
        _, counts = followed(manager, plain, asked)
        found[decision_nbytes] = len(asked), counts["miss_count"]
        assert manager.residency.feed.strategy.history.confidence > 0.9
    (often, missed), (seldom, missed_now) = found.values()
    assert seldom < often * 2 / 3
    assert missed_now <= missed + 16  # of 768 uses


@pytest.mark.parametrize("decision_nbytes", [0, 1 << 20])
def test_on_all_of_several_accelerators_what_is_there_needs_no_decision(
    manage, asked, decision_nbytes
):
    plain = Rows(96)
    nbytes = sum(p.nbytes for p in plain.parameters())
    spec = {"decision_nbytes": decision_nbytes, "copy_latency_ns": 0}
    model, counts = followed(manage("venice", nbytes // 3, count=2, **spec), plain, asked)
    where = {row.proxyInfo.device for row in model.parameters()}
    assert {"sim:test", "sim:test1"} <= where
    op_count = 4 * 3 * 96
    assert counts["slow_op_count"] < op_count / 12
    assert len(asked) < (op_count / 3 if decision_nbytes else op_count)


class Layers(nn.Module):
    """Two small weights for each large one, as layers with norms have them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.rand(width) for _ in range(2 * count))
        self.weights = nn.ParameterList(torch.rand(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, weight in enumerate(self.weights):
            x = x * self.norms[2 * index] + self.norms[2 * index + 1]
            x = (x @ weight).softmax(-1)
        return x


def test_small_weights_do_not_take_the_room_of_large_ones_for_copies_ahead(manage, monkeypatch):
    plain, x = Layers(96, 64), torch.rand(1, 64)
    nbytes = sum(p.nbytes for p in plain.parameters())
    under_way: list[int] = []
    manager = manage("flow", nbytes // 2, decision_nbytes=300, h2d_bytes_per_s=3e8)
    strategy = manager.residency.feed.strategy
    prefetch = strategy.prefetch

    def note(device: Any, resident: Any) -> Any:
        queued = prefetch(device, resident)
        nbytes = sum(strategy.history.nbytes(one.block_id) for one in queued)
        under_way.append(device.in_flight_nbytes + nbytes)
        return queued

    monkeypatch.setattr(strategy, "prefetch", note)
    model, x_there = manager.adopt(copy.deepcopy(plain)), manager.adopt(x.clone())
    with torch.no_grad():
        for _ in range(6):
            model(x_there)
        under_way.clear()
        for _ in range(4):
            assert not list(differences(plain(x), model(x_there)))
    assert strategy.history.confidence > 0.9
    assert 0 < max(under_way) <= 2 * plain.weights[0].nbytes
