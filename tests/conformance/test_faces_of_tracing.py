"""What traces and watches operators sees the program's, and none of ours: as plain torch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..support.programs import Bring

# What torch says of graphs that it makes itself.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")


def test_linearized_functions(right):
    def program(bring: Bring) -> Any:
        x, w = bring(torch.rand(3)), bring(torch.rand(3, 3))
        results = []
        for function in (
            lambda t: t.sin() * 2,
            lambda t: (w @ t).exp() * w[0],
            lambda t: nn.functional.softmax(t, 0),
        ):
            value, tangent = torch.func.linearize(function, x)
            results += [value, tangent(bring(torch.rand(3))), tangent(bring(torch.ones(3)))]
        return results

    right(program)


def test_linearized_models(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        value, tangent = torch.func.linearize(model, bring(torch.rand(3, 4)))
        return [value.detach(), *(tangent(bring(torch.rand(3, 4))).detach() for _ in range(2))]

    right(program)


def test_traced_functions_keep_what_they_close_over(right):
    def program(bring: Bring) -> Any:
        x, w = bring(torch.rand(3)), bring(torch.rand(3))

        def function(a: Any) -> Any:
            b = a * w + w.cos()
            return b.sin() + torch.stack([w, a]).sum(0)

        graph = make_fx(function)(x)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        results = [graph(x), graph(bring(torch.ones(3)))]
        w.mul_(2)
        return [*results, names, graph(x)]

    right(program)


def test_traced_training_steps(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(3, 2))
        state = {name: p.detach() for name, p in model.named_parameters()}
        x = bring(torch.rand(4, 3))

        def loss(state: Any, x: Any) -> Any:
            return torch.func.functional_call(model, state, (x,)).square().sum()

        graph = make_fx(torch.func.grad_and_value(loss))(state, x)
        return [graph(state, x), graph(state, bring(torch.rand(4, 3)))]

    right(program)


class Names(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Refuses(TorchDispatchMode):
    """Leaves every operator to the tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind is not torch.Tensor for kind in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operators_of_the_program(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(40, 40))
        model = bring(nn.Sequential(nn.Linear(40, 40), nn.ReLU()))
        with Names() as names:
            y = model(x)
            y = y.sort(0)[0].add(1).view(-1)[::2]
            y.sum().backward()
            x.mul_(2)
        return [names.seen, y.detach(), x, model[0].weight.grad]

    right(program)


def test_modes_that_leave_it_to_the_tensors(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(40, 40))
        with Refuses():
            y = (x @ x).relu()
            z = y.t().contiguous() + bring(torch.ones(40))
            x.add_(1)
        return [x, y, z, y + z]

    right(program)


def test_modes_see_the_functions_of_the_program(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(40, 40))
        with Functions() as functions:
            y = torch.relu(x @ x).sum(0)
            x[0] = 1
        return [functions.seen, x, y]

    right(program)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_modes_do_not_see_what_we_look_at(right):
    def program(bring: Bring) -> Any:
        at = bring(torch.tensor([[0, 1], [1, 2]]))
        with Functions() as functions:
            layer = nn.Linear(3, 3)
            layer.register_buffer("extra", torch.ones(3))
            torch.sparse_coo_tensor(at, torch.ones(2))
        return [functions.seen]

    right(program, on_host_because="it registers, and computes little")


class FunctionsWithin(Functions):
    """Stays on while the function that it sees runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        with self:
            return torch.overrides.redispatch_function(func, types, args, kwargs)


@pytest.mark.skipif(not hasattr(torch.overrides, "redispatch_function"), reason="newer torch")
def test_modes_that_stay_on_see_the_functions_of_the_program(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(40, 40))
        with FunctionsWithin() as functions:
            y = torch.relu(x @ x).sum(0)
            x.mul_(2)
            z = torch.ones(40) + y.exp()
        return [functions.seen, x, y, z]

    right(program)


def test_counted_work(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(144, 3)))
        with FlopCounterMode(display=False) as counter:
            model(bring(torch.rand(2, 2, 8, 8))).sum().backward()
        return counter.get_total_flops()

    right(program)


def _convolutions(bring: Bring) -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))
    return bring(nn.Sequential(*layers))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("compile_graph", [torch.jit.trace, torch.jit.script])
def test_graphs_of_convolutions_are_trained_and_written(right, compile_graph):
    """`torch.jit.trace` could not follow a convolution; what was written ended the process."""

    def program(bring: Bring) -> Any:
        model, x = _convolutions(bring), bring(torch.rand(2, 3, 8, 8))
        if compile_graph is torch.jit.trace:
            graph = torch.jit.trace(model, x)
        else:
            graph = torch.jit.script(model)
        graph(x).square().mean().backward()
        with io.BytesIO() as file:
            torch.jit.save(graph, file)
            is_the_same = all(
                a is b for a, b in zip(graph.parameters(), model.parameters(), strict=True)
            )
            file.seek(0)
            loaded = torch.jit.load(file)
        wanted = [parameter.requires_grad for parameter in loaded.parameters()]
        kinds = [node.kind() for node in graph.inlined_graph.nodes()]
        results = [loaded.eval()(x).detach(), graph.eval()(x).detach()]
        return [*results, *(p.grad for p in model.parameters()), kinds, wanted, is_the_same]

    right(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_parameters_are_handed_to_the_exporter_of_traced_graphs(right):
    exporter = pytest.importorskip("torch.onnx._internal.torchscript_exporter.utils")
    options = pytest.importorskip("torch.onnx._internal.torchscript_exporter._globals").GLOBALS

    def program(bring: Bring) -> Any:
        model, x = _convolutions(bring).eval(), bring(torch.rand(2, 3, 8, 8))
        options.export_onnx_opset_version = 17
        graph, parameters, _ = exporter._model_to_graph(model, (x,))
        kept = torch._C._jit_pass_onnx_deduplicate_initializers(graph, parameters, False)
        return [[*kept], *kept.values(), [node.kind() for node in graph.nodes()]]

    right(program, plain_because="the exporter gets plain parameters")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_graphs_hold_what_they_close_over(right):
    """Their constants are compared as texts when they are made, which reads their memory in C++."""

    def program(bring: Bring) -> Any:
        x, table, other = (bring(torch.rand(4)) for _ in range(3))

        class Inner(nn.Module):
            def forward(self, given: Any) -> Any:
                return given * table

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.linear = Inner(), nn.Linear(4, 4)

            def forward(self, given: Any) -> Any:
                return self.linear(self.inner(given)) + table[1:].sum()

        of_function = torch.jit.trace(lambda given: given * table + other.sum(), x)
        of_module = torch.jit.trace(bring(Outer()), x)
        results = []
        for graph in (of_function, of_module):
            file = io.BytesIO()
            torch.jit.save(graph, file)
            file.seek(0)
            results += [graph(x).detach(), torch.jit.load(file)(x).detach()]
        table.add_(1)  # the graphs share it
        results += [of_function(x), of_module(x).detach()]
        return [*results, "Constant" in str(of_function.graph), "Call" in str(of_module.graph)]

    right(program)


class _WithAttributes(nn.Module):
    """Its tensors are no parameters, and some of them are in a dictionary and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.rand(4)
        self.by_name, self.in_order = {"shift": torch.rand(4)}, [torch.rand(4)]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scaled = self.linear(given) * self.scale
        return scaled + self.by_name["shift"] + self.in_order[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_scripted_modules_are_written_and_copied(right, is_frozen):
    """C++ asked which of their tensors share memory; a dictionary of them ended the process."""

    def program(bring: Bring) -> Any:
        x, model = bring(torch.rand(2, 4)), _WithAttributes().eval()
        model.scale = bring(model.scale)
        model.by_name["shift"] = bring(model.by_name["shift"])
        model.in_order[0] = bring(model.in_order[0])
        scripted = torch.jit.script(bring(model))
        if is_frozen:
            scripted = torch.jit.freeze(scripted)
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        copied = copy.deepcopy(scripted)
        results = [torch.jit.load(file)(x).detach(), copied(x).detach(), scripted(x).detach()]
        if not is_frozen:
            with torch.no_grad():
                copied.linear.weight.add_(1)
            results += [copied(x).detach(), scripted(x).detach()]
        return results

    right(program)


@torch.jit.script
def _by_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(x.shape[:1], dtype=torch.long, device=x.device).to(x)


@torch.jit.script
def _in_forks(x: torch.Tensor) -> torch.Tensor:
    one, other = torch.jit.fork(_by_length, x), torch.jit.fork(_by_length, x + 1)
    return torch.jit.wait(one) + torch.jit.wait(other)


def test_what_a_gradient_forks_in_a_scripted_function(right):
    """Torch hands on to its threads what the backward pass has set, and they make numbers."""

    class InForks(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return _in_forks(x)

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
            return _in_forks(grad)

    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, 2)).requires_grad_()
        out = InForks.apply(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        return [out.detach(), gradient, _in_forks(x.detach())]

    right(program)
