"""The guard around what programs call: it repairs before, and notes what comes halfway.

What has happened meanwhile is told to callbacks when it is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, TypeVar

from ..base.listeners import listeners

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
