"""Operators are computed where their weights lie, where that ends sooner: bits stay, time falls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import ConfigError, options
from torchTensorRef.strategy import OpSnapshot, Strategy

WIDTH, LAYERS = 64, 12
LAYER_NBYTES = WIDTH * WIDTH * 4
#: A link of 20 bytes per us; the host's kernels read 40, its memory gives 60.
MACHINE = {
    "h2d_bytes_per_s": 20e6,
    "d2h_bytes_per_s": 20e6,
    "host_memory_bytes_per_s": 60e6,
    "host_kernel_bytes_per_s": 40e6,
    "host_flops_per_s": 1e12,
    "urgent_nbytes": 1024,
}


@pytest.fixture(autouse=True)
def as_by_default():
    with options(placement="auto"):
        yield


def stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def sweep(model: nn.ModuleList, count: int, rows: int = 1) -> torch.Tensor:
    with torch.inference_mode():
        x = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)
        for _ in range(count):
            for layer in model:
                x = torch.tanh(layer(x)) + 0.1 * x
    return x


def run(manage: Any, count: int = 8, rows: int = 1, **machine: Any) -> tuple[Any, Any]:
    """Return the stats and the manager, once the result is what plain torch gives."""
    expected = sweep(stack(), count, rows)
    manager = manage("flow", LAYERS * LAYER_NBYTES // 2, **{**MACHINE, **machine})
    found = manager.release(sweep(manager.adopt(stack()), count, rows))
    assert torch.equal(expected, found)
    return manager.stats(), manager


def test_host_and_link_work_at_once(manage):
    stats, manager = run(manage)
    assert stats["at_home_count"] > 8
    assert stats["host_op_count"] >= stats["at_home_count"]
    assert stats["prefetched_nbytes"] > 0  # the link has not been idle
    report = manager.report()
    manager.placement = "accelerator"
    without, _ = run(manage)
    assert without["at_home_count"] == 0
    assert stats["time_ns"] < 0.7 * without["time_ns"]
    assert "because their weights were there" in report
    assert "saved" in report


def attend(caches: list[torch.Tensor], count: int) -> torch.Tensor:
    """Tokens that look at long caches."""
    with torch.inference_mode():
        x = torch.linspace(-1, 1, WIDTH).reshape(1, 1, 1, WIDTH)
        for _ in range(count):
            for cache in caches:
                x = torch.nn.functional.scaled_dot_product_attention(x, cache, cache)
    return x


@pytest.mark.parametrize("placement", ["auto", "accelerator"])
def test_large_caches_are_attended_where_they_lie(manage, placement):
    def caches() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(1, 1, 256, WIDTH, generator=generator) for _ in range(6)]

    expected = attend(caches(), 8)
    host = {"host_memory_bytes_per_s": 200e6, "host_kernel_bytes_per_s": 150e6}
    manager = manage("flow", 4 * 256 * WIDTH * 4, **{**MACHINE, **host})
    manager.placement = placement
    ours = [manager.adopt(cache) * 1 for cache in caches()]  # operators have made them
    assert torch.equal(expected, manager.release(attend(ours, 8)))
    stories = " ".join(line for cache in ours for line in manager.story(cache))
    is_at_home = "used at home by aten.scaled_dot_product_attention" in stories
    assert is_at_home == (placement == "auto")
    assert (manager.stats()["at_home_count"] > 0) == (placement == "auto")
    manager.check()


def test_the_story_of_a_weight_tells_it(manage):
    model = stack()
    manager = manage("flow", LAYERS * LAYER_NBYTES // 2, **MACHINE)
    manager.adopt(model)
    sweep(model, 4)
    told = [line for layer in model for line in manager.story(layer.weight)]
    assert any("used at home by" in line and "sooner than by fetching" in line for line in told)


def test_without_a_figure_of_the_host_nothing_changes(manage):
    stats, manager = run(manage, host_kernel_bytes_per_s=None)
    assert stats["at_home_count"] == 0
    assert not manager.residency.feed.places
    manager.placement = "hybrid"  # the user knows better
    assert manager.residency.feed.places


def test_what_the_accelerator_computes_while_the_link_keeps_up_stays_there(manage):
    bound = {"flops_per_s": {"default": 2e7}, "host_flops_per_s": 2e6}
    stats, _ = run(manage, rows=8, **bound)
    with options(placement="accelerator"):
        without, _ = run(manage, rows=8, **bound)
    assert stats["time_ns"] <= 1.01 * without["time_ns"]


class Asked(Strategy):
    """Runs everything at home that it is asked about."""

    name = "asked"

    def __init__(self) -> None:
        self.seen: list[OpSnapshot] = []

    def victims(self, device, candidates, need_nbytes):
        return ()

    def place(self, op):
        self.seen.append(op)
        return "cpu"


def test_a_strategy_is_asked_of_what_lacks_an_operand_and_sees_what_each_place_offers(manage):
    asked = Asked()
    manager = manage(asked, **MACHINE)
    x, w = manager.adopt(torch.ones(4, WIDTH)), manager.adopt(torch.ones(WIDTH, WIDTH))
    y = x @ w
    assert y.proxyInfo.device == "cpu"
    op = asked.seen[0]
    assert op.missing_nbytes == sum(block.nbytes for block in op.missing) == LAYER_NBYTES + 1024
    assert [offer.device for offer in op.offers] == ["sim:test", "cpu"]
    crossing_ns = op.missing_nbytes / MACHINE["h2d_bytes_per_s"] * 1e9
    assert op.offer("sim:test").there_ns == pytest.approx(crossing_ns, rel=0.01)
    assert op.offer("cpu").run_ns == pytest.approx(
        (LAYER_NBYTES + 1024) / MACHINE["host_kernel_bytes_per_s"] * 1e9, rel=0.01
    )
    assert not op.is_movable  # what it computes is not known yet
    count = len(asked.seen)
    manager.strategy = "lru"
    z = w + 1  # there from now on
    manager.strategy = asked
    assert (w + z).proxyInfo.device == "sim:test"
    assert len(asked.seen) == count


def test_times_are_learned_from_what_ran(manage):
    asked = Asked()
    manager = manage(asked, **MACHINE)
    w = manager.adopt(torch.ones(WIDTH, WIDTH))
    for _ in range(3):
        x = manager.adopt(torch.ones(4, WIDTH))
        assert torch.equal(manager.release(x @ w), torch.ones(4, WIDTH) @ torch.ones(WIDTH, WIDTH))
    last = asked.seen[-1]
    assert last.is_movable
    assert last.flops == 2 * 4 * WIDTH * WIDTH
    learned = last.offer("cpu")
    assert learned.is_learned
    assert learned.run_ns == pytest.approx((LAYER_NBYTES + 2048) / 40e6 * 1e9, rel=0.01)


def test_a_bad_value_names_the_nearest(manager):
    with pytest.raises(ConfigError, match=r"placement='acelerator'.*Did you mean 'accelerator'"):
        manager.placement = "acelerator"
    assert manager.placement == "auto"


def test_what_was_learned_on_other_devices_is_forgotten(manage):
    """A slower host behind a device of the same name: its own times are learned."""
    for host_bytes_per_s in (40e6, 10e6):
        asked = Asked()
        manager = manage(asked, **{**MACHINE, "host_kernel_bytes_per_s": host_bytes_per_s})
        w = manager.adopt(torch.ones(WIDTH, WIDTH))
        for _ in range(3):
            manager.release(manager.adopt(torch.ones(4, WIDTH)) @ w)
        first, last = asked.seen[0], asked.seen[-1]
        assert not first.is_movable
        assert not first.offer("cpu").is_learned
        expected_ns = (LAYER_NBYTES + 2048) / host_bytes_per_s * 1e9
        assert last.offer("cpu").run_ns == pytest.approx(expected_ns, rel=0.01)
