"""Forecasts: what is foretold is what happens, and nothing is changed by asking."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import ConfigError, tensorsManager
from torchTensorRef.devices import registry
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.host_costs import HOST_COSTS, HostCosts
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.inject import hooks

from ..support import processes
from ..support.sweeps import by_pairs, in_turn, one_in

SPEC = DeviceSpec(name="foretold", capacity_nbytes=1 << 20)
COSTS = HostCosts(ready_ns=3_000, decided_ns=41_000, fetched_ns=52_000, evicted_ns=37_000)
#: With costs, and with small blocks that are kept and leased: to decide about them costs more.
COUNTED = {
    "counted": SPEC.scaled(host_costs=COSTS, decision_nbytes=1),
    "leased": SPEC.scaled(host_costs=COSTS, decision_nbytes=3000),
    "leased for nothing": SPEC.scaled(decision_nbytes=3000),
}


@pytest.fixture(autouse=True)
def injected(manage):
    manage()
    with hooks.is_disabled.entered(False):
        yield


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(0).chunk(3, dim=-1)
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        cache[:] = [k, v]
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, token: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        x = self.table(token)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return (x[-1:] @ self.table.weight.t()).argmax(-1)


def decoding(model: Decoder, token: torch.Tensor, count: int) -> Any:
    caches: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    with torch.no_grad():
        for number in range(count):
            token = model(token, caches)
            yield f"token {number}"


def run_for_real(
    program: Any, budget: int, strategy: str, spec: DeviceSpec = SPEC
) -> list[tuple[int, ...]]:
    """Run a program as if it were the first on a device; return what each part cost."""
    device, host = SimDevice(spec, name="sim:foretold"), registry.resolve("cpu")
    others, host.machines = host.machines, [device.machine]
    try:
        tensorsManager.device = device
        tensorsManager.budget, tensorsManager.strategy = budget, strategy
        tensorsManager.reset_stats()
        found, before = [], (0, 0, 0)
        for _ in program():
            stats = tensorsManager.stats()
            after = (
                max(device.now_ns(), device.record().end_ns),
                stats["fetched_nbytes"] + stats["prefetched_nbytes"],
                stats["written_back_nbytes"],
            )
            moved = tuple(b - a for a, b in zip(before, after, strict=True))
            found.append((*moved, device.peak_nbytes))
            before = after
            device.reset_peak()
        return found
    finally:
        host.machines = others


@pytest.mark.parametrize(
    ("strategy", "share"), in_turn(["genoa", "lru", "flow"], [0.3, 0.6, 1.5], each=1)
)
def test_a_decode_is_foretold_to_the_byte_and_nanosecond(strategy, share):
    torch.manual_seed(0)
    model = Decoder()
    token = torch.tensor([3, 1, 4])
    budget = int(sum(p.nbytes for p in model.parameters()) * share)
    seen = torchTensorRef.forecast(
        decoding, model, token, 6, device=SPEC, budget=budget, strategy=strategy
    )
    real = run_for_real(lambda: decoding(model, token, 6), budget, strategy)
    assert [step.name for step in seen.steps] == [f"token {n}" for n in range(6)]
    assert [costs_of(step) for step in seen.steps] == real


@pytest.mark.parametrize(
    ("strategy", "share", "name"),
    one_in(2, by_pairs(["genoa", "lru", "flow"], [0.3, 0.6, 1.5], COUNTED)),
)
def test_a_decode_is_foretold_with_what_management_takes_of_the_host(strategy, share, name):
    torch.manual_seed(0)
    spec = COUNTED[name]
    model = Decoder()
    token = torch.tensor([3, 1, 4])
    budget = int(sum(p.nbytes for p in model.parameters()) * share)
    seen = torchTensorRef.forecast(
        decoding, model, token, 6, device=spec, budget=budget, strategy=strategy
    )
    real = run_for_real(lambda: decoding(model, token, 6), budget, strategy, spec)
    assert [costs_of(step) for step in seen.steps] == real
    stats = tensorsManager.stats()
    assert sum(step.host_ns for step in seen.steps) == stats["host_ns"]
    assert sum(step.host_stall_ns for step in seen.steps) == stats["host_stall_ns"]
    assert (stats["host_ns"] > 0) == (spec.host_costs == COSTS)


@pytest.mark.parametrize("strategy", ["genoa", "lru"])
@pytest.mark.parametrize("share", [0.6, 1.5])
def test_questions_are_foretold_to_the_byte_and_nanosecond(strategy, share):
    """They were not written down: a `generate()` that asks whether it is done took longer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    x = torch.rand(8, 32)
    budget = int(sum(p.nbytes for p in model.parameters()) * share)

    def program():
        with torch.no_grad():
            for number in range(3):
                y = model(x)
                if (y > 100).all().item():
                    break
                assert torch.arange(8).sum().item() == 28  # computed
                yield f"step {number}"

    seen = torchTensorRef.forecast(program, device=SPEC, budget=budget, strategy=strategy)
    real = run_for_real(program, budget, strategy)
    assert [costs_of(step) for step in seen.steps] == real
    assert sum(op.waits for op in seen.record.each()) == 6


@pytest.mark.parametrize("strategy", ["genoa", "lru", "flow"])
@pytest.mark.parametrize("share", [0.5, 4.0])
def test_dropout_is_foretold_to_the_byte_and_nanosecond(strategy, share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.1))
    batch = torch.rand(16, 32)
    budget = int(share * 2 * sum(p.nbytes for p in model.parameters()))

    def steps():
        for number in range(2):
            model(batch).sum().backward()
            model.zero_grad()
            yield f"step {number}"

    seen = torchTensorRef.forecast(steps, device=SPEC, budget=budget, strategy=strategy)
    real = run_for_real(steps, budget, strategy)
    assert [costs_of(step) for step in seen.steps] == real
    assert sum(step.fetched_nbytes for step in seen.steps) > 0


def test_operands_are_brought_in_the_order_in_which_a_run_brings_them(monkeypatch):
    """`linear` as a whole has its weight before its bias, and in its parts behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    copied: list[int] = []
    copy_in = SimDevice.copy_in

    def noted(self: SimDevice, source: Any, base: Any, **after: Any) -> Any:
        copied.append(source.numel())
        return copy_in(self, source, base, **after)

    def program() -> Any:
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(2, 32))
                yield

    seen = torchTensorRef.forecast(program, device=SPEC, budget=9_000, strategy="lru")
    monkeypatch.setattr(SimDevice, "copy_in", noted)
    assert len(seen.steps) == 3
    foretold = list(copied)
    copied.clear()
    run_for_real(program, 9_000, "lru")
    assert foretold == copied
    biases = [i for i, n in enumerate(copied) if n == 128]
    weights = [i for i, n in enumerate(copied) if n == 4096]
    assert weights[-1] < biases[-1]  # fetched as a whole by then


def costs_of(step: Any) -> tuple[int, ...]:
    return step.time_ns, step.fetched_nbytes, step.written_back_nbytes, step.peak_nbytes


def attending(width: int = 32) -> Any:
    """Composite operators, which run as one or in their parts, with views on the way to them."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
    tables = [torch.rand(6, width) for _ in range(6)]

    def program() -> Any:
        with torch.no_grad():
            for _ in range(4):
                x = torch.rand(3, 5, width, generator=torch.Generator().manual_seed(1))
                for layer, table in zip(layers, tables, strict=True):
                    q = layer(x).view(3, 5, 4, -1).transpose(1, 2)
                    seen = nn.functional.scaled_dot_product_attention(q, q, q)
                    x = seen.transpose(1, 2).reshape(3, 5, width) @ layer.weight
                    x = nn.functional.layer_norm(x + table[:5], (width,)) + torch.zeros_like(x)
                yield

    return program, sum(p.nbytes for p in layers.parameters())


@pytest.mark.parametrize("share", [0.5, 1.0, 4.0])
def test_composite_operators_are_foretold_as_one_and_in_their_parts(share):
    program, nbytes = attending()
    budget = int(nbytes * share)
    seen = torchTensorRef.forecast(program, device=SPEC, budget=budget, strategy="flow")
    real = run_for_real(program, budget, "flow")
    assert [costs_of(step) for step in seen.steps] == real
    whole = [op for op in seen.record.ops if op.part_count]
    assert {op.name for op in whole} >= {"aten.layer_norm.default"}
    assert all(op.peak_nbytes for op in whole)
    zeros = [op for op in seen.record.each() if op.name == "aten.zeros_like.default"]
    assert len(zeros) == 24  # each once


def test_copies_that_share_their_bytes_part_when_one_is_written():
    """As the layers of a TransformerEncoder do in the first step of an optimizer."""
    layer = nn.Linear(8, 8)

    def program() -> Any:
        layers = [copy.deepcopy(layer) for _ in range(3)]
        with torch.no_grad():
            for _ in range(2):
                x = torch.ones(2, 8)
                for one in layers:
                    x = one(x)
                    one.weight.mul_(0.5)
                yield

    seen = torchTensorRef.forecast(program, device=SPEC, budget=600, strategy="lru")
    real = run_for_real(program, 600, "lru")
    assert [costs_of(step)[1:] for step in seen.steps] == [cost[1:] for cost in real]


def test_the_kernels_of_the_host_give_their_shapes():
    """Torch's shape functions refuse what its kernels take, or have another layout."""
    a, b = torch.rand(8, 16), torch.rand(2, 16, 4)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    q = torch.rand(2, 5, 3, 8).transpose(1, 2)

    def program() -> Any:
        with torch.no_grad():
            product = torch._grouped_mm(a, b, offs=ends)
            seen = nn.functional.scaled_dot_product_attention(q, q, q)
        return product.shape, product.stride(), seen.stride()

    found = []
    torchTensorRef.forecast(lambda: found.append(program()), device=SPEC)
    assert found == [program()]


def test_asking_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    x = torch.rand(4, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> Any:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            yield

    seen = torchTensorRef.forecast(train, device=SPEC)
    assert len(seen.steps) == 3
    for name, value in model.state_dict().items():
        assert not value.proxyInfo.promised
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert not x.proxyInfo.promised


def test_a_forecast_that_is_let_go_of_leaves_nothing():
    """All that its blocks would have left behind was kept, with its device and its ledger."""

    def ask():
        seen = torchTensorRef.forecast(nn.Linear(4, 4), torch.ones(1, 4), device=SPEC)
        assert seen.steps

    gc.collect()
    before = sum(isinstance(one, SimDevice) for one in gc.get_objects())
    for _ in range(3):
        ask()
    gc.collect()
    assert sum(isinstance(one, SimDevice) for one in gc.get_objects()) <= before


def test_a_model_without_bytes_of_any_size():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000, bias=False) for _ in range(10)))
    seen = torchTensorRef.forecast(model, torch.empty(1, 40_000), device="h200", steps=2)
    weights = 10 * 4 * 40_000**2
    assert seen.at_most_alive["weights"] == weights
    assert seen.steps[0].fetched_nbytes >= weights
    assert model[0].weight.device.type == "meta"
    assert seen.least_nbytes == 4 * 40_000**2 + 2 * 4 * 40_000
    floor_ns, bound = seen.floor_ns(seen.steady)
    assert (bound, floor_ns > 0.9 * seen.steady.compute_ns) == ("compute", True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": "2"}, "steps='2': a program is called once or more often"),
        ({"steps": 1.5}, "a program is called once or more often"),
        ({"strategy": "flwo"}, "Did you mean 'flow'?"),
        ({"budget": "6G"}, "'G' is ambiguous"),
        ({"device": "rtx306"}, "Did you mean 'rtx3060'?"),
        ({"values": 3.5}, "values=3.5 answers nothing. Write 'compute',"),
    ],
)
def test_what_is_not_understood_is_said_before_the_program_runs(given, words):
    called = []
    with pytest.raises(ConfigError, match=re.escape(words)):
        torchTensorRef.forecast(lambda: called.append(1), **given)
    assert called == []


def test_what_is_no_program_and_what_runs_nothing():
    with pytest.raises(ConfigError, match="a module or a function to call, not 3"):
        torchTensorRef.forecast(3)
    with pytest.raises(ConfigError, match="runs no operator: nothing is to be foretold"):
        torchTensorRef.forecast(lambda: None).report()


def test_what_cannot_be_done_with_a_forecast_is_said(tmp_path):
    seen = torchTensorRef.forecast(nn.Linear(4, 4), torch.ones(1, 4), device=SPEC)
    for write in (seen.save, seen.plot):
        with pytest.raises(ConfigError, match="there is no folder"):
            write(tmp_path / "no" / "file")
        with pytest.raises(ConfigError, match="takes the path of a file to write, not 3"):
            write(3)
    with pytest.raises(ConfigError, match="write a whole number from 2 on"):
        seen.budgets(1)
    with pytest.raises(ConfigError, match="takes the real model"):
        seen.teach(3)
    with pytest.raises(ConfigError, match="Did you mean 'flow'"):
        seen.on(strategy="flwo")
    assert seen.on(spec="rtx4060").spec.name == "rtx4060"


@pytest.mark.parametrize("count", [2, 5])
def test_what_the_last_part_keeps_counts_as_a_cache(count):
    width, layers, batch = 32, 4, 64
    with torch.device("meta"):
        model = Decoder(width, layers)

    def program():
        caches = [[torch.zeros(batch, 0, width)] * 2 for _ in range(layers)]
        with torch.no_grad():
            for number in range(count):
                for block, cache in zip(model.blocks, caches, strict=True):
                    k = block.qkv(torch.ones(batch, 1, width))[:, :, :width]
                    cache[:] = [torch.cat([kept, k], 1) for kept in cache]
                yield f"token {number}"

    seen = torchTensorRef.forecast(program, device=SPEC)
    assert seen.at_most_alive["cache"] >= 2 * layers * batch * width * 4 * (count - 1)
    assert seen.at_most_alive["activations"] < batch * width * 4 * 8


def test_a_program_that_a_made_up_value_misleads_is_told_so():
    with torch.device("meta"):
        layer = nn.Linear(8, 8)

    def route(x):
        chosen = layer(x).argmax(-1)
        return x.split((chosen[:, None] == torch.arange(8)).sum(0).tolist())

    with pytest.raises(RuntimeError, match="split_sizes") as failed:
        torchTensorRef.forecast(route, torch.empty(5, 8), device=SPEC)
    (note,) = failed.value.__notes__
    assert "the value asked for at" in note
    assert "test_forecast.py" in note
    assert "values={'item': ...}" in note


def test_the_least_budget_needs_no_host_and_a_little_less_does():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 100))
    seen = torchTensorRef.forecast(model, torch.empty(7, 300), device=SPEC)
    assert sum(s.fallback_count for s in seen.on(budget=seen.least_nbytes).steps) == 0
    assert sum(s.fallback_count for s in seen.on(budget=seen.least_nbytes - 8).steps) > 0
    enough, more = seen.on(budget=seen.enough_nbytes), seen.on(budget=2 * seen.enough_nbytes)
    assert enough.time_ns == more.time_ns


def test_a_budget_below_the_least_is_said_to_be():
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), torch.rand(4, 64)
    enough = torchTensorRef.forecast(model, x, device="sim:rtx4060")
    assert "below the least budget" not in enough.report()
    less = enough.on(budget=enough.least_nbytes // 2)
    assert "below the least budget: 3 of 3 operators run on the host" in less.report()


def test_a_program_is_called_once_or_more_often():
    with pytest.raises(torchTensorRef.ConfigError, match="steps=0"):
        torchTensorRef.forecast(nn.Linear(2, 2), torch.rand(1, 2), steps=0)


def test_kept_and_read_again(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    seen = torchTensorRef.forecast(model, torch.empty(2, 64), device=SPEC, budget=20_000)
    seen.save(tmp_path / "seen.json")
    again = torchTensorRef.Forecast.load(tmp_path / "seen.json", device=SPEC, budget=20_000)
    assert again.to_json() == seen.to_json()
    data = json.loads((tmp_path / "seen.json").read_text())
    without = {key: value for key, value in data.items() if key != "steps"}
    steps = [1, [1], [["all"]], [["all", "none"]], None]
    for wrong in ({}, [], without, *({**data, "steps": one} for one in steps)):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(torchTensorRef.ConfigError, match=r"wrong\.json' is no forecast"):
            torchTensorRef.Forecast.load(tmp_path / "wrong.json")


def test_a_host_by_name_is_that_of_its_costs():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))
    given = {"device": SPEC, "budget": 4_000, "strategy": "lru", "steps": 3}
    without = torchTensorRef.forecast(model, torch.ones(1, 16), **given)
    seen = torchTensorRef.forecast(model, torch.ones(1, 16), host="epyc", **given)
    assert seen.spec.host_costs == HOST_COSTS["epyc"].costs
    assert (without.steady.host_ns, seen.steady.host_ns > 0) == (0, True)
    assert seen.bound_by(seen.steady) == "the host's own time"
    assert without.bound_by(without.steady) != "the host's own time"
    assert seen.to_json()["bound_by"] == "the host's own time"
    assert seen.time_ns > without.time_ns
    assert seen.floor_ns(seen.steady) == without.floor_ns(without.steady)
    with pytest.raises(torchTensorRef.ConfigError, match="epyc") as caught:
        torchTensorRef.forecast(model, torch.ones(1, 16), host="epycs", **given)
    assert caught.value.nearest == "epyc"


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(torchTensorRef.ConfigError, match="rtx4060"):
        torchTensorRef.forecast(nn.Linear(2, 2), torch.rand(1, 2), device="rtx460")


def test_a_report_fits_a_screen_and_says_what_bounds():
    with torch.device("meta"):
        model = Decoder(64, 6)
    seen = torchTensorRef.forecast(
        decoding, model, torch.zeros(3, dtype=torch.int64), 12, device=SPEC, budget=150_000
    )
    lines = seen.report().splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 160
    assert "floor" in seen.report()
    assert {block.is_persistent for _, block in seen.accesses()} == {True, False}


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    seen = torchTensorRef.forecast(model, torch.empty(2, 64), device=SPEC)
    seen.plot(tmp_path / "curve.png", count=3)
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"


def test_what_was_foretold_is_fetched_ahead_in_the_first_pass():
    """The strategy is taught by a forecast of a model on the meta device, of the same structure."""
    torch.manual_seed(0)
    with torch.device("meta"):
        unreal = Decoder(64, 6)
    model = Decoder(64, 6)
    token = torch.tensor([3])
    budget = sum(p.nbytes for p in model.parameters()) // 2
    seen = torchTensorRef.forecast(decoding, unreal, token, 4, device=SPEC, budget=budget)

    def fetched_ahead(*, taught: bool) -> tuple[int, Any]:
        device = SimDevice(SPEC, name="sim:taught")
        tensorsManager.device = device
        tensorsManager.budget, tensorsManager.strategy = budget, "flow"
        if taught:
            seen.teach(model)
        tensorsManager.reset_stats()
        with torch.no_grad():
            found = model(token, [[] for _ in model.blocks])
        return tensorsManager.stats()["prefetched_nbytes"], found.tolist()

    cold_nbytes, expected = fetched_ahead(taught=False)
    warm_nbytes, found = fetched_ahead(taught=True)
    assert found == expected
    assert cold_nbytes == 0
    assert warm_nbytes > budget / 2
    with pytest.raises(torchTensorRef.ConfigError, match="build the real model first"):
        seen.teach(nn.Linear(3, 3))


STACK = """
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Stack()
budget = sum(p.nbytes for p in model.parameters()) // 2
"""
WARM = f"""
import sys
import torchTensorRef
from torchTensorRef import tensorsManager
import torch

torch.nn.functional.relu(torch.ones(3))  # other operators come first: they number kinds
{STACK}
tensorsManager.device, tensorsManager.strategy = "sim", "flow"
tensorsManager.budget = budget
tensorsManager.history = sys.argv[1]
assert tensorsManager.history.record.is_from_file
with torch.no_grad():
    model(torch.ones(2, 64))
print(tensorsManager.stats()["prefetched_nbytes"])
tensorsManager.strategy = "lru"
assert tensorsManager.history is None
"""


def test_history_comes_from_the_file_of_another_process(manage, script, tmp_path):
    kept, names = str(tmp_path / "flow.json"), {"torch": torch}
    exec(STACK, names)
    model, budget = names["model"], names["budget"]
    asked = {"device": "rtx4060", "budget": budget, "steps": 2}
    torchTensorRef.forecast(model, torch.ones(2, 64), **asked).save(kept)
    manager = manage("flow", budget)
    with torch.no_grad():
        model(torch.ones(2, 64))
    assert manager.stats()["prefetched_nbytes"] == 0, "it was asked, and nobody was taught"
    done = processes.python(script(WARM), kept)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4 * 64 * 64  # a fourth of the weights, and more


def test_a_history_that_cannot_be_one(manage, tmp_path):
    manager = manage("flow")
    with pytest.raises(torchTensorRef.ConfigError, match="history is a Forecast, the path"):
        manager.history = 3
    with pytest.raises(torchTensorRef.ConfigError, match="cannot be read: No such file"):
        manager.history = tmp_path / "none.json"
    (tmp_path / "old.json").write_text('{"format": 1}')
    with pytest.raises(torchTensorRef.ConfigError, match="it has format 1, and 2 is what is read"):
        manager.history = str(tmp_path / "old.json")
    seen = torchTensorRef.forecast(nn.Linear(3, 3), torch.ones(3), device=SPEC)
    with pytest.raises(torchTensorRef.ConfigError, match="build the real model first"):
        manager.history = seen
    assert manager.history is None
    model = nn.Linear(3, 3)
    seen = torchTensorRef.forecast(model, torch.ones(3), device=SPEC)
    manager.history = seen
    assert manager.history is seen
    manager.history = None
    assert manager.history is None


def test_asking_changes_no_version_and_nothing_that_is_held_outside():
    """A graph of before could not be gone through: what it had saved counted as modified."""
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    whole, array = torch.zeros(4), torch.ones(4).numpy()
    part, shared = whole[1:3], torch.from_numpy(array)
    loss = model(x).square().mean()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        part.mul_(2)
        shared.add_(whole.add_(1))
        shared.tolist()
        torch._foreach_add_([whole, shared], 1)

    seen = torchTensorRef.forecast(program, device=SPEC)
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in {
        op.name for op in seen.record.ops
    }
    assert [t._version for t in (*model.parameters(), whole, part, shared)] == [1, 1, 0, 0, 0]
    loss.backward()
    array[0] = 9
    assert (whole.tolist(), shared.tolist()) == ([0] * 4, [9, 1, 1, 1])
    shared.add_(1)
    assert array.tolist() == [10, 2, 2, 2]


def test_what_was_computed_meanwhile_is_taken_back():
    """What was asked for between two writes was taken for what the tensor had before."""
    x = torch.zeros(3)

    def program() -> None:
        for _ in range(3):
            x.add_(1)
            assert x.sum().item() == 3 * x[0].item()

    torchTensorRef.forecast(program, device=SPEC)
    assert x.tolist() == [0, 0, 0]
    torchTensorRef.forecast(program, device=SPEC, values="zeros")
    assert x.tolist() == [0, 0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_worker_of_the_program_sends_what_it_was_promised():
    """The thread that sends it was in no scope: its error was nobody's, and all waited for ever."""
    sent = []

    def program() -> None:
        data = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.arange(4))
        for x, y in torch.utils.data.DataLoader(data, 2, num_workers=1, timeout=30):
            sent.append((x.shape, y.tolist()))

    torchTensorRef.forecast(program, device=SPEC)
    assert sent == [((2, 3), [0, 1]), ((2, 3), [2, 3])]


@pytest.mark.parametrize("values", ["compute or zeros", "zeros"])
def test_data_that_the_program_reads_is_let_go_of(values):
    """The peak that was foretold had the batches of all steps."""

    def steps(count: int, batch: Any) -> Any:
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(count):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
            yield

    def foretold(count: int, batch: Any) -> tuple[int, int]:
        seen = torchTensorRef.forecast(steps, count, batch, device=SPEC, values=values)
        return seen.peak_nbytes, seen.enough_nbytes

    rows = [[1.0] * 16] * 32
    expected = foretold(3, lambda: torch.ones(32, 16))
    assert [foretold(count, lambda: torch.tensor(rows)) for count in (3, 8)] == [expected] * 2


def test_the_time_foretold_is_that_of_the_budget_on_a_larger_card_too():
    def training() -> Any:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        x = torch.rand(8, 32)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            yield

    cards = [SPEC.scaled(capacity=nbytes) for nbytes in (40_000, 10_000_000)]
    tight, ample = (torchTensorRef.forecast(training, device=c, budget=40_000) for c in cards)
    assert [step.time_ns for step in tight.steps] == [step.time_ns for step in ample.steps]


def test_a_function_with_an_empty_cell_can_be_forecast():
    """As one that calls a function which is defined after it, or never."""
    linear = nn.Linear(4, 4)

    def run(x: torch.Tensor) -> Any:
        return linear(x) if x.dim() == 2 else later(x)

    seen = torchTensorRef.forecast(run, torch.ones(2, 4), device="sim")
    assert seen.steps[0].op_count > 0
    if not seen.steps:

        def later(x: torch.Tensor) -> Any:
            return x


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"device": ""}, "no simulated device"),
        ({"device": 5}, "no simulated device"),
        ({"steps": True}, "once or more often"),
        ({"values": True}, "answers nothing"),
        ({"values": {3: 3}}, "no text"),
        ({"values": {"itme": 3}}, "Did you mean 'item'"),
        ({"values": {"nonzeros": 3}}, "Did you mean 'nonzero'"),
    ],
)
def test_what_a_forecast_cannot_be_told(said, hint):
    with pytest.raises(ConfigError, match=hint):
        torchTensorRef.forecast(lambda: None, **said)


def test_answers_by_names_of_operators_are_taken():
    values = {"item": 3, "nonzero": torch.zeros(1, 1), "my_own_operator": 4}
    torchTensorRef.forecast(lambda: None, values=values)
