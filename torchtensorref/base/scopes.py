"""What holds inside scopes of a thread or task, whoever ends them, and in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class _Scope(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value
        self.is_over = False


class Scopes(Generic[T]):
    """A value for the scopes that a thread or task is in; the innermost one's holds.

    Notes
    -----
    A scope can end in another thread or task than it began in, and before one inside it: that of a
    generator ends where that is closed or collected, a web server's in any thread of a pool. A
    context variable cannot be set from there, so a scope that is over says so itself.

    Examples
    --------
    >>> size = Scopes("size", 1)
    >>> with size.entered(2):
    ...     size.get()
    2
    >>> size.get()
    1
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._entered: ContextVar[tuple[_Scope[T], ...]] = ContextVar(name, default=())

    def get(self) -> T:
        """Return the value of the innermost scope; the default outside of all."""
        for scope in reversed(self._entered.get()):
            if not scope.is_over:
                return scope.value
        return self._default

    def all(self) -> tuple[T, ...]:
        """Return the values of all scopes that this thread or task is in, outermost first."""
        return tuple(scope.value for scope in self._entered.get() if not scope.is_over)

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Have a value hold inside."""
        scope = _Scope(value)
        self._entered.set((*self._without_ended(), scope))
        try:
            yield
        finally:
            scope.is_over = True
            self._entered.set(self._without_ended())

    def _without_ended(self) -> tuple[_Scope[T], ...]:
        return tuple(scope for scope in self._entered.get() if not scope.is_over)
