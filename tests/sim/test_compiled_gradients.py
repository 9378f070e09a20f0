"""Compiled modules and functions that are trained: what is saved for the backward pass is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torchTensorRef import TensorRef, options, tensorsManager

from ..support.differential import differences
from ..support.injection import injected, one_thread, plain_result, seed
from ..support.sweeps import usual
from .test_compiler import WIDTH, Backend, Model, batches, fresh_compiler, ours, plainly

__all__ = ["fresh_compiler", "ours"]


def trained(model: nn.Module, compiled: Any, steps: int = 4, *, is_stepped: bool = True) -> Any:
    """Train a model for some steps; return the losses, the weights and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for x in batches(steps):
        optimizer.zero_grad()
        loss = compiled(x)["out"].square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        if is_stepped:
            optimizer.step()
        losses.append(loss.detach())
    return [losses, [p.detach() for p in model.parameters()], gradients]


def test_training_runs_natively(ours):
    backend = Backend()

    def program() -> Any:
        model = Model(2)
        return trained(model, torch.compile(model, fullgraph=True, backend=backend))

    manager = ours(program)
    assert manager.stats()["native_call_count"] == 2 * 3  # the first step is learned
    assert backend.graph_count == 2  # once for plain torch, once for us


@pytest.mark.parametrize("strategy", usual(["flow"], ["lru"]))
def test_by_blocks_what_is_saved_may_leave(ours, strategy):
    backend, count = Backend(), 8
    nbytes = sum(p.nbytes for p in Model(count).parameters())

    def program() -> Any:
        model = Model(count)
        return trained(model, torch.compile(model, fullgraph=True, backend=backend), 5)

    with options(compiled="forced"):
        manager = ours(program, nbytes // 2, strategy)
    # The whole is learned, then its layers.
    assert manager.stats()["native_call_count"] == 2 * count * 3
    assert manager.stats()["peak_resident_nbytes"] <= nbytes // 2
    # Plain torch's whole, and two for all layers: the first is given what has no gradient.
    assert backend.graph_count == 3


class Product(torch.autograd.Function):
    """A product with a derivative of the program's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


def test_what_a_derivative_of_the_programs_own_saves_is_there_in_the_backward_pass(ours):
    """It is kept in a closure; with other backends torch's compiler saves it itself."""

    def program() -> Any:
        module = Scaled()
        compiled, gradients = torch.compile(module, backend="eager"), []
        for value in range(4):
            out = compiled(torch.full((3000,), float(value)) * 1)
            torch.ones(30000).sum()  # what was saved leaves
            out.sum().backward()
            gradients.append(module.weight.grad.clone())
        return gradients

    ours(program, 160 * 1024, "lru", by=plainly)


@pytest.mark.parametrize("backend", usual(["aot_eager"], ["inductor"]))
def test_gradients_are_those_of_plain_compiled_torch(manage, backend):
    """Bit for bit where all is there, and within the compiler's tolerance of not compiling."""

    def program() -> Any:
        model = Model(3)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        return trained(model, compiled, is_stepped=False)

    plain = plain_result(program)
    torch._dynamo.reset()
    manager = manage("lru", 1 << 20)
    seed()
    with injected(), one_thread():
        found = program()
    assert manager.stats()["native_call_count"] == 2 * 3
    assert differences(plain[2], found[2]) == []
    assert differences(plain[0][1:], found[0][1:]) == []
    torch._dynamo.reset()

    def not_compiled() -> Any:
        model = Model(3)
        return trained(model, model, is_stepped=False)

    eager = plain_result(not_compiled)
    for gradient, expected in zip(found[2], eager[2], strict=True):
        torch.testing.assert_close(gradient.cpu(), expected)


def test_what_was_saved_is_managed(manage):
    manager = manage("lru", 1 << 20)
    with injected(), one_thread():
        model = Model(2)
        compiled = torch.compile(model, backend=Backend())
        for x in batches(2):
            compiled(x)["out"].sum().backward()
        before = manager.stats()["resident_nbytes"]
        result = compiled(batches(1)[0])
        held = manager.stats()["resident_nbytes"] - before
        assert held > 4 * 5 * WIDTH * 4  # not the results alone
        del result
        assert manager.stats()["resident_nbytes"] <= before + 5 * WIDTH * 4
    assert manager.stats()["native_call_count"] == 3


def test_a_backward_pass_that_does_not_fit_runs_at_home(ours):
    def program() -> Any:
        model = Model(3)
        compiled = torch.compile(model, backend=Backend())
        losses = []
        for place, x in enumerate(batches(3)):
            loss = compiled(x)["out"].square().mean()
            if isinstance(loss, TensorRef) and place == 2:
                tensorsManager.budget = 8192
            loss.backward()
            losses.append(loss.detach())
        return [losses, [p.grad for p in model.parameters()]]

    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] == 3  # one there and back, one there


def of_function(function: Callable[..., Any]) -> Callable[[], Any]:
    """A program that calls a compiled function three times, with gradients for what it is given."""

    def program() -> Any:
        compiled, found = torch.compile(function, backend=Backend()), []
        for x in batches(3):
            leaf = torch.rand(WIDTH, requires_grad=True)
            x.requires_grad_()
            results = compiled(x * 2, leaf)
            results = results if isinstance(results, (list, tuple)) else (results,)
            heads = [r for r in results if r.requires_grad]
            torch.autograd.backward(heads, [torch.ones_like(head) for head in heads])
            found.append([[r.detach() for r in results], x.grad, leaf.grad])
        return found

    return program


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "results of all kinds": lambda x, leaf: (x * leaf, x.detach().sum(), (x > 0).sum(), x + 1),
    "one is not used": lambda x, leaf: x.exp(),
    "the same twice": lambda x, leaf: (lambda y: (y, y))(x.exp() * leaf),
    "a view of another": lambda x, leaf: (lambda y: (y, y[1:]))(x.sigmoid() * leaf),
    "a part of what it is given": lambda x, leaf: (x[1:], leaf.exp()),
    "what it is given": lambda x, leaf: (x, leaf.exp()),
    "random": lambda x, leaf: nn.functional.dropout(x * leaf, 0.5),
    "written in passing": lambda x, leaf: (x * leaf).sin().mul_(2).add_(1),
    "a part without gradients": lambda x, leaf: (x * leaf.detach(), leaf * 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(ours, name):
    manager = ours(of_function(FUNCTIONS[name]), by=plainly)
    assert manager.stats()["native_call_count"] >= 2 * 2


def raised_by(act: Callable[[], Any]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)[:60]
    return ""


@pytest.mark.parametrize("written", ["weight", "result"])
def test_what_was_saved_and_is_written_is_noticed(ours, written):
    def program() -> Any:
        layer = nn.Linear(WIDTH, WIDTH)
        compiled = torch.compile(lambda x: layer(x).exp(), backend=Backend())
        raised = []
        for x in batches(4):
            result = compiled(x.requires_grad_())
            with torch.no_grad():
                layer.weight.mul_(1) if written == "weight" else result.mul_(1)
            raised.append(raised_by(result.sum().backward)[:20])
        return raised[1:]  # while it is learned it is not looked at

    ours(program)


def test_the_graph_can_be_kept_and_is_freed(ours):
    def program() -> Any:
        model = Model(2)
        compiled, found = torch.compile(model, backend=Backend()), []
        for x in batches(3):
            loss = compiled(x)["out"].square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(raised_by(loss.backward))
        return [found, [p.grad for p in model.parameters()]]

    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] == 2 * 3


def test_a_second_derivative_is_refused(manage):
    manager = manage("lru", 1 << 20)
    with injected(), one_thread():
        compiled = torch.compile(lambda x: x.exp() * x, backend="aot_eager")
        for place, x in enumerate(batches(2)):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
            if place:
                with pytest.raises(RuntimeError, match="differentiated twice"):
                    gradient.sum().backward()
    assert manager.stats()["native_call_count"] == 2


@pytest.mark.parametrize("who", ["hooks", "checkpoint"])
def test_where_somebody_else_saves_it_is_intercepted(ours, who):
    def program() -> Any:
        model = Model(2)
        compiled, seen = torch.compile(model, backend=Backend()), []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.shape)
            return tensor

        for x in batches(3):
            if who == "hooks":
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = compiled(x)["out"]
            else:
                result = checkpoint(compiled, x, use_reentrant=False)["out"]
            result.sum().backward()
        assert bool(seen) == (who == "hooks")
        return [p.grad for p in model.parameters()]

    manager = ours(program)
    assert manager.stats()["native_call_count"] == 0


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda function, x: torch.func.grad(function)(x),
    "hessian": lambda function, x: torch.func.hessian(function)(x).sum((0, 1)),
    "of each": lambda function, x: torch.func.vmap(torch.func.grad(function))(x),
    "vjp": lambda function, x: torch.func.vjp(function, x)[1](torch.tensor(2.0))[0],
}


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_inside_is_intercepted(ours, name, has_gradient):
    def program() -> Any:
        layer, found = nn.Linear(WIDTH, 3), []
        compiled = torch.compile(
            lambda x: TRANSFORMS[name](lambda y: layer(y).sigmoid().sum(), x), backend="eager"
        )
        for x in batches(3):
            result = compiled(x.requires_grad_(has_gradient))
            result.sum().backward()
            found.append([result.detach(), x.grad, layer.weight.grad.clone()])
        return found

    disables_hooks = torch.autograd.graph.disable_saved_tensors_hooks
    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] == 0
    assert torch.autograd.graph.disable_saved_tensors_hooks is disables_hooks


def test_what_it_writes_and_has_a_gradient_is_intercepted(ours):
    def program() -> Any:
        compiled, found = torch.compile(lambda x: x.mul_(3).exp(), backend=Backend()), []
        for x in batches(3):
            x.requires_grad_()
            given = x + 1
            compiled(given).sum().backward()
            found.append([given.detach(), x.grad])
        return found

    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] == 0


class _HandsOnAView(nn.Module):
    """Returns a view of what its last layer saves for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        return {"out": self.last(x), "view": x.view(-1)}


def test_what_is_saved_and_handed_on_as_a_view_may_leave(manage):
    """The view's base holds the memory, too: it was taken for a constant, and read when emptied."""

    manager = manage("lru", 1 << 20)

    def program() -> Any:
        model = _HandsOnAView()
        compiled = torch.compile(model, backend="eager")
        gradients = []
        for x in batches(3):
            model.zero_grad()
            manager.budget = 1 << 20
            results = compiled(x)
            if isinstance(results["view"], TensorRef):
                results["view"].toCPU()
            manager.budget = 256  # the backward pass runs at home
            (results["out"].square().sum() + results["view"].sum()).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients

    plain = plain_result(program)
    torch._dynamo.reset()
    before = manager.stats()["native_call_count"]
    seed()
    with injected(), one_thread(), options(compiled="forced"):
        found = program()
    assert manager.stats()["native_call_count"] > before
    assert differences(plain, found) == []


def test_a_constant_of_the_graph_is_left_alone(manage):
    """Who is given it by the backend holds it for the next call, too."""
    constants = []

    def with_constant(graph: Any, examples: Any) -> Any:
        with torch.no_grad():
            constants.append(torch.full((WIDTH,), 2.0))
        return lambda x: (x * constants[0],)

    manager = manage("lru", 1 << 20)
    with injected(), one_thread():
        compiled = torch.compile(lambda x: x * 2, backend=with_constant)
        for x in batches(4):
            x.requires_grad_()
            compiled(x).sum().backward()
            assert bool((x.grad == 2).all())
            for ref in (x, x.grad):
                ref.toCPU()
    assert type(constants[0]) is torch.Tensor
    assert constants[0].tolist() == [2.0] * WIDTH
    assert manager.stats()["native_call_count"] == 2 * 3
