"""Whether what torch makes comes under management, here and now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from . import forking
from .scopes import Scopes

#: Set inside `disabled()`, of which other threads and tasks see nothing.
is_disabled: Scopes[bool] = Scopes("torchTensorRef.disabled", False)

#: What makes a factory's result without bytes, inside `promising()`; None: it makes its bytes.
making: Scopes[Callable[..., Any] | None] = Scopes("torchTensorRef.making", None)

#: Told of a TensorRef that is about to stand for other memory or sizes, inside a forecast; or None.
moving: Scopes[Callable[[Any], None] | None] = Scopes("torchTensorRef.moving", None)

#: The kind of device as whose kernels torch's shape functions lay out results; None: as they would.
shaped_for: Scopes[str | None] = Scopes("torchTensorRef.shaped_for", None)

#: Called with the manager once its devices are open.
when_open: list[Callable[[Any], None]] = []

#: Called with a `torch.Generator` before somebody draws from it, or looks at its state; and before
#: somebody sets that.
when_drawn: list[Callable[[Any], None]] = []
when_seeded: list[Callable[[Any], None]] = []

#: Called with a plain tensor that a factory has made, in memory of its own.
when_made: list[Callable[[Any], None]] = []

#: Called with a plain parameter that meets TensorRefs in an operator.
when_plain: list[Callable[[Any], None]] = []


class Watch:
    """Whether somebody wants to see every operator: the ready path reads `on`, and nothing else.

    Attributes
    ----------
    on : bool
        Somebody looks on: every operator passes `interception/onlookers`.
    takes_apart : bool
        He may change what an operator does, so that composite ones come in their parts.
    is_slow : bool
        Every operator takes the slow path: a check or a trace is in it.
    """

    def __init__(self) -> None:
        self.on = self.takes_apart = self.is_slow = False
        #: Told of `on` when somebody has said what he wants: who keeps a copy of it (C++).
        self.listeners: list[Callable[[bool], None]] = []
        self._lock = forking.Lock()
        self._wanted: dict[str, tuple[bool, bool]] = {}

    def want(
        self, who: str, wanted: bool, *, takes_apart: bool = False, is_slow: bool = False
    ) -> None:
        """Note what one of those who may look on wants, in the place of what he has wanted."""
        with self._lock:
            left = {name: what for name, what in self._wanted.items() if name != who}
            # In one step, or an error could come when it is not there that somebody else looks on.
            self._wanted = {**left, who: (takes_apart, is_slow)} if wanted else left
            self.takes_apart = any(apart for apart, _ in self._wanted.values())
            self.is_slow = any(slow for _, slow in self._wanted.values())
            self.on = bool(self._wanted)
            for listener in self.listeners:
                listener(self.on)


watch = Watch()


def disabled() -> AbstractContextManager[None]:
    """Leave everything plain inside: what torch makes there stays a plain tensor.

    Notes
    -----
    Holds for the current thread or task, and for tasks that are begun inside, until it ends.
    TensorRefs met inside still work, and operators on them give TensorRefs. Scopes nest.
    """
    return is_disabled.entered(True)
