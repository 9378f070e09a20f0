"""What a function that was compiled has beside its arguments: modules, and cells of closures."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from ..memory.ref import TensorRef
from .slots import tensors_of
from .tensor_tree import CLOSED, DICT, FROZEN, LIST, OBJECT, TUPLE, kind_of

#: How deep functions hold functions (masks composed of masks).
DEPTH = 6
#: Objects that are looked into at most: some hold the whole program.
MOST_VALUES = 10_000
#: Where classes come from whose objects are not looked into: ours, and Python's own (loggers).
_NO_PROGRAMS = sys.stdlib_module_names - {"argparse", "builtins", "collections", "types"} | {
    __name__.partition(".")[0]
}
#: Modules of Python in which no tensors of the program are.
_NO_NAMES = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy"}


class Cells:
    """The cells by which functions hold TensorRefs, whose contents are exchanged for a call."""

    def __init__(self, *values: Any) -> None:
        self._cells = [
            cell
            for cell in _cells_of(values, set(), 0)
            if isinstance(cell.cell_contents, TensorRef)
        ]
        #: The TensorRefs, as an argument that `Exchange` puts plain tensors into.
        self.contents = [cell.cell_contents for cell in self._cells]
        self._before = list(self.contents)

    def put(self, contents: list[Any]) -> None:
        """Let the functions see these instead."""
        for cell, value in zip(self._cells, contents, strict=True):
            cell.cell_contents = value

    @property
    def are_rebound(self) -> bool:
        """Whether a call has let functions hold other values."""
        pairs = zip(self._cells, self._before, strict=True)
        return any(cell.cell_contents is not value for cell, value in pairs)

    def put_back(self) -> None:
        """Let them see the TensorRefs again."""
        self.put(self._before)


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a function can reach: its own, and those it has closed over."""
    found: dict[int, nn.Module] = {}
    for value in (getattr(function, "__self__", None), *_held(function, 0)):
        if isinstance(value, nn.Module):
            found[id(value)] = value
    return list(found.values())


def _held(function: Any, depth: int) -> Iterator[Any]:
    """Yield what a function holds: its closure, the globals that it names, its defaults."""
    if depth > DEPTH:
        return
    if isinstance(function, functools.partial):
        parts = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, types.MethodType):
        parts = (function.__self__, function.__func__)
    elif isinstance(function, types.FunctionType):
        names = function.__code__.co_names
        parts = (
            *(contents for cell in function.__closure__ or () for contents in _contents(cell)),
            *_named(function.__globals__, names, set()),
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
    else:
        return
    for part in parts:
        yield part
        if _is_of_program(part):
            yield from _held(part, depth + 1)


def _named(namespace: dict[str, Any], names: tuple[str, ...], seen: set[int]) -> Iterator[Any]:
    """Yield what has one of some names, also in a Python module that has one: `models.encoder`."""
    for name in names:
        if name not in namespace:
            continue
        part = namespace[name]
        yield part
        is_module = isinstance(part, types.ModuleType) and id(part) not in seen
        if is_module and part.__name__.partition(".")[0] not in _NO_NAMES:
            seen.add(id(part))
            yield from _named(vars(part), names, seen)


def holds_refs(function: Any) -> bool:
    """Whether a function holds TensorRefs where they cannot be exchanged: globals, defaults."""
    in_cells = {id(cell.cell_contents) for cell in _cells_of(function, set(), 0)}
    return any(
        isinstance(part, TensorRef) and id(part) not in in_cells for part in _held(function, 0)
    )


def reaches_refs(function: Any, besides: Container[int] = ()) -> bool:
    """Whether a function holds TensorRefs inside something: an object, a list, an optimizer.

    Parameters
    ----------
    besides : container of int
        The ids of modules that are not looked into: what they hold is exchanged.
    """
    seen: set[int] = set()
    parts = (part for part in _held(function, 0) if not isinstance(part, torch.Tensor))
    return any(_has_refs(part, seen, besides, 0) for part in parts)


def _has_refs(value: Any, seen: set[int], besides: Container[int], depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, TensorRef)
    if isinstance(value, nn.Module):
        own = () if id(value) in besides else tensors_of(value)
        return any(isinstance(tensor, TensorRef) for tensor in own)
    kind = kind_of(value)
    is_closed = kind is CLOSED or type(value).__module__.partition(".")[0] in _NO_PROGRAMS
    if is_closed or depth > DEPTH or id(value) in seen or len(seen) > MOST_VALUES:
        return False
    seen.add(id(value))
    named = value if kind in (DICT, FROZEN) else vars(value) if kind is OBJECT else None
    parts = value if named is None else named.values()
    return any(_has_refs(part, seen, besides, depth + 1) for part in [*parts])


def _is_of_program(part: Any) -> bool:
    module = getattr(part, "__module__", None) or ""
    return not str(module).startswith("torch.") and module != "torch"


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _cells_of(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the filled cells of the functions inside a value."""
    if depth > DEPTH or id(value) in seen:
        return
    parts: tuple[Any, ...] = ()
    kind = kind_of(value)
    if kind in (LIST, TUPLE):
        parts = tuple(value)
    elif kind in (DICT, FROZEN):
        parts = tuple(value.values())
    elif isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            for contents in _contents(cell):
                yield cell
                parts = (*parts, contents)
    elif isinstance(value, types.MethodType):
        parts = (value.__func__,)
    elif type(value).__module__.startswith("torch.nn.attention"):  # a mask, with its function
        parts = tuple(vars(value).values())
    else:
        return
    seen.add(id(value))
    for part in parts:
        if not isinstance(part, (torch.Tensor, nn.Module)):
            yield from _cells_of(part, seen, depth + 1)
