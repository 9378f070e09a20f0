"""What holds inside scopes of a thread or task, whoever ends them, and in whatever order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _End(property):
    """Gives a scope what ends it: a lock's own method, in C, which no error keeps from its end."""

    def __call__(self, scope: _Scope[Any], *error: Any) -> None:
        """End it as `ExitStack` does, which takes this from the class."""
        scope.end(*error)


class _Scope(ContextDecorator, Generic[T]):
    """A scope; where it is entered again, in whatever thread, another one like it is begun."""

    def __init__(self, scopes: Scopes[T], value: T) -> None:
        self.value = value
        #: Taken while it is open.
        self.lock = threading.Lock()
        self.ident = threading.get_ident()
        self._scopes = scopes
        #: There is one thing in it until somebody is to open this one itself, and who that is.
        self._free = [True]
        self._taken_by: int | None = None
        #: Those that were begun because this one was open, or had been.
        self._again: list[_Scope[T]] = []

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or not begun."""
        return not self.lock.locked()

    def _take(self) -> bool:
        try:
            self._free.pop()
        except IndexError:
            return False
        self._taken_by = threading.get_ident()
        return True

    def __enter__(self) -> None:
        scope = self
        if self._take() or self._taken_by == threading.get_ident():
            self._taken_by = None
        else:
            scope = _Scope(self._scopes, self.value)
            self._again.append(scope)
        scope.ident = threading.get_ident()
        try:
            scope.lock.acquire()
            self._scopes.begin(scope)
        except BaseException:
            scope.lock.acquire(blocking=False)
            scope.lock.release()
            raise

    def _exit(self) -> Any:
        """Return what ends the scope that is about to be entered; `with` asks before it enters."""
        return self.lock.__exit__ if self._take() else self.end

    __exit__ = _End(_exit)

    def end(self, *error: Any) -> None:
        """End the innermost one of this thread; of another thread where it has none open."""
        open_ones = [scope for scope in (self, *self._again) if not scope.is_over]
        me = threading.get_ident()
        mine = [scope for scope in open_ones if scope.ident == me]
        for scope in (mine or open_ones)[-1:]:
            scope.lock.__exit__(*error)
        for scope in [one for one in self._again if one.ident == me and one.is_over]:
            self._again.remove(scope)

    def _recreate_cm(self) -> _Scope[T]:
        return _Scope(self._scopes, self.value)


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
        #: Those of all threads, by their ids; one that is over may be left for a while.
        self._of_all: dict[int, _Scope[T]] = {}

    def get(self) -> T:
        """Return the value of the innermost scope; the default outside of all."""
        for scope in reversed(self._entered.get()):
            if not scope.is_over:
                return scope.value
        return self._default

    def all(self) -> tuple[T, ...]:
        """Return the values of all scopes that this thread or task is in, outermost first."""
        return tuple(scope.value for scope in self._entered.get() if not scope.is_over)

    def everywhere(self) -> list[T]:
        """Return the values of the scopes that any thread is in."""
        self._forget_ended()
        return [scope.value for scope in list(self._of_all.values())]

    def leave_others(self) -> None:
        """Forget the scopes of other threads, in a forked child: nobody ends them there."""
        me = threading.get_ident()
        self._of_all = {key: scope for key, scope in self._of_all.items() if scope.ident == me}

    def entered(self, value: T) -> AbstractContextManager[None]:
        """Have a value hold inside."""
        return _Scope(self, value)

    def begin(self, scope: _Scope[T]) -> None:
        """Let one hold that is open from now on."""
        self._forget_ended()
        self._of_all[id(scope)] = scope
        self._entered.set((*self._entered.get(), scope))

    def _forget_ended(self) -> None:
        for scope in list(self._of_all.values()):
            if scope.is_over:
                self._of_all.pop(id(scope), None)
        entered = self._entered.get()
        if any(scope.is_over for scope in entered):
            self._entered.set(tuple(scope for scope in entered if not scope.is_over))


@contextmanager
def surely(end: Callable[[], None]) -> Iterator[None]:
    """Have something done at the end that can be done twice: an error may come halfway."""
    try:
        try:
            yield
        finally:
            end()
    except BaseException:
        end()
        raise
