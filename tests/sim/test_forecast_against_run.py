"""The benchmark that holds forecasts against runs: it measures, and finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import forecast_against_run as benchmark
from benchmarks.model_shapes import Shape
from torchTensorRef import forecast
from torchTensorRef.inject import hooks
from torchTensorRef.promises import replayer
from torchTensorRef.promises.replayer import Replayer

from ..support.sweeps import by_pairs, in_turn, usual


@pytest.fixture(autouse=True)
def injected(manage):
    manage()
    with hooks.is_disabled.entered(False):
        yield


def run(model: Any) -> Iterator[str]:
    with torch.no_grad():
        for number in range(3):
            model(torch.ones(8, 32))
            yield f"pass {number}"


SHAPE = Shape(
    "tower", lambda: nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8))), run
)


def test_a_forecast_is_what_a_run_does():
    said: list[str] = []
    figures = dict(benchmark.agreement(SHAPE, said.append))
    assert {name for name in figures if name.endswith("/time")} == {
        f"tower/{budget}/time" for budget in benchmark.BUDGETS
    }
    assert all(figure.value == 0 for figure in figures.values()), said
    assert benchmark.result_of(figures) == {"worst_bytes": 0, "worst_time": 0}


class Words(nn.Module):
    """A table, far larger than the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 32)
        self.layer = nn.Linear(32, 32)

    def forward(self, words):
        return self.layer(self.table(words)).sum()


def look_up(model: Any) -> Iterator[str]:
    with torch.no_grad():
        for number in range(3):
            model(torch.ones(8, dtype=torch.long))
            yield f"pass {number}"


def test_a_forecast_knows_that_rows_move_alone():
    said: list[str] = []
    figures = dict(benchmark.agreement(Shape("words", Words, look_up), said.append))
    assert all(figure.value == 0 for figure in figures.values()), said


class Stacked(nn.Module):
    """Layers that lie in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Parameter(torch.rand(32, 128, 64))

    def forward(self, x):
        for number in (0, 7, 31):
            x = nn.functional.linear(x @ self.layers[number].t(), self.layers[number].t())
        return x.sum()


class Experts(nn.Module):
    """Of sixty-four matrices those that have rows: as many as there are rows, and always others."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.rand(64, 64, 64))
        self.count = 0

    def forward(self, x):
        self.count += 8
        ends = torch.ones(64, dtype=torch.int32).cumsum(0, dtype=torch.int32) - self.count
        return torch._grouped_mm(x, self.matrices, offs=ends.clamp(0, 8)).sum()


def multiply(model: Any) -> Iterator[str]:
    with torch.no_grad():
        for number in range(3):
            model(torch.rand(8, 64))
            yield f"pass {number}"


@pytest.mark.parametrize("kind", [Stacked, Experts])
def test_a_forecast_knows_that_parts_move_alone(kind):
    said: list[str] = []
    figures = dict(benchmark.agreement(Shape("parts", kind, multiply), said.append))
    assert all(figure.value == 0 for figure in figures.values()), said


def training(optimizer: Any, scaled: bool = False, clipped: bool = False) -> Any:
    """Make a program of three steps with an optimizer."""

    def run(model: Any) -> Iterator[str]:
        own = optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for number in range(3):
            own.zero_grad()
            loss = model(torch.ones(8, 4, 32)).square().mean()
            scaler.scale(loss).backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            scaler.step(own)
            scaler.update()
            del loss
            yield f"step {number}"

    return run


class Recurrent(nn.Module):
    """Torch makes the first hidden state of such a layer, as a plain tensor that several read."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(32, 32, num_layers=2)

    def forward(self, x):
        return self.inner(x)[0]


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


TRAINED = {
    "steps": (deep, training(adamw)),
    "a plain number is written": (deep, training(adamw, scaled=True)),
    "plain numbers are put into tensors": (deep, training(torch.optim.Rprop)),
    "plain tensors, RNN": (lambda: Recurrent(nn.RNN), training(adamw)),
    "scratch memory, LSTM": (lambda: Recurrent(nn.LSTM), training(adamw)),
    "plain tensors, GRU": (lambda: Recurrent(nn.GRU), training(adamw)),
}
SAMPLE = usual(list(TRAINED)[:-1], ["plain tensors, GRU"])


@pytest.mark.parametrize(("name", "strategy"), in_turn(SAMPLE, ["flow", "lru"], each=1))
def test_a_forecast_of_training_is_what_a_run_does(name, strategy, monkeypatch):
    make, run = TRAINED[name]
    monkeypatch.setattr(benchmark, "STRATEGY", strategy)
    said: list[str] = []
    figures = dict(benchmark.agreement(Shape("training", make, run), said.append))
    assert all(figure.value == 0 for figure in figures.values()), said


class Encoder(nn.Module):
    """As wide at its end as a layer is large."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss
        self.inner, self.outer = nn.Linear(512, 64), nn.Linear(64, 512)

    def forward(self, x):
        x = x.flatten(1).repeat(16, 4)
        return self.loss(self.outer(self.inner(x)).sigmoid(), x)


@pytest.mark.parametrize(
    "loss", [nn.functional.mse_loss, nn.functional.huber_loss, nn.functional.binary_cross_entropy]
)
def test_a_forecast_knows_what_a_loss_holds(loss, monkeypatch):
    """The memory of some is as large as all of their terms are: where they have been put."""
    monkeypatch.setattr(benchmark, "BUDGETS", (60, 110))
    said: list[str] = []
    shape = Shape("training", lambda: Encoder(loss), training(torch.optim.SGD))
    figures = dict(benchmark.agreement(shape, said.append))
    assert all(figure.value == 0 for figure in figures.values()), said


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, foreach=True)


@pytest.mark.parametrize(
    ("share", "strategy", "clipped"), by_pairs([0.4, 0.6], ["flow", "lru"], [False, True])
)
def test_a_forecast_divides_lists_as_a_run_does(share, strategy, clipped, monkeypatch):
    """And does not wait for operators on lists, which return nothing."""
    monkeypatch.setattr(benchmark, "STRATEGY", strategy)
    shape = Shape("lists", deep, training(foreach, clipped=clipped))
    model = benchmark.made(shape.make, real=False)
    weights_nbytes = benchmark.weights_nbytes(model)
    spec, budget = benchmark.scaled_spec(weights_nbytes), int(4 * weights_nbytes * share)
    seen = forecast(shape.run, model, device=spec, budget=budget, strategy=strategy)
    foretold = [
        (s.time_ns, s.fetched_nbytes, s.written_back_nbytes, s.peak_nbytes) for s in seen.steps
    ]
    assert foretold == benchmark.run(shape, spec, budget)


def test_a_wrong_forecast_is_found(monkeypatch):
    monkeypatch.setattr(replayer, "run_watched", lambda *_: False)
    monkeypatch.setattr(Replayer, "run_ready", lambda *_: False)
    right = Replayer._charge

    def charge_twice(self: Any, *args: Any) -> None:
        right(self, *args)
        right(self, *args)

    monkeypatch.setattr(Replayer, "_charge", charge_twice)
    figures = dict(benchmark.agreement(SHAPE, print))
    assert benchmark.result_of(figures)["worst_time"] > benchmark.TIME_BOUND
