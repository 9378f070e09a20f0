"""Giving TensorRefs their attributes: on their own class, or on torch's where they have none.

In Python a TensorRef has a class of its own, which has them always; a few are put on torch's, too,
since there they are given TensorRefs that they cannot take. In C++ it is of torch's class:
each attribute is put there, does for TensorRefs what is ours, and for every other tensor what it
did before; `uninstall()` takes it away again. What plain tensors have not, they go on not having.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import getattr_static
from types import FrameType, MethodType
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..interception.tracebacks import hides
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef, is_of_own_class
from .patched_function import PatchedFunction

__tracebackhide__ = hides


class _Empty:
    """Kept by its name: of a class that nobody keeps, a collection empties what `vars` gave."""

    __slots__ = ()


#: What every class has in its body, also an empty one.
_OF_EVERY_CLASS = frozenset(vars(_Empty)) | {
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
}

#: What torch's own does as well for a TensorRef of its class.
_LEFT_TO_TORCH = frozenset(
    {"__new__", "__init__", "__coerce_same_metadata_as_tangent__", "as_subclass"}
)

#: What is called on torch's class, or on a plain tensor, and takes the memory of a TensorRef.
_OF_TORCHS_CLASS = ("apply_", "map_", "map2_", "data")

_NOTHING = object()


def attach_to_class(*sources: type) -> None:
    """Give the class TensorRef the attributes that classes define in their bodies."""
    for name, value in _defined(sources).items():
        setattr(TensorRef, name, value)


def attach_to_tensors(*sources: type) -> Callable[[], None]:
    """Give them to every TensorRef, of whatever class it is; return what takes them away again."""
    given = _defined(sources)
    if core.library is None:
        given = {name: given[name] for name in _OF_TORCHS_CLASS}
    else:
        given = core.library.attributes() | given
    had = {}
    for name, ours in given.items():
        if name in _LEFT_TO_TORCH:
            continue
        had[name] = vars(Tensor).get(name, _NOTHING)
        setattr(Tensor, name, _for_refs(name, ours, getattr_static(Tensor, name, None)))

    def undo() -> None:
        for name, before in had.items():
            if before is _NOTHING:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, before)

    return undo


def _defined(sources: tuple[type, ...]) -> dict[str, Any]:
    return {
        name: value
        for source in sources
        for name, value in vars(source).items()
        if name not in _OF_EVERY_CLASS
    }


def _for_refs(name: str, ours: Any, theirs: Any) -> Any:
    if name.startswith("_ttr_"):
        return ours
    if isinstance(ours, property):
        return _Property(name, ours, theirs)
    return _Method(name, ours) if theirs is None else _patched(ours, theirs)


def _patched(ours: Any, theirs: Any) -> PatchedFunction:
    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(instance, TensorRef) and not asks_its_class(instance):
            return ours(instance, *args, **kwargs)
        return wrapped(*args, **kwargs)  # which calls us again where a class was asked

    return PatchedFunction(theirs, call)


def asks_its_class(ref: Any) -> bool:
    """Whether a method of a TensorRef is for its own class's `__torch_function__` first."""
    return is_of_own_class(ref) and has_torch_function_unary(ref)


class _Method:
    """A method that only TensorRefs have."""

    def __init__(self, name: str, ours: Any) -> None:
        self._name, self._ours = name, ours

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self._ours
        if isinstance(tensor, TensorRef):
            return MethodType(self._ours, tensor)
        raise no_such(self._name, tensor)


class _Property:
    """A property that for other tensors is torch's, or is not there."""

    def __init__(self, name: str, ours: property, theirs: Any) -> None:
        self._name, self._ours, self._theirs = name, ours, theirs
        if theirs is not None:
            #: What a class is told of, as torch tells it: `torch.Tensor.data.__get__`.
            self._getter = PatchedFunction(
                theirs.__get__, lambda _, __, args, ___: ours.__get__(*args)
            )

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self._ours if self._theirs is None else self._theirs
        if isinstance(tensor, TensorRef):
            if self._theirs is not None and asks_its_class(tensor):
                return handle_torch_function(self._getter, (tensor,), tensor)
            return self._ours.__get__(tensor, owner)
        if self._theirs is None:
            if self._name in tensor.__dict__:
                return tensor.__dict__[self._name]
            raise no_such(self._name, tensor)
        if self._name == "data" and not _is_compilers(sys._getframe(1)):
            tensorsManager.ownership.note_data(tensor)  # who writes by it is not seen otherwise
        return self._theirs.__get__(tensor, owner)

    def __set__(self, tensor: Any, value: Any) -> None:
        if isinstance(tensor, TensorRef):
            self._ours.__set__(tensor, value)
        elif self._theirs is None:
            tensor.__dict__[self._name] = value
        else:
            if isinstance(value, TensorRef):
                value = tensorsManager.ownership.exposed_plain(value, self._name)
            self._theirs.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        if self._theirs is not None:
            self._theirs.__delete__(tensor)  # torch says whether it can be, and how it would
        elif isinstance(tensor, TensorRef):
            self._ours.__delete__(tensor)
        elif self._name in tensor.__dict__:
            del tensor.__dict__[self._name]
        else:
            raise no_such(self._name, tensor)


def _is_compilers(frame: FrameType) -> bool:
    """Whether a frame is of torch's compiler, which asks for data to look at their class."""
    return str(frame.f_globals.get("__name__")).startswith("torch._functorch.")


def no_such(name: str, tensor: Any) -> AttributeError:
    """Return what Python raises for an attribute that is not there, and say who has it."""
    kind = type(tensor).__name__
    return AttributeError(
        f"{kind!r} object has no attribute {name!r}: it is plain. "
        "tensorsManager.adopt(tensor) gives the TensorRef that has it.",
        name=name,
        obj=tensor,
    )
