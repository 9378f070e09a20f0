"""Arithmetic that runs as a method of a TensorRef: as torch's own, seen by whoever looks on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef import TensorRef
from torchTensorRef.memory import core
from torchTensorRef.operators.plan import ReadyWay, plan_of
from torchTensorRef.tensor import methods
from torchTensorRef.tensor.methods import TABLE

from ..support.differential import differences

AMPLE_NBYTES = 1 << 24
pytestmark = pytest.mark.skipif(core.library is not None, reason="in C++ there are no methods")


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Iterator[Any]:
    """A manager with room for everything, regions off: each operator is seen."""
    manager = manage("lru", AMPLE_NBYTES)
    manager.regions = False
    yield manager
    manager.regions = True


#: Each row of the table, and what a program may give it beside the tensor.
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    **{
        name: [((other,), {}) for other in (torch.rand(3, 4), torch.rand(4), 2, 0.5)]
        for name in ("__add__", "__sub__", "__mul__", "__truediv__")
    },
    **{
        name: [((torch.rand(shape),), {}) for shape in ((4, 2), (4,), (2, 4, 3), (4, 0))]
        for name in ("__matmul__", "matmul")
    },
    **{name: [((2,), {}), ((0.5,), {})] for name in ("__radd__", "__rmul__", "pow", "__pow__")},
    **{
        name: [((), {})]
        for name in ("__neg__", "cos", "sin", "exp", "sqrt", "rsqrt", "tanh", "sigmoid")
    },
    **{
        name: [((-1,), {}), ((0,), {"keepdim": True}), ((), {}), (((0, 1),), {}), ((), {"dim": 1})]
        for name in ("mean", "sum")
    },
}

#: What is no number of Python's own, or has its own idea of arithmetic.
OTHERS = (True, 1j, numpy.float32(0.5), numpy.float64(2), numpy.int64(3), torch.tensor(2.0))


def test_every_row_has_a_fast_path_and_a_test() -> None:
    assert {name for name, _, _ in TABLE} == set(CALLS)
    for _, op, _ in TABLE:
        assert plan_of(op).ready_way != ReadyWay.NONE


def brought(manager: Any, value: Any) -> Any:
    return manager.adopt(value.clone()).toGPU() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("strategy", ["lru", "genoa"])
def test_results_are_those_of_plain_torch(
    manage: Callable[..., Any], name: str, strategy: str
) -> None:
    manager = manage(strategy, AMPLE_NBYTES)
    for args, kwargs in CALLS[name]:
        plain = torch.rand(3, 4)
        ref = brought(manager, plain)
        expected = getattr(plain, name)(*args, **kwargs)
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                result = getattr(ref, name)(*(brought(manager, arg) for arg in args), **kwargs)
            assert isinstance(result, TensorRef)
            assert differences(expected, result) == []
            assert result.is_inference() == (mode is torch.inference_mode)


def outcome(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Its result, or the type and the words of its refusal."""
    try:
        return run(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", CALLS)
def test_what_plain_torch_refuses_is_refused_alike(
    ample: Any, name: str, dtype: torch.dtype
) -> None:
    for args, kwargs in CALLS[name]:
        plain = torch.ones(3, 4).to(dtype)
        ref = brought(ample, plain)
        mine = tuple(brought(ample, arg) for arg in args)
        expected, result = (
            outcome(getattr(x, name), given, kwargs) for x, given in ((plain, args), (ref, mine))
        )
        assert differences(expected, result) == []


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: type(other).__name__)
def test_others_keep_their_own_arithmetic(ample: Any, other: Any) -> None:
    plain = torch.rand(3, 4)
    ref = brought(ample, plain)
    for run in (
        lambda x: x + other,
        lambda x: other + x,
        lambda x: x * other,
        lambda x: other * x,
        lambda x: x - other,
        lambda x: x / other,
    ):
        expected, result = (outcome(run, (x,), {}) for x in (plain, ref))
        assert isinstance(result, TensorRef) == isinstance(expected, torch.Tensor)
        assert differences(expected, result) == []


@pytest.mark.parametrize("other", [2.0, "itself"])
def test_an_operand_seized_before_it_is_announced_is_seen(
    ample: Any, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    ref = brought(ample, torch.ones(1000))
    who, seized = methods.get_ident, []

    def seize_first() -> int:
        if not seized:
            seized.append(True)
            thread = threading.Thread(target=ample.bring_all_home)
            thread.start()
            thread.join()
        return who()

    with torch.no_grad():
        ref * 2
        monkeypatch.setattr(methods, "get_ident", seize_first)
        result = ref * (ref if other == "itself" else other)
    assert seized
    assert differences(torch.ones(1000) * (1 if other == "itself" else other), result) == []


def test_a_method_called_for_another_tensor_is_torchs_own(ample: Any) -> None:
    plain, ref = torch.rand(3), brought(ample, torch.rand(3))
    with torch.no_grad():
        for name, other in (("__add__", ref), ("__mul__", 2.0), ("__radd__", 2)):
            expected = getattr(torch.Tensor, name)(plain, other)
            assert differences(expected, getattr(TensorRef, name)(plain, other)) == []


def test_a_plain_tensor_on_the_left_stays_on_the_left(ample: Any) -> None:
    plain, ref = torch.rand(2, 3), brought(ample, torch.rand(4, 3))
    with pytest.raises(RuntimeError, match=r"tensor a \(2\) must match .* tensor b \(4\)"):
        plain * ref
    with pytest.raises(RuntimeError, match=r"tensor a \(4\) must match .* tensor b \(2\)"):
        ref * brought(ample, plain)


def test_keywords_are_torchs_own(ample: Any) -> None:
    plain = torch.rand(3, 4)
    ref = brought(ample, plain)
    for run in (
        lambda x: x.pow(exponent=2),
        lambda x: x.__add__(x, alpha=2),
        lambda x: x.__radd__(1, alpha=2),
        lambda x: x.__truediv__(2, rounding_mode="floor"),
        lambda x: x.pow(2, 3),
        lambda x: x.mean(0, keepdim=None),
    ):
        expected, result = (outcome(run, (x,), {}) for x in (plain, ref))
        assert differences(expected, result) == []


def test_a_class_on_the_left_that_declines_is_computed(ample: Any) -> None:
    class Declines(torch.Tensor):
        def __add__(self, other: Any) -> Any:
            return NotImplemented

    plain, left = torch.rand(3), torch.rand(3).as_subclass(Declines)
    assert differences((left + plain).tolist(), (left + brought(ample, plain)).tolist()) == []


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_transforms_do_not_keep_what_was_captured(ample: Any, name: str) -> None:
    args, kwargs = CALLS[name][0]
    plain, given = torch.rand(3, 4), torch.rand(4)

    def gradient(captured: Any, args: Any, x: Any) -> Any:
        kept = []

        def program(y: Any) -> Any:
            kept.append(getattr(captured, name)(*args, **kwargs))
            return (kept[-1] * y[:1]).sum()

        return torch.func.grad(program)(x), kept[0] + 0

    expected = gradient(plain, args, given)
    mine = tuple(brought(ample, arg) for arg in args)
    result = gradient(brought(ample, plain), mine, brought(ample, given))
    assert differences(expected, result) == []


def test_a_class_that_answers_itself_is_asked(ample: Any) -> None:
    class Answers:
        def __rmul__(self, other: Any) -> str:
            return "mine"

    assert brought(ample, torch.rand(3)) * Answers() == "mine"


def test_gradients_are_noted(ample: Any) -> None:
    plain = torch.rand(3, 4, requires_grad=True)
    ref = brought(ample, plain.detach()).requires_grad_()
    for run in (
        lambda x: x * 2,
        lambda x: 2 * x,
        lambda x: x.detach() * x,
        lambda x: -x,
        lambda x: x**2,
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.exp(),
    ):
        expected, result = run(plain), run(ref)
        assert type(result.grad_fn).__name__ == type(expected.grad_fn).__name__
        (wanted,), (got,) = (
            torch.autograd.grad(out.sum(), given)
            for out, given in ((expected, plain), (result, ref))
        )
        assert differences(wanted, got) == []


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeenFunctions, SeenOperators])
def test_modes_see_every_call(ample: Any, mode: Any) -> None:
    def program(x: Any) -> Any:
        return (
            ((x + 1) * x).pow(2).mean(-1) - (-x).sum(0).mean(0, keepdim=True) + x.to(x.dtype)[:, 0]
        )

    plain = torch.rand(3, 4)
    ref = brought(ample, plain)
    with mode() as expected:
        program(plain)
    with mode() as result:
        program(ref)
    assert result.names == expected.names


def test_a_trace_has_every_operator(ample: Any) -> None:
    def program(x: Any) -> Any:
        return (x * 2 + x).mean(-1).exp()

    plain = torch.rand(3, 4)
    kinds = [
        [node.kind() for node in torch.jit.trace(program, x, check_trace=False).graph.nodes()]
        for x in (plain, brought(ample, plain))
    ]
    assert [kind for kind in kinds[1] if kind in ("aten::mul", "aten::mean", "aten::exp")] == [
        "aten::mul",
        "aten::mean",
        "aten::exp",
    ]


@pytest.mark.parametrize("name", ["pow", "exp", "mean", "sum", "__add__", "__mul__"])
def test_autocast_is_obeyed(ample: Any, name: str) -> None:
    plain, other = torch.rand(3, 4).bfloat16(), torch.rand(3, 4)
    arg: Any = {"pow": 2, "mean": -1, "sum": -1, "__add__": other, "__mul__": other}.get(name)
    ref = brought(ample, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = getattr(plain, name)(*(() if arg is None else (arg,)))
        result = getattr(ref, name)(*(() if arg is None else (brought(ample, arg),)))
    assert differences(expected, result) == []


def test_transforms_see_what_they_transform(ample: Any) -> None:
    plain, rows = torch.rand(4), torch.rand(3, 4)
    ref = brought(ample, plain)
    expected = torch.func.vmap(lambda row: (row * plain - plain / 2) + (plain * 2).mean(0))(rows)
    result = torch.func.vmap(lambda row: (row * ref - ref / 2) + (ref * 2).mean(0))(
        brought(ample, rows)
    )
    assert differences(expected, result) == []
    expected = torch.func.jvp(lambda x: (x * x).mean(-1), (plain,), (plain,))
    result = torch.func.jvp(lambda x: (x * x).mean(-1), (ref,), (ref,))
    assert differences(expected, result) == []


def test_forward_gradients_are_carried_along(ample: Any) -> None:
    import torch.autograd.forward_ad as forward

    plain = torch.rand(4)
    tangents = []
    for x in (plain, brought(ample, plain)):
        with forward.dual_level():
            dual = forward.make_dual(x, x.clone())
            tangents.append(forward.unpack_dual((dual * 3 + dual).pow(2).mean(0)).tangent)
    assert differences(*tangents) == []


def test_to_its_own_dtype_is_itself(ample: Any) -> None:
    ref = brought(ample, torch.rand(3))
    assert ref.to(torch.float32) is ref
    assert ref.to(torch.float64) is not ref
    with SeenFunctions() as seen:
        assert ref.to(torch.float32) is ref
    assert seen.names == ["to"]


@pytest.mark.parametrize("name", CALLS)
def test_autocast_chooses_the_dtype(ample: Any, name: str) -> None:
    for args, kwargs in CALLS[name]:
        plain = torch.rand(3, 4)
        ref, mine = brought(ample, plain), tuple(brought(ample, arg) for arg in args)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = getattr(plain, name)(*args, **kwargs)
            assert differences(expected, getattr(ref, name)(*mine, **kwargs)) == []


def test_products_of_conjugated_matrices(ample: Any) -> None:
    plain = torch.rand(3, 3, dtype=torch.complex64)
    ref = brought(ample, plain)
    with torch.no_grad():
        for run in (
            lambda x: x.mH @ x,
            lambda x: x.conj().matmul(x.T),
            lambda x: x.T @ x[0].conj(),
        ):
            assert differences(run(plain), run(ref)) == []
