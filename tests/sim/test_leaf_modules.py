"""Modules that are one operator: as torch's own for whoever listens, looks on, or changes one."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef import leaf_modules
from torchTensorRef.inject import hooks
from torchTensorRef.leaf_calls import call_linear, leaves

from ..support.differential import differences

AMPLE_NBYTES = 1 << 24


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Iterator[Any]:
    """A manager with room for everything, regions off, and no gradients."""
    manager = manage("lru", AMPLE_NBYTES)
    manager.regions = False
    with torch.no_grad():
        yield manager
    manager.regions = True


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each `nn.Linear` that was called with a TensorRef: whether it ran at once."""
    seen: list[bool] = []

    def spied(module: Any, x: Any) -> Any:
        result = leaf_modules.run_linear(module, x)
        seen.append(result is not NotImplemented)
        return result

    monkeypatch.setattr(leaves, "run_linear", spied)
    return seen


def pair(manager: Any, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear, Any, Any]:
    """A plain module, the same with TensorRefs on the accelerator, and an input for each."""
    plain, x = nn.Linear(8, 6, bias=bias), torch.rand(2, 3, 8)
    ours = copy.deepcopy(plain)
    manager.adopt(ours)
    for parameter in ours.parameters():
        parameter.toGPU()
    return plain, ours, x, manager.adopt(x.clone()).toGPU()


@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_plain_torch(
    manage: Callable[..., Any], taken: list[bool], bias: bool
) -> None:
    manager = manage("lru", AMPLE_NBYTES)
    manager.regions = False
    plain, ours, x, ref = pair(manager, bias=bias)
    for given, mine in ((x, ref), (x.transpose(0, 1), ref.transpose(0, 1)), (x[0, 0], ref[0, 0])):
        with torch.no_grad():
            result = ours(mine)
        assert type(result) is manager.ref_type
        assert not result.requires_grad
        assert differences(plain(given).detach(), result) == []
    with pytest.raises(RuntimeError, match="mat1 and mat2"), torch.no_grad():
        ours(manager.adopt(torch.rand(2, 3)))
    manager.regions = True
    # Rows that are not in a row, and a weight that wants gradients elsewhere: torch copies them.
    assert taken[:3] == [True, False, True]


def test_gradients_take_torchs_way(ample: Any, taken: list[bool]) -> None:
    plain, ours, x, ref = pair(ample)
    with torch.enable_grad():
        expected, result = plain(x), ours(ref)
        expected.sum().backward()
        result.sum().backward()
    assert type(result.grad_fn).__name__ == type(expected.grad_fn).__name__
    assert differences(plain.weight.grad, ours.weight.grad) == []
    ours.requires_grad_(False)
    with torch.enable_grad():
        assert differences(expected.detach(), ours(ref)) == []
    assert taken == [False, True]


def doubled(*given: Any) -> Any:
    """A hook that changes what it is given: the result of a module, or its inputs."""
    changed = given[-1]
    return changed * 2 if isinstance(changed, torch.Tensor) else tuple(x * 2 for x in changed)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(doubled),
    "before": lambda module: module.register_forward_pre_hook(doubled),
    "all forward": lambda module: nn.modules.module.register_module_forward_hook(doubled),
    "before all": lambda module: nn.modules.module.register_module_forward_pre_hook(doubled),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_called(ample: Any, taken: list[bool], name: str) -> None:
    plain, ours, x, ref = pair(ample)
    first, second = HOOKS[name](plain), HOOKS[name](ours)
    expected, result = plain(x), ours(ref)
    first.remove()
    second.remove()
    assert differences(expected, result) == []
    assert differences(plain(x), ours(ref)) == []
    assert taken == [False, True]


def test_hooks_of_gradients_are_called(ample: Any, taken: list[bool]) -> None:
    _, ours, _, ref = pair(ample)
    seen: list[str] = []
    handles = [
        ours.register_full_backward_hook(lambda *_: seen.append("after")),
        ours.register_full_backward_pre_hook(lambda *_: seen.append("before")),
    ]
    with torch.enable_grad():
        ours(ref.clone().requires_grad_()).sum().backward()
    assert sorted(seen) == ["after", "before"]
    for handle in handles:
        ours(ref)
        handle.remove()
    assert not any(taken)


class Tripled(nn.Linear):
    """A module of the program's own."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 3


def test_a_module_of_another_class_goes_its_own_way(ample: Any, taken: list[bool]) -> None:
    plain, x = Tripled(4, 4), torch.rand(2, 4)
    ours = copy.deepcopy(plain)
    ample.adopt(ours)
    assert differences(plain(x), ours(ample.adopt(x.clone()).toGPU())) == []
    plain, ours, x, ref = pair(ample)
    for module in (plain, ours):
        nn.utils.parametrizations.weight_norm(module)
    assert differences(plain(x), ours(ref)) == []
    assert not any(taken)


def test_what_the_program_puts_in_place_of_a_part_is_called(
    ample: Any, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*given: Any, **named: Any) -> str:
        return "the program's own"

    _, ours, _, ref = pair(ample)
    for owner, name in (
        (ours, "forward"),
        (nn.Linear, "forward"),
        (functional, "linear"),
        (nn.Linear, "_call_impl"),
        (ours, "_compiled_call_impl"),
    ):
        with monkeypatch.context() as patch:
            if owner is ours:
                patch.setitem(vars(ours), name, other)
            else:
                patch.setattr(owner, name, other)
            assert ours(ref) == "the program's own"
    weight = ample.adopt(torch.zeros(6, 8))
    with monkeypatch.context() as patch:
        patch.setitem(vars(ours), "weight", weight)  # found before what is registered
        assert differences(functional.linear(ref, weight, ours.bias), ours(ref)) == []
    assert not any(taken)
    assert ours(ref) is not None
    assert taken[-1]


def test_parameters_found_another_way_are_used(
    ample: Any, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours, _, ref = pair(ample)
    find, other = nn.Module.__getattr__, ample.adopt(torch.zeros(6, 8)).toGPU()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__getattr__", lambda self, name: find(self, name) * 2)
        expected = functional.linear(ref, ours.weight, ours.bias)
        assert differences(expected, ours(ref)) == []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "weight", property(lambda self: other), raising=False)
        assert differences(functional.linear(ref, other, ours.bias), ours(ref)) == []
    with monkeypatch.context() as patch:
        patch.setattr(
            nn.modules.module, "_global_forward_hooks", {0: lambda module, inputs, result: None}
        )
        ours(ref)
    assert not any(taken)


def test_a_trace_through_a_module_sees_its_parameters(ample: Any) -> None:
    class Through(torch.fx.Tracer):
        def is_leaf_module(self, *_: Any) -> bool:
            return False

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, self.linear, _, self.constant = pair(ample)

        def forward(self, y: Any) -> Any:
            return self.linear(self.constant) + y

    targets = [str(node.target) for node in Through().trace(Net()).nodes]
    assert {"linear.weight", "linear.bias"} <= set(targets)


def test_torch_has_the_words_for_a_module_that_is_not_whole(ample: Any) -> None:
    for name in ("_forward_hooks", "_parameters"):
        _, ours, _, ref = pair(ample)
        del ours.__dict__[name]
        with pytest.raises(AttributeError):
            ours(ref)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_that_are_in_a_row_but_for_the_strides_of_one(ample: Any, bias: bool) -> None:
    plain, ours = (nn.Linear(7, 6, bias=bias, dtype=torch.float64) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    ample.adopt(ours)
    for shape in ((3, 1, 7), (1, 3, 7), (0, 1, 7)):
        x = torch.rand(*shape, dtype=torch.float64)
        ref = ample.adopt(x.clone()).toGPU()
        for _ in range(2):
            assert differences(plain(x.transpose(0, 1)), ours(ref.transpose(0, 1))) == []


def test_parameters_exchanged_for_a_call_are_used(ample: Any, taken: list[bool]) -> None:
    plain, ours, x, ref = pair(ample)
    other = {"weight": torch.rand(6, 8), "bias": torch.rand(6)}
    mine = {name: ample.adopt(tensor.clone()).toGPU() for name, tensor in other.items()}
    expected = torch.func.functional_call(plain, other, (x,))
    assert differences(expected, torch.func.functional_call(ours, mine, (ref,))) == []
    assert taken == [True]
    del ours._parameters["bias"]
    with pytest.raises(AttributeError, match="bias"):
        ours(ref)


def test_a_copy_that_shares_attributes_uses_its_own_parameters(
    ample: Any, taken: list[bool]
) -> None:
    _, ours, _, ref = pair(ample)
    replica = ours.__new__(nn.Linear)
    replica.__dict__ = ours.__dict__.copy()
    replica._parameters = {"weight": ours.weight * 2, "bias": ours.bias * 2}
    assert differences(ours(ref) * 2, replica(ref)) == []
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert differences(ours(ref), twin(ref)) == []
    assert taken[:2] == [True, True]


def test_whoever_looks_on_sees_the_operator(ample: Any, taken: list[bool]) -> None:
    plain, ours, x, ref = pair(ample)
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Functions():
        ours(ref)
    assert "linear" in seen
    seen.clear()
    with Operators():
        ours(ref)
    assert seen
    with torch.autocast("cpu", torch.bfloat16):
        expected, result = plain(x), ours(ref)
    assert result.dtype is torch.bfloat16
    assert differences(expected, result) == []
    batched = torch.func.vmap(ours)(ref)
    assert differences(torch.func.vmap(plain)(x), batched) == []
    assert not any(taken)


def test_traces_and_scripts_are_torchs_own(ample: Any, taken: list[bool]) -> None:
    _, ours, _, ref = pair(ample)
    expected = ours(ref)
    taken.clear()
    graph = torch.fx.symbolic_trace(nn.Sequential(ours))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
    assert differences(expected, graph(ref)) == []
    assert taken == [True]
    plain = nn.Linear(4, 4)
    assert "aten::linear" in str(torch.jit.script(plain).graph)
    assert "aten::linear" in str(torch.jit.trace(plain, torch.rand(2, 4)).inlined_graph)


def test_a_simulated_device_is_charged_alike(ample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, _, ref = pair(ample)
    device = ample.residency.main
    spent = []
    for run in (leaf_modules.run_linear, lambda module, x: NotImplemented):
        monkeypatch.setattr(leaves, "run_linear", run)
        start = device.clocks().compute_ns
        ours(ref)
        spent.append(device.clocks().compute_ns - start)
    assert spent[0] == spent[1] > 0


def test_where_there_are_no_regions_nobody_listens_for_them(
    ample: Any, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours, _, ref = pair(ample)
    ample.regions = True
    monkeypatch.setattr(type(ample.native), "_are_possible", lambda self: False)
    ours(ref)  # looks for regions, and finds that there are none here
    ours(ref)
    assert taken == [False, True]
    monkeypatch.undo()
    ample.native.start_again()
    assert ample.native._hook is not None


def test_uninstalled_it_is_torchs_own() -> None:
    assert nn.Linear._compiled_call_impl is call_linear
    hooks.uninstall()
    try:
        assert "_compiled_call_impl" not in vars(nn.Linear)
        assert nn.Linear(2, 2)._compiled_call_impl is None
    finally:
        hooks.install()
    assert nn.Linear(2, 2)._compiled_call_impl.__func__ is call_linear


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Dynamo goes through torch's own calling of modules where somebody listens.
COMPILED = """
import torchTensorRef, torch
from torch import nn
with torchTensorRef.disabled():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(2, 4)
    module[0].register_forward_hook(lambda module, inputs, result: result * 2)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    for i in range(12):
        names = {"linear": nn.functional.linear}
        exec(f"def forward(self, x): return linear(x, self.weight, self.bias) + {i}", names)
        other = type(f"Linear{i}", (nn.Linear,), {"forward": names["forward"]})(4, 4)
        assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), other(x))
    print("whole")
"""


def test_compile_goes_through_it_without_a_break() -> None:
    assert "whole" in run(COMPILED)


#: Torch may have been changed before there was any TensorRef, or any of us.
CHANGED_BEFORE = """
{}
import torch
from torch import nn
from torch.nn import functional
forward, linear, call = nn.Linear.forward, functional.linear, nn.Module._call_impl
seen = []
def changed(self, x):
    seen.append(1)
    return forward(self, x)
def changed_function(*args):
    seen.append(1)
    return linear(*args)
def changed_call(self, *args, **kwargs):
    seen.append(1)
    return call(self, *args, **kwargs)
{}
import torchTensorRef
torchTensorRef.tensorsManager.regions = False
module, x = nn.Linear(4, 4), torch.rand(2, 4)
with torch.no_grad():
    for _ in range(3):
        module(x)
print("seen", len(seen))
"""


@pytest.mark.parametrize("first", ["", "import torchTensorRef"])
@pytest.mark.parametrize(
    "change",
    [
        "nn.Linear.forward = changed",
        "functional.linear = changed_function",
        "nn.Module._call_impl = changed_call",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_was_changed_before_us_is_called(first: str, change: str) -> None:
    assert "seen 3" in run(CHANGED_BEFORE.format(first, change))
