"""From a program to its record: run it on promises, and leave everything as it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from ..base.activation import moving, when_drawn, when_made, when_seeded
from ..base.scopes import surely
from ..devices.sim.device import SimDevice
from ..devices.sim.spec import DeviceSpec
from ..memory.adoption import is_adoptable, without_own_references
from ..memory.budget import Budget, resolve_budget
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef, as_parameter
from .draws import PromisedDraws, Standing, drawing
from .graph import Cell
from .promising import Scope, promises, scoped
from .record import Record
from .recorder import Recorder
from .values import Values

__all__ = ["promise_like", "record_of"]


def budget_on(spec: DeviceSpec, budget: Any) -> Budget:
    """Return what a budget comes to on such a card."""
    return resolve_budget(budget, SimDevice(spec, keeps_bytes=False))


def record_of(
    call: Callable[..., Any],
    *args: Any,
    steps: int = 1,
    values: Any = None,
    lists_for: Budget | None = None,
    **kwargs: Any,
) -> Record:
    """Write down what a program would do, its lists divided as under a budget; see `forecast`."""
    recorder, answers = Recorder(lists_for), Values(values)
    held = _held_by(call, args, kwargs)
    modules = [value for value in held if isinstance(value, nn.Module)]
    for module in modules:
        _adopt_plain(module)
    for value in (*held, *(x for module in modules for x in _tensors_of(module).values())):
        if isinstance(value, torch.Tensor):
            recorder.before.note_history(value)

    def promised(tensor: torch.Tensor) -> Any:
        made = promise_like(tensor)
        recorder.before.born.add(made._ttr_block)
        return made

    args, kwargs = tree_map(functools.partial(_with_metadata, promised), (args, kwargs))
    with _made_up_noted(answers), _as_before(modules, promised), _recording(recorder, answers):
        for module in modules:
            for name, tensor in _tensors_of(module).items():
                if isinstance(tensor, TensorRef):
                    recorder.names.setdefault(tensor._ttr_block.block_id, name)
        if inspect.isgeneratorfunction(call):
            _run_parts(call(*args, **kwargs), recorder)
        else:
            for number in range(steps):
                recorder.begin_step(f"step {number + 1}" if steps > 1 else "all")
                call(*args, **kwargs)
    recorder.note_deaths()
    return recorder.record


@contextmanager
def _recording(recorder: Recorder, values: Values) -> Iterator[None]:
    """Make promises inside, write down what is asked for, and keep no real values for later."""
    before, standing = recorder.before, Standing(promises.draws)
    with (
        surely(lambda: promises.take_back(before)),
        surely(standing.put_back),
        _told(standing.note, when_drawn, when_seeded),
        _told(before.note_made, when_made),
        drawing(),  # what waits from before is not drawn, nor left behind
        scoped(Scope(values, recorder, PromisedDraws(first=standing.note))),
        moving.entered(before.note_moved),
        _counts_put_back(),
    ):
        yield


@contextmanager
def _counts_put_back() -> Iterator[None]:
    """Put back what optimizers count, in plain tensors and in numbers: nobody tells of those."""
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    numbers: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if promises.recorder is None:
            return  # another thread's
        of_all = list(optimizer.state.values())  # by parameter, or of a kind of its own
        for tensor in tree_leaves(of_all):
            is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, TensorRef)
            if is_plain and id(tensor) not in tensors:
                tensors[id(tensor)] = tensor, tensor.clone()
        for state in of_all:
            if isinstance(state, dict) and id(state) not in numbers:
                counts = {name: n for name, n in state.items() if type(n) in (int, float)}
                numbers[id(state)] = state, counts

    def put_back() -> None:
        with torch.no_grad():
            for tensor, before in tensors.values():
                tensor.copy_(before)
        for state, counts in numbers.values():
            state.update(counts)

    with surely(put_back), register_optimizer_step_pre_hook(note):
        yield


@contextmanager
def _told(note: Callable[[Any], None], *lists: list[Callable[[Any], None]]) -> Iterator[None]:
    """Be told what lists tell of, inside forecasts: of generators, and of memory that is made."""

    def tell(told: Any) -> None:
        if promises.recorder is not None:
            note(told)

    def end() -> None:
        for one in lists:
            if tell in one:
                one.remove(tell)

    with surely(end):
        for one in lists:
            one.append(tell)
        yield


@contextmanager
def _made_up_noted(answers: Values) -> Iterator[None]:
    """Have an error say which value was made up for the program before, if one was."""
    try:
        yield
    except Exception as error:
        if answers.made_up_at:
            error.add_note(
                f"A forecast computes nothing: the value asked for at {answers.made_up_at} was "
                f"made up ({answers.policy}). If that cannot be, answer it: forecast(..., "
                "values={'item': ...}), by the operators that ask."
            )
        raise


def _run_parts(parts: Iterator[Any], recorder: Recorder) -> None:
    number, done = 0, object()
    while True:
        number += 1
        recorder.begin_step(f"part {number}")
        name = next(parts, done)
        if isinstance(name, tuple):  # our own programs': what they keep for a part that may follow
            name, kept = name
            for ref in _refs_in(kept):
                recorder.record.blocks[ref._ttr_block.block_id].is_kept = True
        if isinstance(name, str):
            recorder.rename_step(name)
        if name is done:
            return


def _refs_in(value: Any) -> Iterator[TensorRef]:
    """Yield the TensorRefs in containers, and in objects such as caches."""
    todo, seen = [value], set[int]()
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if isinstance(leaf, TensorRef):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, (type, torch.Tensor)):
                seen.add(id(leaf))
                todo.append(getattr(leaf, "__dict__", ()))


def _held_by(call: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return what a call can reach: arguments, its own, and what it names."""
    held = [call, getattr(call, "__self__", None)]
    function = call.__func__ if inspect.ismethod(call) else call
    if inspect.isfunction(function):
        for cell in function.__closure__ or ():
            with suppress(
                ValueError
            ):  # not filled yet: a function that names itself, or a later one
                held.append(cell.cell_contents)
        names = function.__globals__
        held += [names[name] for name in function.__code__.co_names if name in names]
    return tree_leaves((held, args, kwargs))


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _adopt_plain(module: nn.Module) -> None:
    """Adopt in place what a module has had since before us: torch would write that for real."""
    for part in module.modules():
        tensors = (*part._parameters.values(), *part._buffers.values())
        plain = [t for t in tensors if t is not None and is_adoptable(t) and not t.is_shared()]
        if plain:
            with without_own_references(part):
                for tensor in plain:
                    tensorsManager.ownership.try_adopt_in_place(tensor)


def _with_metadata(promised: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, TensorRef):
        return value
    return promised(value) if value.device.type == "meta" else tensorsManager.adopt(value)


def promise_like(tensor: torch.Tensor) -> Any:
    """Make a promise with the metadata of a tensor, and without values."""
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(plain, TensorRef):
        raise AssertionError("tensors on the meta device are plain")
    label = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    block = promises.promised(Cell(plain.untyped_storage().nbytes()))
    return promises.ref_over(plain, block, label).requires_grad_(tensor.requires_grad)


@contextmanager
def _as_before(
    modules: Iterable[nn.Module], promised: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """Let modules on the meta device be promises inside; put back what they had."""
    registries: list[dict[str, Any]] = []
    for module in modules:
        for part in module.modules():
            registries += [part._parameters, part._buffers]
    before = [(r, dict(r)) for r in registries]
    known: dict[int, Any] = {}

    def put_back() -> None:
        for registry_, had in before:
            registry_.clear()
            registry_.update(had)

    with surely(put_back):
        for registry_, had in before:
            for name, tensor in had.items():
                if tensor is not None and tensor.device.type == "meta":
                    registry_[name] = known.setdefault(
                        id(tensor), _persistent(promised(tensor), tensor)
                    )
        yield


def _persistent(made: Any, tensor: torch.Tensor) -> Any:
    made._ttr_block.is_persistent = True
    if isinstance(tensor, nn.Parameter):
        made = as_parameter(made)
    return made
