"""Middlewares: the list of those that see each operator before and after, and may change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from . import forking
from .activation import watch
from .errors import ConfigError, nearest
from .scopes import Scopes, surely

__all__ = ["Middleware", "Middlewares"]


class Middleware:
    """Sees each operator before it is placed, and its result; does nothing unless it is told to.

    Derive from it, or give any object that has one of the two methods. No lock is held while they
    run, and they may call operators: those pass no middleware.
    """

    def before(self, op: Any) -> None:
        """Look at an operator; place it, change its arguments, answer itself, or raise."""

    def after(self, op: Any, result: Any) -> Any:
        """Look at a result; what is returned takes its place, unless it is None."""

    def leave(self) -> None:
        """Let go of what it has held: it has been taken off the list, or its scope has ended."""


#: Those of the scopes that this thread or task is in.
_scoped: Scopes[tuple[Any, ...]] = Scopes("torchTensorRef.middlewares", ())
#: Those of the scopes that are for the operators of all threads.
_scoped_for_all: Scopes[tuple[Any, ...]] = Scopes("torchTensorRef.middlewares of all", ())


class Middlewares(MutableSequence[Any]):
    """The middlewares of all threads in their order; `scoped` has those of one thread.

    `before` is called in this order, `after` in the opposite one.
    """

    def __init__(self) -> None:
        self._of_all: tuple[Any, ...] = ()
        self._lock = forking.RLock()
        forking.in_child.add(self)

    def begin_in_child(self, *, was_held: bool) -> None:
        """Leave the scopes of other threads in a forked child."""
        _scoped.leave_others()
        _scoped_for_all.leave_others()
        self._settle()

    def here(self) -> tuple[Any, ...]:
        """Return those that see an operator of this thread, in their order."""
        scopes = (*_scoped_for_all.everywhere(), *_scoped.all())
        return (*self._of_all, *chain.from_iterable(scopes))

    @contextmanager
    def scoped(self, *middlewares: Any, all_threads: bool = False) -> Iterator[None]:
        """Add middlewares for a scope: those of this thread or task come after those of all.

        Parameters
        ----------
        *middlewares
            In their order.
        all_threads : bool, optional
            For the operators of every thread. Without it, of this one; autograd runs backward
            passes on an accelerator of its own thread.

        Raises
        ------
        ConfigError
            One of them has neither `before` nor `after`, or takes other arguments.
        """
        for one in middlewares:
            _check(one)
        scopes, staying = _scoped_for_all if all_threads else _scoped, list(middlewares)
        with surely(lambda: self._let_go(staying)), scopes.entered(middlewares):
            self._settle()
            yield

    def _settle(self) -> None:
        with self._lock:
            is_scoped = bool(_scoped.everywhere() or _scoped_for_all.everywhere())
            watch.want("middlewares", bool(self._of_all) or is_scoped, takes_apart=True)

    def _let_go(self, staying: list[Any]) -> None:
        """Have those leave, and be no longer in what is given, that are not on the list."""
        self._settle()

        def let_go(one: Any) -> None:
            if hasattr(one, "leave") and not any(one is other for other in self._of_all):
                one.leave()
            staying[:] = [other for other in staying if other is not one]

        with ExitStack() as ends:  # what one raises keeps no other from leaving
            for one in reversed(staying):
                ends.callback(let_go, one)

    # -- as a list ------------------------------------------------------------------------------

    def remove(self, value: Any) -> None:
        """Take a middleware off the list; ConfigError if it is not there."""
        if value not in self._of_all:
            raise ConfigError(
                f"{value!r} is not among the middlewares: {list(self._of_all)}. Give remove() the "
                "object that append() was given."
            )
        super().remove(value)

    def __getitem__(self, index: Any) -> Any:
        return self._of_all[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        with self._lock:
            changed = list(self._of_all)
            changed[index] = value
            self._exchange(changed)

    def __delitem__(self, index: Any) -> None:
        with self._lock:
            left = list(self._of_all)
            del left[index]
            self._exchange(left)

    def insert(self, index: int, value: Any) -> None:
        """Put a middleware before the one at `index`; ConfigError if it is none."""
        with self._lock:
            changed = list(self._of_all)
            changed.insert(index, value)
            self._exchange(changed)

    def _exchange(self, wanted: Iterable[Any]) -> None:
        wanted = tuple(wanted)
        for one in wanted:
            _check(one)
        staying = list(self._of_all)
        with surely(lambda: self._let_go(staying)):
            self._of_all = wanted

    def __len__(self) -> int:
        return len(self._of_all)

    def __repr__(self) -> str:
        return f"<Middlewares {list(self._of_all)!r}>"


def _check(middleware: object) -> None:
    methods = [getattr(middleware, name, None) for name in ("before", "after")]
    if isinstance(middleware, type) or not any(map(callable, methods)):
        is_kind = isinstance(middleware, type)
        what = f"the class {middleware.__name__}" if is_kind else repr(middleware)  # type: ignore[attr-defined]
        raise ConfigError(
            f"A middleware is an object with a method before(op) or after(op, result), not {what}."
            + (" Make an object of it: write its name with ()." if is_kind else "")
        )
    own = [getattr(method, "__func__", method) for method in methods]
    if own == [Middleware.before, Middleware.after]:
        meant = vars(type(middleware)).keys() - vars(Middleware).keys()
        written = sorted(name for name in meant if nearest(name, ("before", "after")))
        raise ConfigError(
            f"{middleware!r} has no before(op) and no after(op, result) of its own, so it would do "
            "nothing." + "".join(f" It has {name!r}." for name in written)
        )
    for name, method in zip(("before", "after"), methods, strict=True):
        if not callable(method) and hasattr(middleware, name):
            raise ConfigError(
                f"{middleware!r} has {name} = {method!r}, which cannot be called. Leave it out, or "
                "write a method."
            )
    for method, arguments in zip(methods, (("op",), ("op", "result")), strict=True):
        if callable(method) and not takes(method, arguments):
            name = getattr(method, "__qualname__", repr(method))
            raise ConfigError(f"{name} is called with ({', '.join(arguments)}), and takes others.")


def takes(method: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Whether a function can be called with so many arguments; True where it does not say."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
