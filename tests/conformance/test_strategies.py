"""The suite that every strategy passes: it may cost time, never bits, bytes or books."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from torchTensorRef import StrategyError
from torchTensorRef.strategy import Strategy
from torchTensorRef.strategy.choice import make_strategy

from ..support.programs import (
    COUNTS_OF_STEPS,
    Adversary,
    RandomEviction,
    assert_right,
    managed_result,
    mlp,
    plain_result,
    scattered,
    trained,
)
from ..support.sweeps import in_turn

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "genoa": lambda: make_strategy("genoa"),
    "lru": lambda: make_strategy("lru"),
    "flow": lambda: make_strategy("flow"),
    "random": lambda: RandomEviction(seed=3),
    "adversary": lambda: Adversary(seed=5),
}

training = trained(
    lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    ),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda: (torch.rand(12, 16), torch.rand(12, 4)),
    steps=3,
)

#: Program and the bytes that hold all of it, about.
PROGRAMS = {"scattered": (scattered, 20_000), "mlp": (mlp, 40_000), "training": (training, 30_000)}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


#: Ample, half, about the largest operator, less than most operators need, less than any.
SHARES = [8.0, 0.5, 0.2, 0.05, 0.01]


@pytest.mark.parametrize(
    ("strategy", "share"), in_turn(STRATEGIES, SHARES, each=3), indirect=["strategy"]
)
def test_no_strategy_changes_a_bit_or_passes_the_budget(manage, strategy, share):
    manager = manage(strategy, nbytes=1 << 20)
    device = manager.residency.books.main
    for program, nbytes in PROGRAMS.values():
        limit_nbytes = manager.budget = int(nbytes * share)
        manager.reset_stats()
        reason = "most operators need more than the budget" if share < 0.1 else ""
        assert_right(
            program,
            manager,
            plain_because=COUNTS_OF_STEPS if program is training else "",
            on_host_because=reason,
        )
        assert device.peak_nbytes <= limit_nbytes
        assert device.recount_nbytes() == device.resident_nbytes
        assert share < 1 or manager.stats()["host_fallback_count"] == 0


def test_the_results_keep_right_when_everything_has_gone_home(manage, strategy):
    manager = manage(strategy, nbytes=10_000)
    ours = managed_result(scattered, manager)
    manager.bring_all_home()
    assert manager.residency.books.main.resident_nbytes == 0
    plain = plain_result(scattered)
    assert all(
        torch.equal(manager.release(b), a) for a, b in zip(plain[:-1], ours[:-1], strict=True)
    )


def test_what_dies_is_given_back_at_once(manage, strategy):
    manager = manage(strategy)
    held = manager.adopt(torch.rand(10, 10)) * 2
    before = manager.residency.books.main.resident_nbytes
    for _ in range(20):
        passing = manager.adopt(torch.rand(10, 10)) @ held
        del passing
    assert manager.residency.books.main.resident_nbytes <= max(before, held.nbytes)


def largest_operator_nbytes(sizes: list[int]) -> int:
    """Bytes of x(8, a) @ w(a, b) -> y(8, b), the largest of a chain."""
    return max(4 * (8 * a + a * b + 8 * b) for a, b in pairwise(sizes))


SIZES = [16, 64, 96, 32, 8]


def chain(weights: list[Any], x: Any) -> Any:
    for weight in weights:
        x = x @ weight
    return x


def chain_of(manager: Any) -> tuple[list[Any], Any]:
    weights = [torch.rand(a, b) for a, b in pairwise(SIZES)]
    return [manager.adopt(w.clone()) for w in weights], manager.adopt(torch.rand(8, SIZES[0]))


def test_genoa_holds_one_operator_and_copies_nothing_clean_back(manage):
    manager = manage("genoa")
    weights, x = chain_of(manager)
    device = manager.residency.books.main
    for weight in weights:
        before = manager.stats()
        x = x @ weight
        after = manager.stats()
        assert after["resident_nbytes"] == 0
        # Of the operator's three blocks only its result is news for home.
        assert after["written_back_nbytes"] - before["written_back_nbytes"] == x.nbytes
    assert device.peak_nbytes == largest_operator_nbytes(SIZES)


def test_genoa_runs_where_only_the_largest_operator_fits(manage):
    nbytes = largest_operator_nbytes(SIZES)
    manager = manage("genoa", nbytes=nbytes)
    weights, x = chain_of(manager)
    chain(weights, x)
    assert manager.stats()["host_fallback_count"] == 0
    manager = manage("genoa", nbytes=nbytes - 1)
    weights, x = chain_of(manager)
    chain(weights, x)
    assert manager.stats()["host_fallback_count"] == 1


def sweep(weights: list[Any], x: Any) -> None:
    """Use each weight once; what an operator makes is gone before the next."""
    for weight in weights:
        x @ weight


def swept(manage: Any, name: Any, share: float) -> tuple[int, int, int]:
    """Bytes of the weights, those that a steady sweep over them fetches, and those it leaves."""
    weight_nbytes, count = 4 * 32 * 32, 10
    small = 4 * 32  # x and its product
    manager = manage(name, nbytes=int(weight_nbytes * count * share) + 2 * small)
    x = manager.adopt(torch.rand(1, 32))
    weights = [manager.adopt(torch.rand(32, 32)) for _ in range(count)]
    for _ in range(3):
        sweep(weights, x)
    before = manager.stats()
    sweep(weights, x)
    after = manager.stats()
    assert after["written_back_nbytes"] == before["written_back_nbytes"]
    moved_nbytes = after["fetched_nbytes"] - before["fetched_nbytes"]
    return weight_nbytes * count, moved_nbytes, after["resident_nbytes"]


def test_lru_moves_everything_when_it_does_not_fit_and_nothing_when_it_does(manage):
    _, moved, _ = swept(manage, "lru", share=1.0)
    assert moved == 0
    total, moved, _ = swept(manage, "lru", share=0.9)
    assert moved == total
    total, moved, _ = swept(manage, "lru", share=0.5)
    assert moved == total


def test_lru_fills_the_budget(manage):
    total, _, resident_nbytes = swept(manage, "lru", share=0.5)
    assert resident_nbytes >= 0.5 * total


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_fits_is_fetched_once(manage, name):
    if name in ("genoa", "random", "adversary"):
        pytest.skip("gives back what fits on purpose")
    _, moved, _ = swept(manage, name, share=1.2)
    assert moved == 0


def test_a_strategy_that_raises_does_not_hurt_the_books(manage):
    class Broken(Strategy):
        name = "broken"

        def victims(self, device, candidates, need_nbytes):
            raise ZeroDivisionError("a bug of the strategy's")

    manager = manage(Broken(), nbytes=9_000)
    refs = [manager.adopt(torch.rand(30, 30)) for _ in range(4)]
    with pytest.raises(StrategyError, match=r"'broken' .*ZeroDivisionError.* in `victims`") as end:
        sweep_sum(refs)
    assert isinstance(end.value.__cause__, ZeroDivisionError)
    manager.check()
    assert not manager.residency.holds.pins_by_thread
    manager.strategy = "lru"
    sweep_sum(refs)


def sweep_sum(refs: list[Any]) -> None:
    for ref in refs:
        ref + 1


def test_strategies_may_follow_one_another_at_every_operator(manage):
    manager = manage(nbytes=12_000)
    x = torch.rand(20, 20)
    ref = manager.adopt(x.clone())
    for _ in range(4):
        for make in STRATEGIES.values():
            manager.strategy = make()
            ref.mul_(1.5).add_(ref.t() @ ref / ref.sum())
            x.mul_(1.5).add_(x.t() @ x / x.sum())
            manager.check()
    assert torch.equal(manager.release(ref), x)
