"""The guard around what programs call: it repairs before, and notes what comes halfway.

It is called wherever a program stands, so what the runtime does to storages happens below the modes
and transforms that are around. What has happened meanwhile is told to callbacks when it is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as _no_transforms
from torch.utils._python_dispatch import _disable_current_modes

from ..base.listeners import listeners

_function_modes = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack

Class = TypeVar("Class", bound=type)


class Guarded(Protocol):
    """Who can be in doubt."""

    def repair(self) -> None:
        """Repair what an error has left halfway."""

    def doubt(self) -> None:
        """Note, while an error is handled, that it may have come halfway through something."""


def guards(*, but: tuple[str, ...] = ()) -> Callable[[Class], Class]:
    """Make a decorator of classes: their public methods and setters are guarded, but for some."""

    def decorate(cls: Class) -> Class:
        for name, value in list(vars(cls).items()):
            if name.startswith("_") or name in but:
                continue
            if isinstance(value, FunctionType):
                setattr(cls, name, _guarded(value))
            elif isinstance(value, property) and value.fset is not None:
                setattr(cls, name, value.setter(_guarded(value.fset)))
        return cls

    return decorate


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if _function_modes() or _dispatch_modes() or _functorch_level() is not None:
            with torch._C.DisableTorchFunction(), _no_transforms(), _disable_current_modes():
                return method(self, *args, **kwargs)
        self.repair()
        try:
            result = function(self, *args, **kwargs)
        except BaseException as error:
            self.doubt()
            listeners.deliver_beside(error)
            raise
        if listeners.waiting:
            listeners.deliver()
        return result

    return method
