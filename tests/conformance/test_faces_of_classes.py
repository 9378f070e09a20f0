"""What a program asks of the class of a parameter, and makes with it: as with plain torch.

Injection is on: whatever the programs make is a TensorRef, unless it is of a class of their own.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import TensorRef
from torchTensorRef.memory import core

from ..support.faces import failure
from ..support.injection import assert_same_injected, injected, kind_of
from ..support.programs import accelerator_work

OF_ITS_OWN = "a tensor of a program's own class stays what it is"


class Tagged(nn.Parameter):
    """A parameter of a library's own, as it comes: nothing but another class."""


class Quantized(nn.Parameter):
    """One that is made over the memory of what it is given, and carries something along (GGUF)."""

    def __new__(cls, data: Any, requires_grad: bool = False, kind: Any = None) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.kind = kind
        return made

    def as_tensor(self) -> Any:
        return torch.Tensor._make_subclass(torch.Tensor, self, self.requires_grad)


class Answering(nn.Parameter):
    """One whose class sees what torch's functions do with it, and gives its own class back."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(cls) if func is torch.Tensor.mul else result


class Loaded(nn.Parameter):
    """One with arguments of its own, that knows how it is loaded (vLLM)."""

    def __new__(cls, data: Any, **options: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Any, loader: Callable[..., None]) -> None:
        self.loader = loader


@pytest.fixture
def same(manage) -> Callable[..., None]:
    """Give `same(program)`: under injection it gives what it gives with plain torch."""
    manager = manage("lru")
    return lambda program, **reasons: assert_same_injected(program, manager, **reasons)


def facts(p: Any) -> list[Any]:
    """What can be asked of a parameter without naming TensorRef."""
    return [
        isinstance(p, torch.Tensor),
        isinstance(p, nn.Parameter),
        isinstance(p, nn.Buffer),
        p.requires_grad,
        p.is_leaf,
        p.device.type,
        str(p.dtype),
        tuple(p.shape),
    ]


def computed() -> Any:
    """Something for the accelerator to do, where a program computes nothing else."""
    return torch.rand(64, 64) @ torch.rand(64, 64) + 1


def made_anew(p: Any, device: str) -> list[Any]:
    """The ways in which libraries make a parameter of a parameter's class."""
    other = torch.ones(2, 2, device=device)
    return [
        *(type(p)(other, requires_grad=grad) for grad in (True, False)),
        type(p)(p.to(device), requires_grad=p.requires_grad),
        type(p)(p.data.to(device), requires_grad=True).to(device),
        type(p)(other, False),
        type(p)(data=other, requires_grad=False),
        p.__class__(other, requires_grad=True),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_is_made_anew_by_its_class(same, device):
    def program() -> Any:
        model = nn.Linear(2, 2)
        found = []
        for turn in range(3):
            made = made_anew(model.weight, device)
            found += map(facts, made)
            model._parameters["weight"] = made[turn]  # as accelerate does, past registration
            model.weight = made[turn]
            found += [facts(model.weight), list(model.state_dict()), len(list(model.parameters()))]
        return [found, [p.detach() for p in made if device == "cpu"], computed()]

    same(program)


def test_what_torchs_classes_refuse_is_refused_alike(same):
    def program() -> Any:
        p, x = nn.Linear(2, 2).weight, torch.ones(2)
        return [
            *(
                failure(call)[0]
                for call in (
                    lambda: type(p)(x, requires_grad=True, extra=1),
                    lambda: type(p)(x, True, 3),
                    lambda: setattr(p, "data", torch.empty(2, 2, device="meta")),
                    lambda: setattr(p, "data", 3),
                    lambda: type(x)("text"),
                    lambda: torch.Tensor._make_subclass(int, x),
                )
            ),
            failure(lambda: setattr(p, "data", torch.empty(2, 2, device="meta")))[1],
            computed(),
        ]

    same(program)


def test_a_tensor_is_made_anew_by_its_class(same):
    def program() -> Any:
        x = torch.rand(3)
        shared = type(x)(x)
        shared.mul_(2)
        return [
            type(x)([1.0, 2.0]),
            type(x)(2, 3).shape,
            type(x)(torch.Size([2])).shape,
            type(x)(),
            # A constructor of C++'s reads numbers from memory: docs/known-issues.md.
            *(() if core.library is not None else (type(x)([x[0], x[1]]),)),
            shared,
            x,
            facts(shared),
            computed(),
        ]

    same(program, plain_because="" if core.library is None else "constructors of C++'s make it")


@pytest.mark.parametrize("kind", [Tagged, Quantized, Answering])
def test_a_class_of_its_own_over_the_same_memory(same, kind):
    def program() -> Any:
        data = torch.rand(3, 3)
        p = kind(data, requires_grad=True)
        model = nn.Linear(3, 3)
        model.weight = p
        x = torch.rand(2, 3)
        y = model(x)
        y.square().sum().backward()
        with torch.no_grad():
            p.add_(1)
        data.mul_(2)
        return [
            [type(p) is kind, isinstance(p, kind), type(model.weight) is kind, model.weight is p],
            facts(p),
            [type(q) is kind for q in model.parameters()],
            [type(p * 2) is kind, type(p + 1) is kind],
            [y.detach(), p.grad, data, p.detach().as_subclass(torch.Tensor), model(x).detach()],
            [type(t).__name__ == kind.__name__ for t in model.state_dict().values()],
        ]

    same(program, plain_because=OF_ITS_OWN)


def test_a_class_of_its_own_carries_what_it_notes(same):
    def program() -> Any:
        q = Quantized(torch.arange(12, dtype=torch.uint8).reshape(3, 4), kind=7)
        loaded = Loaded(torch.zeros(2, 2), loader=lambda p, x: p.data.copy_(x))
        loaded.loader(loaded, torch.ones(2, 2))
        twin = copy.deepcopy(q)
        model = nn.Module()
        model.q, model.loaded = q, loaded
        x = torch.rand(4)
        return [
            [q.kind, type(twin) is Quantized, type(loaded) is Loaded],
            facts(q),
            facts(loaded),
            (q.as_tensor().float() @ x),
            loaded.detach() @ torch.ones(2),
            pickle.loads(pickle.dumps(q.as_tensor())),
            [type(p) for p in model.to(torch.float64).parameters()],
        ]

    same(program, plain_because=OF_ITS_OWN)


def test_an_operator_with_a_class_of_its_own_runs_on_the_accelerator(manage):
    manager = manage("lru")
    with injected():
        p, x = Tagged(torch.rand(8, 8)), torch.rand(8, 8)
        before = accelerator_work(manager)
        y = x @ p
    assert isinstance(y, TensorRef)
    assert accelerator_work(manager) > before
    assert manager.stats()["host_op_count"] == 0


def test_copies_and_pickles(same):
    def program() -> Any:
        model = nn.Linear(3, 2)
        model.weight.noted = "here"
        model.register_buffer("seen", torch.zeros(2))
        model.kept = nn.Buffer(torch.ones(2), persistent=False)
        twins = [
            copy.copy(model.weight),
            copy.deepcopy(model.weight),
            copy.deepcopy(model).weight,
            pickle.loads(pickle.dumps(model.weight)),
            pickle.loads(pickle.dumps(model)).weight,
        ]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        back = torch.load(file, weights_only=False)
        return [
            [facts(twin) for twin in (*twins, back.weight)],
            [getattr(twin, "noted", "") for twin in twins],
            [facts(back.kept), facts(back.seen), sorted(back.state_dict())],
            twins[0].detach() + 1,
        ]

    same(program)


CONVERSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "to meta": lambda m, states: m.to("meta"),
    "to meta and back": lambda m, states: m.to("meta").to_empty(device="cpu"),
    "to_empty": lambda m, states: m.to_empty(device="cpu"),
    "double": lambda m, states: m.double(),
    "assigned on meta": lambda m, states: m.to("meta").load_state_dict(states, assign=True),
    "assigned": lambda m, states: m.load_state_dict(states, assign=True),
    "parameters assigned": lambda m, states: m.load_state_dict(
        {name: nn.Parameter(tensor) for name, tensor in states.items()}, strict=False, assign=True
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_modules_are_converted_and_loaded(same, name):
    def program() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, affine=True))
        model[0].kept = nn.Buffer(torch.rand(2))
        states = copy.deepcopy(model.state_dict())
        CONVERSIONS[name](model, states)
        tensors = [*model.parameters(), *model.buffers()]
        return [
            [facts(t) for t in tensors],
            [] if "meta" in name or "empty" in name else [t.detach() for t in tensors],
            computed(),
        ]

    same(program)


def test_tensors_are_swapped(same):
    def program() -> Any:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3), requires_grad=False)
        own, x = Tagged(torch.full((2,), 5.0)), torch.rand(4)
        torch.utils.swap_tensors(a, b)
        torch.utils.swap_tensors(own, x)
        model = nn.Linear(2, 2)
        first = model.weight
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return [
            [facts(t) for t in (a, b, own, x, model.weight)],
            [model.weight is first, type(x) is Tagged, type(own) is Tagged],
            [a.detach(), b.detach(), own, x.detach().as_subclass(torch.Tensor)],
            b.detach() + 1,
        ]

    same(program, plain_because=OF_ITS_OWN)


def lazy_model() -> nn.Module:
    """Layers that learn their sizes from the first batch."""
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def test_lazy_parameters_are_filled(same):
    def program() -> Any:
        model = lazy_model()
        before = [isinstance(p, nn.UninitializedParameter) for p in model.parameters()]
        optimizer_before = len(list(model.parameters()))
        y = model(torch.rand(4, 5))
        y.sum().backward()
        other = lazy_model()
        other.load_state_dict(model.state_dict())
        own = nn.UninitializedParameter(requires_grad=False)
        own.materialize((2, 2), dtype=torch.float64)
        buffer = nn.UninitializedBuffer()
        buffer.materialize((3,))
        with torch.no_grad():
            own.fill_(2)
        return [
            before,
            optimizer_before,
            [facts(t) for t in (*model.parameters(), *model.buffers(), own, buffer)],
            y.detach(),
            [p.grad for p in model.parameters()],
            list(other.state_dict().values()),
            own.detach() * 2,
        ]

    same(program)


def test_what_a_lazy_module_has_is_managed(manage):
    manage("lru")
    with injected():
        model = lazy_model()
        model(torch.rand(4, 5))
    kinds = {kind_of(t) for t in (*model.parameters(), *model.buffers())}
    assert kinds == {TensorRef}
