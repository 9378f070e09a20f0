"""What our patches do around signal handlers, so that none of them runs halfway through our doings.

The program sees the handlers that it has set, and no others: `base/interrupts.py` says what stands
in for them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of `signal`, which we patch
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..base.interrupts import Deferring, defers
from .patches import Row


def set_handler(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `signal.signal` with what stands in for a handler; return the program's own before."""
    if len(args) == 2:
        args = (args[0], defers(args[1]))
    elif "handler" in kwargs:
        kwargs = {**kwargs, "handler": defers(kwargs["handler"])}
    return _own(wrapped(*args, **kwargs))


def get_handler(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `signal.getsignal`; return the handler that the program has set."""
    return _own(wrapped(*args, **kwargs))


def _own(handler: Any) -> Any:
    return handler.handler if isinstance(handler, Deferring) else handler


@dataclass(eq=False)
class HandlersPatch(Row):
    """The handlers that are set already, Python's own for Ctrl-C among them."""

    reason: str
    installed: bool = field(default=False, init=False)
    absence: str = field(default="", init=False)

    def install(self) -> None:
        """Let something stand in for each handler that is a function."""
        self._exchange(defers)
        self.installed = not self.absence

    def uninstall(self) -> None:
        """Put the handlers back."""
        self._exchange(_own)
        self.installed = False

    def _exchange(self, of: Callable[[Any], Any]) -> None:
        self.absence = ""
        for number in signal.valid_signals():
            now = _signal.getsignal(number)
            if of(now) is not now:
                try:
                    _signal.signal(number, of(now))
                except ValueError as error:  # torch is being imported by another thread
                    self.absence = f"ValueError: {error}"
