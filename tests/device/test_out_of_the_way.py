"""On a device that is none of the simulated: numbers given by value, and steps of optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from torchTensorRef import TensorRef
from torchTensorRef.inject import hooks
from torchTensorRef.interception.by_value import BY_VALUE_AT_MOST

from ..support.differential import differences


@pytest.fixture
def ample(manage: Callable[..., Any], scale: Any) -> Iterator[Any]:
    """A manager with room for everything, whose hooks are there."""
    manager = manage("lru", scale.nbytes(64 << 20))
    hooks.install()
    return manager


def injected(make: Callable[[], Any]) -> Any:
    """What a program makes, which is born at home."""
    with hooks.is_disabled.entered(False):
        return make()


def needs_a_ready_path(manager: Any) -> None:
    if manager.residency.books.main.exchanges_storages:
        pytest.skip("every operator is decided upon there, so numbers are fetched")


# -- numbers that travel by value -----------------------------------------------------------------


@pytest.mark.parametrize("value", [[7], 0.1, [[True]]])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_number_at_home_is_given_by_value(ample: Any, value: Any, is_first: bool) -> None:
    needs_a_ready_path(ample)
    plain, number = torch.rand(5), torch.tensor(value)
    ref, made = ample.adopt(plain.clone()).toGPU(), injected(lambda: torch.tensor(value))
    fetched = ample.stats()["fetched_nbytes"]
    with torch.no_grad():
        result = torch.mul(made, ref) if is_first else torch.mul(ref, made)
        expected = torch.mul(number, plain) if is_first else torch.mul(plain, number)
    assert differences(expected, result) == []
    assert result.proxyInfo.device == ample.residency.books.main.name
    assert ample.stats()["fetched_nbytes"] == fetched
    assert made.proxyInfo.device == "cpu"


def test_a_number_that_is_used_again_and_again_is_fetched(ample: Any) -> None:
    ref, made = ample.adopt(torch.rand(5)).toGPU(), injected(lambda: torch.arange(7, 8))
    before = ample.stats()["fetch_count"]
    with torch.no_grad():
        for _ in range(BY_VALUE_AT_MOST + 3):
            ref * made
    assert ample.stats()["fetch_count"] == before + 1


def test_a_list_may_have_empty_ones_at_home(ample: Any) -> None:
    needs_a_ready_path(ample)
    ref, made = ample.adopt(torch.rand(2, 3)).toGPU(), injected(lambda: torch.zeros(0, 3))
    fetches = ample.stats()["fetch_count"]
    with torch.no_grad():
        result = torch.cat([made, ref])
    assert ample.stats()["fetch_count"] == fetches
    assert differences(ref, result) == []


def test_a_number_is_not_carried_where_there_is_no_room(
    manage: Callable[..., Any], device: Any
) -> None:
    if not hasattr(device, "double"):
        pytest.skip("an allocator takes more than it is asked for: no budget fits a block exactly")
    manager = manage("lru", 16_388)
    hooks.install()
    held = manager.adopt(torch.zeros(4096)).toGPU()
    target = held.target
    ref, made = manager.adopt(torch.ones(1)).toGPU(), injected(lambda: torch.arange(7, 8))
    with torch.no_grad():
        assert torch.mul(ref, made).item() == 7.0
    assert target.numel() == 4096


def test_what_an_operator_writes_is_not_carried(ample: Any) -> None:
    ref, made = ample.adopt(torch.rand(1)).toGPU(), injected(lambda: torch.full((1,), 7.0))
    expected = 7.0 + ref.item()
    with torch.no_grad():
        made.add_(ref)
    assert made.item() == pytest.approx(expected)


# -- steps of optimizers --------------------------------------------------------------------------

STEPPERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    return model, torch.rand(5, 8)


def trained(model: Any, x: Any, kind: Any, steps: int = 5, **options: Any) -> Any:
    """Train, and return the optimizer."""
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        with torch.enable_grad():
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return optimizer


def twins(manager: Any) -> tuple[Any, Any, Any, Any]:
    """A plain model and its batch where the kernels are, and ours."""
    model, x = small()
    ours, mine = manager.adopt(copy.deepcopy(model)), manager.adopt(x.clone()).toGPU()
    there = manager.residency.books.main.torch_device
    return model.to(there), x.to(there), ours, mine


def at_home(value: Any) -> Any:
    """The same values in plain memory of the host, if they are plain."""
    return tree_map_only(torch.Tensor, lambda t: t if isinstance(t, TensorRef) else t.cpu(), value)


@pytest.mark.parametrize(("kind", "options"), STEPPERS)
def test_steps_are_those_of_plain_torch(ample: Any, kind: Any, options: Any) -> None:
    model, x, ours, mine = twins(ample)
    options = {"foreach": False, **options}  # what torch would choose depends on the device
    plain = trained(model, x, kind, **options)
    optimizer = trained(ours, mine, kind, **options)
    assert differences(at_home(list(model.parameters())), list(ours.parameters())) == []
    state = at_home(plain.state_dict()["state"])
    assert differences(state, optimizer.state_dict()["state"]) == []
    assert plain.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for held in optimizer.state.values():
        for value in held.values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert isinstance(value, TensorRef)
    assert all(isinstance(p.grad, TensorRef) for p in ours.parameters())


def test_a_graph_from_before_a_step_is_refused(ample: Any) -> None:
    _, _, ours, x = twins(ample)
    optimizer = trained(ours, x, torch.optim.AdamW)
    with torch.enable_grad():
        loss = ours(x).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def stepped(make: Callable[[list[Any]], Any], bring: Callable[[Any], Any]) -> list[Any]:
    """Four steps of SGD on two parameters, after `make` has done something to them."""
    torch.manual_seed(5)
    parameters = [nn.Parameter(torch.rand(12)) for _ in range(2)]
    module = bring(nn.ParameterList(parameters))
    parameters = list(module)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for number in range(4):
        for place, parameter in enumerate(parameters):
            parameter.grad = bring(torch.full((12,), 1.0 + number + place).to(parameter.dtype)) * 1
        if number == 2:
            make(parameters)
        optimizer.step()
    return [*parameters, *(held["momentum_buffer"] for held in optimizer.state.values())]


def tie(parameters: list[Any]) -> None:
    parameters[1].data = parameters[0].data


def be_its_own_gradient(parameters: list[Any]) -> None:
    parameters[0].grad = parameters[0].data


def halve(parameters: list[Any]) -> None:
    parameters[0].data = parameters[0].data.double()


@pytest.mark.parametrize("make", [tie, be_its_own_gradient, halve])
def test_odd_parameters_are_stepped_as_by_plain_torch(ample: Any, make: Any) -> None:
    expected = stepped(make, lambda x: x)
    result = stepped(make, ample.adopt)
    assert differences(expected, result) == []


def test_small_parameters_on_the_host_alone_are_stepped() -> None:
    from torchTensorRef import tensorsManager

    tensorsManager.device = "cpu"
    hooks.install()
    try:
        parameter = tensorsManager.adopt(nn.ParameterList([nn.Parameter(torch.ones(2))]))[0]
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.grad = (tensorsManager.adopt(torch.ones(2)) * 2).detach()
        optimizer.step()
        assert parameter.tolist() == [pytest.approx(0.8)] * 2
    finally:
        tensorsManager.device = "sim"
