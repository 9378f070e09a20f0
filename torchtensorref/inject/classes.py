"""What our patches do where a tensor is made anew as one of a library's own class.

`C(data)` for a class derived from `torch.nn.Parameter`, and `torch.Tensor._make_subclass(C, data)`,
give a tensor of exactly the class `C` over the memory of `data`. A TensorRef has none: so `C` is
made over the plain tensor at home, which the TensorRef goes on sharing. What torch fills in late
(`UninitializedParameter`) becomes a TensorRef when it is filled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..base.interrupts import lets_program_run
from ..interception.tracebacks import hides
from .factories import _core, is_plain_world
from .hooks import is_disabled, is_ref, load, state
from .inject_to import injectTo
from .registration import module_behind

__tracebackhide__ = hides


def subclass_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `Tensor._make_subclass(cls, data, require_grad=False, ...)`."""
    given = dict(zip(("cls", "data"), args, strict=False)) | kwargs
    data: Any = given.get("data")
    if not _has_no_memory(data):
        return wrapped(*args, **kwargs)
    kind, requires_grad = given["cls"], args[2] if len(args) > 2 else kwargs.get("require_grad")
    if kind is nn.Parameter:
        return nn.Parameter(data, bool(requires_grad))
    if kind is torch.Tensor:
        return data.detach().requires_grad_(bool(requires_grad))
    plain = data.exposed_plain(f"{kind.__name__} shares it")
    return wrapped(kind, plain, *args[2:], **_without(kwargs, "cls", "data"))


def parameter_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `Parameter.__new__(cls, data=None, requires_grad=True)`."""
    kind = args[0]
    data: Any = args[1] if len(args) > 1 else kwargs.get("data")
    if kind is nn.Parameter or not _has_no_memory(data):
        return wrapped(*args, **kwargs)
    plain = data.exposed_plain(f"{kind.__name__} shares it")
    return wrapped(kind, plain, *args[2:], **_without(kwargs, "data"))


def _has_no_memory(data: Any) -> bool:
    """Whether it is a TensorRef, of which only one in C++ can be of any class."""
    return is_ref(data) and load(".memory.core").library is None


def _without(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


@lets_program_run
def materialize_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call `materialize` of a lazy parameter or buffer, and make the same object a TensorRef."""
    wrapped(*args, **kwargs)
    if not state.active or is_disabled.get() or not is_plain_world():
        return
    if injectTo.decisions[module_behind(sys._getframe(1))]:
        _core().manager.ownership.adopt_in_place(instance)
