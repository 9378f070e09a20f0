"""Exchange of tensors inside arguments and results: containers, caches, model outputs."""

from __future__ import annotations

import builtins
import enum
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..base.tuples import tuple_like
from ..memory.ref import TensorRef, attributes_given

DEPTH = 8


class Kind(enum.Enum):
    """How to look into a value; decided once per type."""

    CLOSED = "closed"  # holds no tensor of the call, or holds the whole program
    TENSOR = "tensor"
    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    #: A mapping that cannot be changed: another one is made, as of tuples.
    FROZEN = "frozen"
    OBJECT = "object"


CLOSED, TENSOR, LIST, TUPLE, DICT, FROZEN, OBJECT = Kind

_CONTAINERS: dict[type, Kind] = {
    list: LIST,
    deque: LIST,
    tuple: TUPLE,
    dict: DICT,
    types.MappingProxyType: FROZEN,
    # Python's own from 3.15 on.
    getattr(builtins, "frozendict", types.MappingProxyType): FROZEN,
}

_NEVER_OPENED = (
    torch.nn.Module,
    type,
    enum.Enum,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Generator,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)

#: Closed values that can be part of a result.
_ALL_THERE = (
    torch.nn.Module,
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)


def _classify(kind: type) -> Kind:
    if issubclass(kind, torch.Tensor):
        return TENSOR
    # A configuration describes a model and holds no tensors; it is long to look through.
    if issubclass(kind, _NEVER_OPENED) or kind.__name__.endswith("Config"):
        return CLOSED
    for base, found in _CONTAINERS.items():
        if issubclass(kind, base):
            return found
    return OBJECT if "__dict__" in dir(kind) else CLOSED


_kinds: dict[type, Kind] = {}


def kind_of(value: Any) -> Kind:
    """Return how to look into a value."""
    kind = type(value)
    found = _kinds.get(kind)
    if found is None:
        found = _kinds[kind] = _classify(kind)
    return found


class Exchange:
    """Replaces tensors in place in what a call is given and gives back, and can undo it."""

    def __init__(self) -> None:
        #: Containers, what they held before, and what of it was exchanged: by the id of what was
        #: put there, that and what was there before.
        self._before: list[tuple[Any, list[tuple[Any, Any]], dict[int, tuple[Any, Any]]]] = []
        #: Plain tensors by identity, with the TensorRef each stands for; None: the program's own.
        self.known: dict[int, tuple[torch.Tensor, Any]] = {}
        #: TensorRefs by the identities of what hangs in their places, which the caller holds.
        self.hung: dict[int, Any] = {}

    def find(self, value: Any) -> list[Any]:
        """Return the distinct TensorRefs inside a value, in order; remember its plain tensors."""
        found: dict[int, Any] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, TensorRef):
                found[id(tensor)] = tensor
            else:
                self.known[id(tensor)] = (tensor, None)
            return tensor

        self._walk(value, note, set(), 0, before=None)
        return list(found.values())

    def places_in(self, *values: Any) -> Counter[int]:
        """Count the places in values, by the ids of the tensors there, where one is exchanged."""
        counts: Counter[int] = Counter()
        seen: set[int] = set()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            counts[id(tensor)] += 1
            if counts[id(tensor)] == 1:
                for part in attributes_given(tensor).values():
                    self._walk(part, note, seen, 1, before=None)
            return tensor

        for value in values:
            self._walk(value, note, seen, 0, before=None)
        return counts

    def is_open(self, value: Any) -> bool:
        """Whether a result is all there: no generator or function that goes on with tensors."""
        kind = kind_of(value)
        if kind is CLOSED:
            return isinstance(value, _ALL_THERE) or type(value).__name__.endswith("Config")
        if kind is LIST or kind is TUPLE:
            return all(map(self.is_open, value))
        return kind not in (DICT, FROZEN) or all(map(self.is_open, value.values()))

    def plain_tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors that `find` has met: the program's own."""
        return [tensor for tensor, ref in self.known.values() if ref is None]

    def unwrap(self, value: Any, plain_of: Callable[[Any], torch.Tensor]) -> Any:
        """Put plain tensors in the place of TensorRefs; containers change in place."""

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, TensorRef):
                return tensor
            plain = plain_of(tensor)
            self.known[id(plain)] = (plain, tensor)
            return plain

        return self._walk(value, swap, set(), 0, before=self._before)

    def wrap(self, value: Any, ref_of: Callable[[torch.Tensor], Any]) -> Any:
        """Put TensorRefs in the place of plain tensors, the same ones for what was unwrapped."""
        return self._walk(
            value, lambda tensor: self.wrap_one(tensor, ref_of), set(), 0, before=None
        )

    def wrap_one(self, tensor: torch.Tensor, ref_of: Callable[[torch.Tensor], Any]) -> Any:
        """Return what `wrap` puts in the place of one tensor."""
        known = self.known.get(id(tensor))
        if known is not None:
            return tensor if known[1] is None else known[1]
        if isinstance(tensor, TensorRef):
            return tensor
        ref = self.hung.get(id(tensor))
        if ref is None:
            ref = ref_of(tensor)
        self.known[id(tensor)] = (tensor, ref)
        if ref is not tensor and (given := attributes_given(tensor)):
            vars(ref).update(self.wrap(given, ref_of))
        return ref

    def put(self, value: Any, others: dict[int, Any]) -> Any:
        """Put other tensors in the place of those with some ids."""
        return self._walk(
            value, lambda tensor: others.get(id(tensor), tensor), set(), 0, before=None
        )

    def restore(self, *, whole: bool = False) -> None:
        """Put back what `unwrap` has exchanged in containers; what else was done to them stays.

        With `whole` nothing of it does: the call is made once more.
        """
        for container, items, exchanged in reversed(self._before):
            with suppress(Exception):  # of a key's: the program's own error is to arrive
                if whole:
                    put_all(container, items)
                else:
                    put_back(container, exchanged)

    def _walk(
        self, value: Any, swap: Callable[[Any], Any], seen: set[int], depth: int, before: Any
    ) -> Any:
        """Return a value with its tensors replaced; what can be changed in place is."""
        kind = kind_of(value)
        if kind is TENSOR:
            return swap(value)
        if kind is CLOSED or depth > DEPTH or id(value) in seen:
            return value
        if kind is TUPLE:
            parts = [self._walk(part, swap, seen, depth + 1, before) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return tuple_like(value, parts)
        if kind is FROZEN:
            named = {
                key: self._walk(part, swap, seen, depth + 1, before) for key, part in value.items()
            }
            return value if all(named[key] is value[key] for key in named) else type(value)(named)
        seen.add(id(value))
        if kind is LIST:
            self._walk_items(
                value, enumerate(_built_in(value).__iter__(value)), swap, seen, depth, before
            )
        elif kind is DICT:
            self._walk_items(value, _built_in(value).items(value), swap, seen, depth, before)
        own = getattr(value, "__dict__", None)
        if own is not None and own is not value:
            self._walk_items(own, own.items(), swap, seen, depth, before)
        return value

    def _walk_items(
        self, container: Any, items: Any, swap: Any, seen: set[int], depth: int, before: Any
    ) -> None:
        items = [*items]
        exchanged: dict[int, tuple[Any, Any]] = {}
        if before is not None:
            before.append((container, items, exchanged))
        for key, part in items:
            kind = _kinds.get(type(part))
            if kind is CLOSED:
                continue
            new = self._walk(part, swap, seen, depth + 1, before)
            if new is not part:
                exchanged[id(new)] = new, part
                _built_in(container).__setitem__(container, key, new)


def _built_in(container: Any) -> Any:
    """Return the class of Python's whose methods change a container, and do nothing besides."""
    return next(kind for kind in (OrderedDict, dict, list, deque) if isinstance(container, kind))


def put_back(container: Any, exchanged: dict[int, tuple[Any, Any]]) -> None:
    """Put what was there before in the place of what it was exchanged for, wherever that is now."""
    kind = _built_in(container)
    items = kind.items(container) if issubclass(kind, dict) else enumerate(container)
    for key, now in [*items]:
        if id(now) in exchanged:
            kind.__setitem__(container, key, exchanged[id(now)][1])


def put_all(container: Any, items: list[tuple[Any, Any]]) -> None:
    """Have a container hold these, and nothing else."""
    kind = _built_in(container)
    kind.clear(container)
    for key, value in items:
        if issubclass(kind, dict):
            kind.__setitem__(container, key, value)
        else:
            kind.append(container, value)
