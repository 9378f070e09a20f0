"""Ten steps of training: losses, gradients, parameters and optimizer state are plain torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..support.programs import COUNTS_OF_STEPS, Bring, assert_right, state_of, trained
from ..support.sweeps import in_turn

STEPS = 10

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 3)
    )


def make_deep_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(n, 24) for n in (12, 24, 24, 24, 24, 24)), nn.Linear(24, 3))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(6, 12), torch.rand(6, 3)


MANAGERS = [("lru", 1 << 20), ("genoa", 6_000), ("flow", 6_000)]


@pytest.fixture(params=MANAGERS)
def manager(manage, request):
    return manage(*request.param)


@pytest.mark.parametrize(
    ("name", "manager"), in_turn(OPTIMIZERS, MANAGERS, each=2), indirect=["manager"]
)
def test_every_optimizer(manager, name):
    program = trained(make_model, OPTIMIZERS[name], make_batch, STEPS)
    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)


def test_accumulation_clipping_and_a_schedule(manager):
    def program(bring: Bring) -> Any:
        model = bring(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS // 2)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [4])
        norms = []
        for step in range(STEPS):
            x, y = (bring(tensor) for tensor in make_batch())
            (nn.functional.mse_loss(model(x), y) / 2).backward()
            if step % 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 4 == 1)
                schedule.step()
        return [norms, schedule.get_last_lr(), *state_of(model, optimizer)]

    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(manager, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_model(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=use_reentrant)
            return self.second(x)

    program = trained(Checkpointed, OPTIMIZERS["adamw"], make_batch, steps=6)
    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_with_a_gradient_scaler(manager, enabled):
    def program(bring: Bring) -> Any:
        model = bring(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=16.0, growth_interval=3)
        for _ in range(8):
            x, y = (bring(tensor) for tensor in make_batch())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [scaler.get_scale(), *state_of(model, optimizer)]

    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)


def test_a_scaler_skips_a_step_with_infinite_gradients(manager):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        for factor in (1e30, 1.0, 1e-30):
            optimizer.zero_grad()
            scaler.scale((model(bring(torch.rand(2, 4))) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [scaler.get_scale(), *state_of(model, optimizer)]

    assert_right(program, manager)


def test_double_backward(manager):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
        x = bring(torch.rand(3, 5)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return [slope, x.grad, [p.grad for p in model.parameters()]]

    assert_right(program, manager)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
def test_training_goes_on_after_the_state_was_saved_and_loaded(manager, tmp_path):
    def program(bring: Bring) -> Any:
        model = bring(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(6):
            x, y = (bring(tensor) for tensor in make_batch())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step == 2:
                torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
                model = bring(make_model())
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
                loaded = torch.load(tmp_path / "state", weights_only=True)
                model.load_state_dict(loaded[0])
                optimizer.load_state_dict(loaded[1])
        return state_of(model, optimizer)

    assert_right(program, manager, plain_because="what is loaded without injection is plain")


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_the_time_is_that_of_the_budget_on_a_larger_card_too(manage, strategy):
    """What is freed, and still read by a copy home, is no room where the card has more."""

    def took_ns(card_nbytes: int) -> int:
        manager = manage(strategy, card_nbytes)
        manager.budget = 20_000
        optimizer: Any = OPTIMIZERS["adam"]
        trained(make_deep_model, optimizer, make_batch, STEPS)(manager.adopt)
        return int(manager.stats()["time_ns"])

    assert took_ns(20_000) == took_ns(10_000_000)
