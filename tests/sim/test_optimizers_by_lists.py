"""Optimizers with an operator for all parameters at once, where all parameters do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..support.programs import COUNTS_OF_STEPS, assert_right, trained
from ..support.sweeps import one_in

STEPS, WIDTH, DEPTH = 4, 24, 8
#: What the parameters of the model take.
MODEL_NBYTES = 4 * DEPTH * WIDTH * (WIDTH + 1)

BY_LISTS: dict[str, Callable[[Any], Optimizer]] = {
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, WIDTH), torch.rand(3, WIDTH)


@pytest.mark.parametrize("name", one_in(2, BY_LISTS))
def test_in_groups_that_fit_they_compute_what_they_do_in_one(manage: Any, name: str) -> None:
    manager = manage("flow", 2 * MODEL_NBYTES)
    program = trained(make_model, BY_LISTS[name], make_batch, STEPS)
    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)
    assert not manager.stats()["host_fallback_count"]


@pytest.mark.parametrize("what", ["momentum that some lack, fused", "sparse gradients"])
def test_a_step_that_torch_refuses_has_changed_nothing(manage: Any, what: str) -> None:
    def program(bring: Any) -> Any:
        parameters = [bring(nn.Parameter(torch.rand(WIDTH, WIDTH))) for _ in range(DEPTH)]
        loss = sum((p * p).sum() for p in parameters[:-1])
        if what == "sparse gradients":
            optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, foreach=True)
            rows = torch.tensor([1, 2])
            loss = loss + nn.functional.embedding(bring(rows), parameters[-1], sparse=True).sum()
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
            loss.backward()
            optimizer.step()
            loss = sum((p * p).sum() for p in parameters)
        loss.backward()
        before = [p.detach().clone() for p in parameters]
        with pytest.raises((TypeError, RuntimeError)):
            optimizer.step()
        assert all(torch.equal(p, one) for p, one in zip(parameters, before, strict=True))
        return parameters

    assert_right(program, manage("lru", 2 * MODEL_NBYTES))


@pytest.mark.parametrize("what", ["tied by their data", "rows and a column", "parts of one"])
@pytest.mark.parametrize("name", ["adamw", "asgd"])
def test_parameters_with_memory_in_common_are_written_as_one_group_is(
    manage: Any, name: str, what: str
) -> None:
    def program(bring: Any) -> Any:
        base = bring(torch.rand(DEPTH * WIDTH, WIDTH))
        if what == "tied by their data":
            parameters = [nn.Parameter(base), nn.Parameter(torch.zeros_like(base))]
            parameters[1].data = parameters[0].data
        elif what == "rows and a column":
            parameters = [base[:10].detach(), base[:, 5].detach(), base[20:].detach()]
        else:
            parameters = [part.detach() for part in base.split(WIDTH)]
        for p in parameters:
            p.requires_grad_()
        optimizer = BY_LISTS[name](parameters)
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum(((n + 2) * p.pow(2)).sum() for n, p in enumerate(parameters)).backward()
            optimizer.step()
        return [p.detach() for p in parameters]

    assert_right(program, manage("flow", MODEL_NBYTES), plain_because=COUNTS_OF_STEPS)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_in_groups_that_fit(manage: Any, norm_type: float) -> None:
    def program(bring: Any) -> Any:
        parameters = [bring(nn.Parameter(torch.rand(WIDTH, WIDTH))) for _ in range(DEPTH)]
        norms = []
        for _ in range(STEPS):
            sum((p * p).sum() for p in parameters).backward()
            norms.append(
                nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=norm_type, foreach=True)
            )
            nn.utils.clip_grad_value_(parameters, 0.01, foreach=True)
        return norms, [p.grad for p in parameters]

    manager = manage("flow", MODEL_NBYTES * 3 // 4)
    assert_right(program, manager)
    assert not manager.stats()["host_fallback_count"]


def test_weights_are_averaged_in_groups_that_fit(manage: Any) -> None:
    def program(bring: Any) -> Any:
        model = bring(make_model())
        average = get_ema_multi_avg_fn(0.9)
        averaged = AveragedModel(model, multi_avg_fn=average)
        for _ in range(STEPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            averaged.update_parameters(model)
        return list(averaged.module.parameters())

    manager = manage("flow", MODEL_NBYTES * 3 // 4)
    assert_right(program, manager)
    assert not manager.stats()["host_fallback_count"]


def groups_of(count: int, ours: Any) -> Any:
    """Group so many parameters with as many moments, as an optimizer does."""
    lists = [[ours(torch.rand(WIDTH)) for _ in range(count)] for _ in range(2)]
    return Optimizer._group_tensors_by_device_and_dtype([*lists, []], with_indices=True), lists


def test_groups_are_torchs_until_memory_is_short(manage: Any) -> None:
    manager = manage("lru", 16 * 4 * WIDTH)
    groups, _ = groups_of(4, manager.adopt)
    assert len(groups) == 1
    many = [manager.adopt(torch.rand(WIDTH)).toGPU() for _ in range(20)]
    assert manager.residency.books.is_pressed
    groups, lists = groups_of(5, manager.adopt)
    found = [indices for _, indices in groups.values()]
    assert found == [[0], [1], [2], [3], [4]]
    for (device, dtype), (parts, (place,)) in groups.items():
        assert (device, dtype) == (torch.device("cpu"), torch.float32)
        assert [len(part) for part in parts] == [1, 1, 0]
        assert all(part[0] is tensors[place] for part, tensors in zip(parts, lists, strict=False))
    del many


def test_lists_larger_than_the_budget_are_divided_at_once(manage: Any) -> None:
    manager = manage("genoa", 16 * 4 * WIDTH)  # which gives all back: memory is never short
    groups, _ = groups_of(9, manager.adopt)
    assert not manager.residency.books.is_pressed
    assert [indices for _, indices in groups.values()] == [[place] for place in range(9)]
