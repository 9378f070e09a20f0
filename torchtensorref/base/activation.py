"""Whether what torch makes comes under management, here and now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: Set inside `disabled()`. A context variable, so that other threads and tasks go on as they were.
is_disabled: ContextVar[bool] = ContextVar("torchTensorRef.disabled", default=False)


#: Called with the manager once its devices are open.
when_open: list[Callable[[Any], None]] = []

#: Called with a plain parameter that meets TensorRefs in an operator.
when_plain: list[Callable[[Any], None]] = []


class Watch:
    """Whether somebody wants to see every operator: the ready path reads this one attribute."""

    def __init__(self) -> None:
        self.on = False


watch = Watch()


@contextmanager
def disabled() -> Iterator[None]:
    """Leave everything plain inside: what torch makes there stays a plain tensor.

    Notes
    -----
    Holds for the current thread or task. TensorRefs met inside still work, and operators on them
    give TensorRefs. Scopes nest.
    """
    token = is_disabled.set(True)
    try:
        yield
    finally:
        is_disabled.reset(token)
