"""What runs at once on a device that is none of the simulated: numbers by value, native steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef.carried import CARRIED_AT_MOST
from torchTensorRef.inject import hooks

from ..support.differential import differences


@pytest.fixture
def steps_natively(ample: Any) -> Any:
    """A manager whose device lets optimizers step natively."""
    if ample.residency.main.torch_device.type != "cpu":
        pytest.skip("on a real accelerator steps are intercepted until that has been measured")
    return ample


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Iterator[Any]:
    """A manager with room for everything, whose hooks are there."""
    manager = manage("lru")
    hooks.install()
    manager.regions = False
    yield manager
    manager.regions = True


def injected(make: Callable[[], Any]) -> Any:
    """What a program makes, which is born at home."""
    token = hooks.is_disabled.set(False)
    try:
        return make()
    finally:
        hooks.is_disabled.reset(token)


# -- numbers that travel by value -----------------------------------------------------------------


@pytest.mark.parametrize("value", [[7], 0.1, [[True]]])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_number_at_home_is_given_by_value(ample: Any, value: Any, is_first: bool) -> None:
    plain, number = torch.rand(5), torch.tensor(value)
    ref, made = ample.adopt(plain.clone()).toGPU(), injected(lambda: torch.tensor(value))
    fetched = ample.stats()["fetched_nbytes"]
    with torch.no_grad():
        result = torch.mul(made, ref) if is_first else torch.mul(ref, made)
        expected = torch.mul(number, plain) if is_first else torch.mul(plain, number)
    assert differences(expected, result) == []
    assert result.proxyInfo.device == ample.residency.main.name
    assert ample.stats()["fetched_nbytes"] == fetched
    assert made.proxyInfo.device == "cpu"


def test_a_number_that_is_used_again_and_again_is_fetched(ample: Any) -> None:
    ref, made = ample.adopt(torch.rand(5)).toGPU(), injected(lambda: torch.arange(7, 8))
    before = ample.stats()["fetch_count"]
    with torch.no_grad():
        for _ in range(CARRIED_AT_MOST + 3):
            ref * made
    assert ample.stats()["fetch_count"] == before + 1


def test_a_list_may_have_empty_ones_at_home(ample: Any) -> None:
    ref, made = ample.adopt(torch.rand(2, 3)).toGPU(), injected(lambda: torch.zeros(0, 3))
    fetches = ample.stats()["fetch_count"]
    with torch.no_grad():
        result = torch.cat([made, ref])
    assert ample.stats()["fetch_count"] == fetches
    assert differences(ref, result) == []


def test_a_number_is_not_carried_where_there_is_no_room(manage: Callable[..., Any]) -> None:
    manager = manage("lru", 16_388)
    hooks.install()
    manager.regions = False
    held = manager.adopt(torch.zeros(4096)).toGPU()
    target = held.target
    ref, made = manager.adopt(torch.ones(1)).toGPU(), injected(lambda: torch.arange(7, 8))
    with torch.no_grad():
        assert torch.mul(ref, made).item() == 7.0
    assert target.numel() == 4096
    manager.regions = True


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
    model, x = small()
    return model, x, manager.adopt(copy.deepcopy(model)), manager.adopt(x.clone()).toGPU()


@pytest.mark.parametrize("goes_home", [False, True])
def test_modules_run_natively_where_gradients_are_noted(
    steps_natively: Any, goes_home: bool
) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)), nn.GELU()), torch.rand(5, 8)
    ours, mine = steps_natively.adopt(copy.deepcopy(model)), steps_natively.adopt(x.clone())
    steps_natively.regions = True
    before = steps_natively.native.native_count
    for module, given in ((model, x), (ours, mine)):
        for _ in range(6):
            loss = module(given).square().mean()
            if goes_home and module is ours:
                steps_natively.bring_all_home()
            loss.backward()
    assert steps_natively.native.native_count == before + 3  # it is found, then learned twice
    assert (
        differences([p.grad for p in model.parameters()], [p.grad for p in ours.parameters()]) == []
    )
    steps_natively.check()


def test_while_memory_is_short_gradients_are_intercepted(manage: Callable[..., Any]) -> None:
    manager = manage("lru", 65_536)
    held = manager.adopt(torch.zeros(12_000)).toGPU()
    model, x, ours, mine = twins(manager)
    larger = manager.adopt(torch.zeros(12_000)).toGPU()
    before = manager.native.native_count
    for module, given in ((model, x), (ours, mine)):
        for _ in range(6):
            module(given).square().mean().backward()
    assert manager.native.native_count == before
    assert (
        differences([p.grad for p in model.parameters()], [p.grad for p in ours.parameters()]) == []
    )
    del held, larger


@pytest.mark.parametrize(("kind", "options"), STEPPERS)
def test_native_steps_are_those_of_plain_torch(
    steps_natively: Any, kind: Any, options: Any
) -> None:
    model, x, ours, mine = twins(steps_natively)
    plain = trained(model, x, kind, **options)
    steps_natively.regions = True
    optimizer = trained(ours, mine, kind, **options)
    assert steps_natively.stats()["native_step_count"] >= 3
    assert differences(list(model.parameters()), list(ours.parameters())) == []
    assert differences(plain.state_dict()["state"], optimizer.state_dict()["state"]) == []
    assert plain.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for held in optimizer.state.values():
        for value in held.values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert type(value) is steps_natively.ref_type
    assert all(type(p.grad) is steps_natively.ref_type for p in ours.parameters())


def test_versions_are_counted_as_where_each_operator_is_seen(steps_natively: Any) -> None:
    counts = []
    for regions in (False, True):
        steps_natively.regions = regions
        _, _, ours, x = twins(steps_natively)
        trained(ours, x, torch.optim.AdamW)
        counts.append([p._version for p in ours.parameters()])
    assert counts[0] == counts[1]


def test_a_graph_from_before_a_native_step_is_refused(steps_natively: Any) -> None:
    steps_natively.regions = True
    _, _, ours, x = twins(steps_natively)
    optimizer = trained(ours, x, torch.optim.AdamW)
    with torch.enable_grad():
        loss = ours(x).square().mean()
    before = steps_natively.stats()["native_step_count"]
    optimizer.step()
    assert steps_natively.stats()["native_step_count"] == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_raises_inside_leaves_the_optimizer_whole(
    steps_natively: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_natively.regions = True
    _, _, ours, x = twins(steps_natively)
    optimizer = trained(ours, x, torch.optim.AdamW)
    groups, keys = optimizer.param_groups, list(optimizer.state)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("inside")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.adam"], "adam", fails)
        with pytest.raises(ZeroDivisionError, match="inside"):
            optimizer.step()
    assert optimizer.param_groups is groups
    assert list(optimizer.state) == keys
    assert not steps_natively.residency.native_blocks
    optimizer.step()
    steps_natively.check()


def test_hooks_and_others_optimizers_see_the_step(steps_natively: Any) -> None:
    steps_natively.regions = True
    _, _, ours, x = twins(steps_natively)
    optimizer = trained(ours, x, torch.optim.AdamW)
    seen = []
    handle = optimizer.register_step_pre_hook(
        lambda stepped, args, kwargs: seen.append((stepped, args[0]))
    )
    before = steps_natively.stats()["native_step_count"]
    optimizer.step()
    handle.remove()
    assert seen == [(optimizer, optimizer)]

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups)
            return super().step(closure)

    mine = trained(ours, x, Mine)
    assert seen[-1] is mine.param_groups
    assert steps_natively.stats()["native_step_count"] == before
    optimizer.step()
    assert steps_natively.stats()["native_step_count"] == before + 1


def test_under_pressure_steps_are_intercepted(manage: Callable[..., Any]) -> None:
    manager = manage("lru", 4096)
    hooks.install()
    model, x, ours, mine = twins(manager)
    if manager.residency.main.torch_device.type != "cpu":
        pytest.skip("the kernels of a real device need more room")
    trained(model, x, torch.optim.AdamW)
    trained(ours, mine, torch.optim.AdamW)
    assert manager.stats()["native_step_count"] == 0
    assert differences(list(model.parameters()), list(ours.parameters())) == []


def test_plain_optimizers_are_left_alone(steps_natively: Any) -> None:
    steps_natively.regions = True
    with torchTensorRef.disabled():
        model, x = small()
        trained(model, x, torch.optim.AdamW)
    assert steps_natively.stats()["native_step_count"] == 0


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
def test_odd_parameters_are_stepped_as_by_plain_torch(steps_natively: Any, make: Any) -> None:
    steps_natively.regions = True
    expected = stepped(make, lambda x: x)
    result = stepped(make, steps_natively.adopt)
    assert differences(expected, result) == []


def test_a_step_that_the_program_wraps_is_called_once(steps_natively: Any) -> None:
    calls = []

    class Own(torch.optim.SGD):
        pass

    whole = Own.step

    def counted(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        return whole(self, closure)

    Own.step = counted
    Own.__module__ = "torch.optim.sgd"
    steps_natively.regions = True
    _, _, ours, x = twins(steps_natively)
    trained(ours, x, Own, steps=4)
    assert len(calls) == 4


def test_small_parameters_on_the_host_alone_are_stepped() -> None:
    from torchTensorRef.manager import tensorsManager

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
