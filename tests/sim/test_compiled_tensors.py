"""What a compiled function does to tensors beside computing: layouts, attributes, views."""

from __future__ import annotations

import builtins
import functools
import operator
import threading
import types
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from .test_compiler import Backend, fresh_compiler, ours, plainly

__all__ = ["fresh_compiler", "ours"]

ROUNDS = 4


def compiled(function: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(function, backend=backend)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    x.t_()
    return x + 1


def _with_one_dimension_more(x: torch.Tensor) -> torch.Tensor:
    x.unsqueeze_(0)
    return x * 2


def _resized(x: torch.Tensor) -> torch.Tensor:
    x.resize_(12)
    x.fill_(2)
    return x + 1


def _marked(x: Any) -> torch.Tensor:
    x.mark = x.mark + 1 if hasattr(x, "mark") else 7
    return x * x.mark


@pytest.mark.parametrize("function", [_transposed, _with_one_dimension_more, _resized, _marked])
def test_what_an_argument_becomes_is_seen(ours, function):
    def program() -> Any:
        call, found = compiled(function), []
        for _ in range(ROUNDS):
            x: Any = torch.rand(2, 3)
            found += [call(x), x, x + 0, getattr(x, "mark", None)]
        return found

    ours(program)


@pytest.mark.parametrize("change", [_transposed, _with_one_dimension_more, _marked])
def test_what_an_argument_becomes_where_nobody_expected_it_is_seen(ours, change):
    """In the call that is looked at, and in the first that run natively, it becomes nothing."""

    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        return change(x) if number > 2 else x * 3

    def program() -> Any:
        call, found = compiled(function), []
        for number in range(6):
            x: Any = torch.rand(2, 3)
            found += [call(x, number), x, x + 0, getattr(x, "mark", None)]
        return found

    ours(program)


def test_an_out_that_grows(ours):
    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.add(x, 1, out=out)
        return out * 2

    def program() -> Any:
        call, found = compiled(function), []
        for _ in range(ROUNDS):
            out = torch.empty(0)
            found += [call(torch.rand(3), out), out]
        return found

    ours(program)


def test_attributes_of_arguments_parameters_and_results(ours):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight: Any = nn.Parameter(torch.rand(3))
            self.weight.scale = 3.0

        def forward(self, x: Any) -> Any:
            y: Any = x * self.weight * self.weight.scale * x.scale
            y.scale = 5
            return y

    def program() -> Any:
        module = Scaled()
        call, found = compiled(module), []
        for number in range(2 * ROUNDS):
            x: Any = torch.rand(3)
            x.scale = 2.0
            if number == ROUNDS:
                module.weight.scale = 0.5
            y = call(x)
            found += [y, y.scale, x.scale, module.weight.scale]
        return found

    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] == 2 * ROUNDS - 1


def _of_the_argument(x: torch.Tensor) -> Any:
    return x.view(-1), x * 2


def _of_a_result(x: torch.Tensor) -> Any:
    made = x * 2
    return made, made[0], {"flat": made.view(-1)}


def _of_what_stays_inside(x: torch.Tensor) -> Any:
    made = x * 2
    return made[0], made[1:]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("function", [_of_the_argument, _of_a_result, _of_what_stays_inside])
def test_gradients_where_a_result_that_is_a_view_is_written(ours, function, backend):
    def program() -> Any:
        call, found = compiled(function, backend), []
        for place in range(ROUNDS):
            x = torch.rand(2, 3, requires_grad=True)
            given = x * 1
            results = torch.utils._pytree.tree_leaves(call(given))
            results[place % len(results)].mul_(3)
            weighed = [(result * (number + 2)).sum() for number, result in enumerate(results)]
            (sum(weighed) + given.sum()).backward()
            found += [*results, given, x.grad]
        return found

    ours(program)


def test_what_shares_a_results_memory_counts_its_writes(ours):
    def program() -> Any:
        call, found = compiled(lambda x: (lambda made: (made, made[0]))(x.exp())), []
        for _ in range(ROUNDS):
            x = torch.rand(2, 3, requires_grad=True)
            made, first = call(x)
            first.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                made.sum().backward()
            found.append(made.detach())
        return found

    ours(program)


def test_who_writes_what_was_saved_is_told_in_the_first_step_too(ours):
    def program() -> Any:
        call = compiled(torch.exp)
        for _ in range(2):
            result = call(torch.rand(3, requires_grad=True))
            result.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()

    ours(program)


def test_views_that_are_made_without_gradients(ours):
    """Of a leaf they say that they require one, in torch."""

    def program() -> Any:
        call, found = compiled(lambda x: (x[0], x.view(-1)), "eager"), []
        for _ in range(ROUNDS):
            x = torch.rand(2, 3, requires_grad=True)
            with torch.no_grad():
                results = call(x)
                results[0].mul_(2)
            assert all(result._base is not None for result in results)
            found += [*results, *(result.requires_grad for result in results), x]
        return found

    ours(program)


def test_a_function_that_writes_what_it_has_saved_is_told_each_time(ours):
    """Where the compiler leaves gradients to autograd, as between two graphs."""

    def function(x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        made.mul_(2)
        return made

    def program() -> Any:
        call = compiled(function, "eager")
        for _ in range(ROUNDS):
            result = call(torch.rand(3, requires_grad=True))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()

    ours(program)


def test_what_is_saved_for_nothing_may_be_written(ours):
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.weight * x
            for _ in range(2):
                made.sin()  # nobody has its result
            torch._dynamo.graph_break()
            return made

    def program() -> Any:
        module = Summed()
        call, found = compiled(module, "eager"), []
        for _ in range(ROUNDS):
            result = call(torch.rand(3))
            result.mul_(2)
            result.sum().backward()
            found.append(module.weight.grad.clone())
        return found

    ours(program)


MAPPINGS = {"MappingProxyType": types.MappingProxyType}
if hasattr(builtins, "frozendict"):
    MAPPINGS["frozendict"] = builtins.frozendict


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_that_cannot_be_changed(ours, mapping):
    """What is compiled got the TensorRefs in it, and inductor asked them for their memory."""

    def function(held: Any) -> Any:
        return mapping({"sum": held["a"] + held["b"], "a": held["a"]})

    def program() -> Any:
        call, found = compiled(function, Backend()), []
        for _ in range(ROUNDS):
            held = mapping({"a": torch.rand(3), "b": torch.rand(3)})
            given = call(held)
            assert given["a"] is held["a"]
            found += [type(given) is mapping, given["sum"], held["b"]]
        return found

    assert ours(program, by=plainly).stats()["native_call_count"]


def test_a_queue_is_given_back_as_it_was(ours):
    def function(queue: Any, x: torch.Tensor) -> Any:
        return queue[0] * queue[1] + x

    def program() -> Any:
        call, queue, found = compiled(function, Backend()), deque([torch.rand(3)] * 2, 3), []
        for _ in range(ROUNDS):
            queue.append(call(queue, torch.rand(3)))
            found += [*queue, queue.maxlen]
        return found

    assert ours(program, by=plainly).stats()["native_call_count"]


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_a_flag_in_such_a_mapping_decides(ours, mapping):
    def function(held: Any) -> Any:
        return held["x"].add_(1) if held["writes"] else held["x"] + 1

    def program() -> Any:
        call, found = compiled(function, Backend()), []
        for number in range(6):
            held = mapping({"x": torch.rand(3), "writes": number > 2})
            found += [call(held), held["x"], held["x"] + 0]
        return found

    ours(program, by=plainly)


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_such_a_mapping_beside_the_arguments(ours, mapping):
    def program() -> Any:
        held = mapping({"w": torch.rand(3)})
        call = compiled(lambda x: x * held["w"], Backend())
        return [call(torch.rand(3)) for _ in range(ROUNDS)]

    ours(program, by=plainly)


@pytest.mark.parametrize("is_given", [False, True])
def test_what_is_held_by_a_module_of_python(ours, is_given):
    """As `import models` and `models.first(x)`: inductor asked its parameters for their memory."""

    def program() -> Any:
        package, models = types.ModuleType("package"), types.ModuleType("package.models")
        package.models, models.first, models.scale = models, nn.Linear(3, 3), torch.rand(3)
        source = "lambda x=None: package.models.first.weight * package.models.scale"
        function = eval(source + (" + x" if is_given else ""), {"package": package})
        given = (torch.rand(3),) if is_given else ()
        with torch.no_grad():
            call = compiled(function, Backend())
            return [call(*given) for _ in range(ROUNDS)]

    ours(program, by=plainly)


def _exchanged(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    x.data = x.data * 2
    return x + 1


def _exchanged_for_another_shape(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    x.data = x.data[:, 1]
    return x + 1


def _exchanged_for_another_type(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    x.data = x.data.double()
    return x + 1


def _exchanged_if_it_is_large(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if x.sum() > 15:
        return _exchanged(x, True)
    return x + 1


def _written_if_it_is_large(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if x.sum() > 15:
        x.data.clamp_(max=1)
    return x + 1


def _written_if_a_number_is_large(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if is_large:
        x.data.clamp_(max=1)
    return x + 1


#: Found by their names only: nothing says `.data` where it is looked for.
_by_name = operator.attrgetter("da" + "ta")


def _written_by_somebody_unknown(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if x.sum() > 15:
        _by_name(x).clamp_(max=1)
    return x + 1


def _exchanged_by_somebody_unknown(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if x.sum() > 15:
        setattr(x, "da" + "ta", _by_name(x)[:, 1] * 2)
    return x + 1


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        _exchanged,
        _exchanged_for_another_shape,
        _exchanged_for_another_type,
        _exchanged_if_it_is_large,
        _written_if_it_is_large,
        _written_if_a_number_is_large,
        _written_by_somebody_unknown,
        _exchanged_by_somebody_unknown,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_given_is_written_or_exchanged_by_data(ours, function, has_gradient):
    def program() -> Any:
        call, found = compiled(function, "eager"), []
        for number in range(5):
            x = torch.full((2, 3), float(number), requires_grad=has_gradient)
            alias = x.detach()
            call(x, number > 2)
            found += [x.detach(), x.detach() + 0, x.tolist(), alias + 0]
        return found

    ours(program, by=plainly)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("sum", torch.zeros(3))

    def _count(self, x: torch.Tensor) -> None:
        self.sum.data.add_(x)
        self.weight.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0] > 1:
            self._count(x)
        return x * self.weight + self.sum


class _Exchanging(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        setattr(self.sum, "da" + "ta", _by_name(self.sum) + x)
        setattr(self.weight, "da" + "ta", _by_name(self.weight) * 0.5)


def _halve(weight: torch.Tensor, by: float = 0.5) -> None:
    weight.data.mul_(by)


class _Halved:
    """A constraint, as networks have them for weights."""

    def __call__(self, weight: torch.Tensor) -> None:
        _halve(weight)

    @staticmethod
    def of(weight: torch.Tensor) -> None:
        _halve(weight)


_half = functools.partial(_halve, by=0.5)
_TABLE = {"half": _halve}


class _ByAnAttribute(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self.constraint = _Halved()

    def _count(self, x: torch.Tensor) -> None:
        self.constraint(self.weight)


class _ByAClass(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        _Halved.of(self.weight)


class _ByAnObjectMadeThere(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        _Halved()(self.weight)


class _ByAPartial(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        _half(self.weight)


class _ByATable(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        _TABLE["half"](self.weight)


class _ByADefault(_Counting):
    def _count(self, x: torch.Tensor, halve: Any = _halve) -> None:
        halve(self.weight)


class _ByAHook(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(self._before)

    @staticmethod
    def _before(module: nn.Module, args: Any) -> None:
        if args[0][0] > 1:
            _halve(module.weight)

    def _count(self, x: torch.Tensor) -> None:
        pass


class _OfAPart(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        _halve(self.weight[1:])
        _halve(self.sum.view(3, 1))


class _OutsideOfGraphs(_Counting):
    def _count(self, x: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        _by_name(self.weight).mul_(0.5)
        torch._dynamo.graph_break()


class _InAThread(_Counting):
    @torch._dynamo.disable
    def _count(self, x: torch.Tensor) -> None:
        thread = threading.Thread(target=_halve, args=(self.weight,))
        thread.start()
        thread.join()


_BY_DATA = [
    _ByAnAttribute,
    _ByAClass,
    _ByAnObjectMadeThere,
    _ByAPartial,
    _ByATable,
    _ByADefault,
    _ByAHook,
    _OfAPart,
    _OutsideOfGraphs,
    _InAThread,
]


@pytest.mark.parametrize(
    ("kinds", "backend"), [(_BY_DATA, "eager"), ([_ByAClass, _OfAPart], "aot_eager")]
)
def test_whoever_writes_a_parameter_by_data_is_seen(ours, kinds, backend):
    def program() -> Any:
        found: list[Any] = []
        for kind in kinds:
            module = kind()
            call = compiled(module, backend)
            with torch.no_grad():
                found += [call(torch.full((3,), float(number))) for number in range(4)]
            others = [torch.ones(4000) for _ in range(20)]
            found += [module.sum, module.weight.detach(), len(others)]
        return found

    manager = ours(program, 1 << 16, by=plainly)
    assert manager.stats()["native_call_count"] == 2 * len(kinds)  # then it is known


@pytest.mark.parametrize("kind", [_Counting, _Exchanging])
def test_what_a_module_has_is_written_or_exchanged_by_data(ours, kind):
    def program() -> Any:
        module = kind()
        call = compiled(module, "eager")
        with torch.no_grad():
            found = [call(torch.full((3,), float(number))) for number in range(5)]
        others = [torch.ones(4000) for _ in range(20)]
        return [*found, module.sum, module.weight.detach(), len(others)]

    ours(program, 1 << 16, by=plainly)


class _Keeping(dict):
    last: Any = None


class _Slotted:
    __slots__ = ("last",)


def _keep_by_a_class(x: Any, kept: Any) -> None:
    _Keeping.last = x


def _keep_by_a_function(x: Any, kept: Any) -> None:
    _keep_by_a_class.last = x  # type: ignore[attr-defined]


def _keep_by_a_slot(x: Any, kept: Any) -> None:
    kept["slot"].last = x


def _keep_by_a_set(x: Any, kept: Any) -> None:
    kept["set"].add(x)


def _keep_by_a_key(x: Any, kept: Any) -> None:
    kept[x] = 1


def _keep_by_a_list_of_a_module(x: Any, kept: Any) -> None:
    kept["module"].held.append(x)


def _keep_by_an_attribute_of_a_dict(x: Any, kept: Any) -> None:
    kept.last = x


KEPT_BY: dict[Any, Any] = {
    _keep_by_a_class: lambda kept: _Keeping.last,
    _keep_by_a_function: lambda kept: _keep_by_a_class.last,  # type: ignore[attr-defined]
    _keep_by_a_slot: lambda kept: kept["slot"].last,
    _keep_by_a_set: lambda kept: next(iter(kept["set"])),
    _keep_by_a_key: lambda kept: next(key for key in kept if isinstance(key, torch.Tensor)),
    _keep_by_a_list_of_a_module: lambda kept: kept["module"].held[-1],
    _keep_by_an_attribute_of_a_dict: lambda kept: kept.last,
}


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("keep", KEPT_BY, ids=lambda keep: keep.__name__)
def test_an_argument_that_is_kept_each_time(ours, keep, has_gradient):
    """It was a plain tensor over the device's bytes, which ended the process once these left."""

    def function(x: torch.Tensor, kept: Any) -> torch.Tensor:
        keep(x, kept)
        return x + 1

    def program() -> Any:
        call, found = compiled(function, "eager"), []
        for number in range(3):
            kept = _Keeping(slot=_Slotted(), set=set(), module=nn.Identity())
            kept["module"].held = []
            x = torch.full((500,), float(number), requires_grad=has_gradient)
            result = call(x, kept)
            others = [torch.ones(4000) + 1 for _ in range(20)]
            last = KEPT_BY[keep](kept)
            found += [result.detach(), last is x, last.detach() + 0, len(others)]
        return found

    ours(program, 1 << 16, by=plainly)


def test_an_argument_that_a_module_keeps_which_is_the_result(ours):
    def function(x: Any) -> Any:
        module: Any = nn.Identity()
        module.last = x
        return module

    def program() -> Any:
        call, found = compiled(function, "eager"), []
        for number in range(3):
            x = torch.full((500,), float(number))
            last = call(x).last
            found += [last is x, last + 0]
        return found

    ours(program, 1 << 16)


class _Remembering(nn.Module):
    """What keeps arguments where they are seen each time runs natively."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.last: Any = None
        self.several: Any = None

    def forward(self, x: torch.Tensor, kept: dict[str, Any]) -> Any:
        self.last, self.several = x, [x]
        kept["x"], kept["several"] = x, (x, [x])
        return {"x": x, "view": x[0], "y": x * self.weight}, x


@pytest.mark.parametrize("has_gradient", [False, True])
def test_arguments_that_are_kept_where_they_are_seen(ours, has_gradient):
    def program() -> Any:
        module = _Remembering()
        call, found = compiled(module, "eager"), []
        with torch.set_grad_enabled(has_gradient):
            for _ in range(ROUNDS):
                x, kept = torch.rand(2, 3), {}
                results, again = call(x, kept)
                places = (again, results["x"], module.last, *module.several, kept["x"])
                assert all(place is x for place in (*places, *kept["several"][1]))
                module.last = module.several = None
                found += [results["view"], results["y"].detach()]
        return found

    assert ours(program, by=plainly).stats()["native_call_count"]


def test_an_argument_that_is_the_result(ours):
    def program() -> Any:
        call, found = compiled(lambda x: x.add_(1), "eager"), []
        for _ in range(ROUNDS):
            x = torch.rand(3)
            found += [call(x) is x, x]
        return found

    assert ours(program).stats()["native_call_count"] == ROUNDS - 1


class _Pair(tuple):
    """A tuple whose constructor takes something else than its parts."""

    def __new__(cls, a: Any, b: Any) -> Any:
        made = tuple.__new__(cls, (a, b))
        made.name = "pair"
        return made


def test_a_tuple_with_a_constructor_of_its_own(ours):
    def program() -> Any:
        call, found = compiled(lambda pair: _Pair(pair[0], pair[1] + 1), "eager"), []
        for _ in range(ROUNDS):
            made = call(_Pair(torch.rand(3), torch.rand(3)))
            assert type(made) is _Pair
            assert made.name == "pair"
            found += [*made]
            found += call(torch.rand(2, 3).max(0))
        return found

    assert ours(program).stats()["native_call_count"]


class _Own(torch.Tensor):
    pass


def _of_own_class(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x * y).as_subclass(_Own)


@pytest.mark.parametrize("function", [torch.mul, _of_own_class])
def test_tensors_of_a_class_of_the_programs(ours, function):
    def program() -> Any:
        call, found = compiled(lambda x, y: function(x, y), "eager"), []
        for number in range(2 * ROUNDS):
            x = torch.rand(3)
            result = call(x.as_subclass(_Own) if number % 3 else x, torch.rand(3))
            found += [result.as_subclass(torch.Tensor), type(result).__name__.endswith("_Own")]
        return found

    ours(program)


def _by_its_shape(x: torch.Tensor, number: int) -> torch.Tensor:
    return (x @ x.T).exp().sum()


def _by_a_number(x: torch.Tensor, number: int) -> torch.Tensor:
    return ((torch.zeros(number, 1000) + x.view(1, -1)) * 2).sum(0)


def _by_a_cube(x: torch.Tensor, number: int) -> torch.Tensor:
    return (x[:1, :1].expand(number**3, 1) * 2).sum()


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (_by_its_shape, [(1, 1000, 0), (1000, 1, 0)]),
        (_by_its_shape, [(140, 1, 0), (255, 1, 0)]),  # of one magnitude
        (_by_a_number, [(1, 1000, 1), (1, 1000, 400)]),
        (_by_a_cube, [(1, 1000, 33), (1, 1000, 63)]),
    ],
)
def test_what_a_call_takes_by_its_shape_or_a_number_is_learned(ours, function, calls):
    """The budget is not that of another call."""

    def program() -> Any:
        call, found = torch.compile(function, backend="eager", dynamic=False), []
        with torch.no_grad():
            for rows, columns, number in calls:
                found += [call(torch.rand(rows, columns), number) for _ in range(3)]
        return found

    manager = ours(program, 1 << 18, by=plainly)
    assert manager.stats()["native_call_count"] == 2  # what does not fit is intercepted


def test_a_call_that_is_a_little_larger_is_not_learned_anew(ours):
    """As that with a cache that grows: it is taken to need more, and held to that."""

    def program() -> Any:
        call = torch.compile(_by_its_shape, backend="eager", dynamic=True)
        with torch.no_grad():
            return [call(torch.rand(rows, 1), 0) for rows in (140, 143, 146, 150, 176, 176)]

    manager = ours(program, 1 << 18, by=plainly)
    assert manager.stats()["native_call_count"] == 4  # a quarter more is learned again
