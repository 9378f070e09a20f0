"""Random numbers that are promised: those that the program would have drawn at once.

A generator gives to everybody what it would if they had been drawn. So what waits is drawn before
somebody draws from it for real, or looks at its state. Who sets it leaves behind what waits, which
goes on from where the generator was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..base import forking
from ..base.activation import when_drawn, when_seeded
from ..base.scopes import Scopes

#: Whether we draw, or look, ourselves.
_is_ours: Scopes[bool] = Scopes("torchTensorRef.drawing", False)


def drawing() -> AbstractContextManager[None]:
    """Draw from generators inside without having drawn what waits."""
    return _is_ours.entered(True)


def generator_of(arguments: Iterable[Any]) -> torch.Generator:
    """Return the generator that a call with such arguments draws from."""
    given = (value for value in arguments if isinstance(value, torch.Generator))
    return next(given, torch.default_generator)


class Draws:
    """What is to be drawn from one generator, beginning at the state that it has now."""

    def __init__(self, generator: torch.Generator, owner: PromisedDraws) -> None:
        self.generator = generator
        self._owner = owner
        self._now = generator.get_state()
        #: Where the generator is while nobody else has drawn from it; None: it was set.
        self._seen: torch.Tensor | None = self._now
        #: The `Node` that draws last, and how many are about to come after it.
        self.last: Any = None
        self.coming = 0
        #: Who has begun to draw last, and the state from which: it draws the same again.
        self._begun: tuple[Any, torch.Tensor] = (None, self._now)

    def wait(self, node: Any) -> Any:
        """Have a node draw last; return the one that did."""
        with self._owner.lock:
            before, self.last = self.last, node
            self.coming -= 1
        return before

    def has_run(self, node: Any) -> None:
        """Note that a node has drawn: if nobody waits behind it, the generator is as any other."""
        with self._owner.lock:
            if self.last is node and not self.coming:
                self.last = None
                self._owner.forget(self.generator, self)

    def leave(self) -> None:
        """Let the generator go its own way from now on: somebody sets it."""
        self._seen = None

    def catch_up(self) -> torch.Tensor:
        """Return where the generator is to stand for everybody else: behind what was drawn."""
        self._seen = self._now
        return self._now

    def is_left(self) -> bool:
        """Whether somebody else has drawn from the generator, or set it."""
        return self._seen is None or not torch.equal(self.generator.get_state(), self._seen)

    def run(self, call: Callable[[], Any], who: Any) -> Any:
        """Run an operator that draws the numbers which come next; the same ones if it runs again.

        Whatever comes in between, the generator is where it was for everybody else, or after them.
        """
        is_left = self.is_left()
        after = self.generator.get_state()
        if self._begun[0] != who:
            self._begun = (who, self._now)
        try:
            try:
                self.generator.set_state(self._begun[1])
                result = call()
                self._now = self.generator.get_state()
                if not is_left:
                    self._seen = after = self._now
            finally:
                self.generator.set_state(after)
        except BaseException:  # which may have come on the last line
            self.generator.set_state(after)
            raise
        return result


def _key(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


class PromisedDraws:
    """What waits to be drawn, by generator.

    Parameters
    ----------
    draw : callable, optional
        Given the last node that waits at a generator, has it and those before it run. Without
        it nobody draws them.
    first : callable, optional
        Given a generator from which something is to be drawn.
    """

    def __init__(
        self,
        draw: Callable[[Any], None] | None = None,
        first: Callable[[torch.Generator], None] | None = None,
    ) -> None:
        #: By the generator that C++ knows: an operator is given another object for it than the
        #: program has.
        self._of: dict[int, Draws] = {}
        self.lock = forking.Lock()
        self._draw, self._first = draw, first

    def of(self, generator: torch.Generator) -> Draws:
        """Return what is to be drawn from a generator, up to now; a node that waits must follow."""
        with self.lock, drawing():
            if self._draw is not None and self.settle not in when_drawn:
                when_drawn.append(self.settle)
                when_seeded.append(self._leave)
            draws = self._of.get(_key(generator))
            if self._first is not None:
                self._first(generator)
            if draws is None or draws.is_left():
                draws = self._of[_key(generator)] = Draws(generator, self)
            draws.coming += 1
            return draws

    def forget(self, generator: torch.Generator, draws: Draws) -> None:
        """Leave a generator alone for which nothing waits any more (lock held)."""
        if self._of.get(_key(generator)) is draws:
            del self._of[_key(generator)]

    def settle(self, generator: torch.Generator) -> None:
        """Have drawn what waits: somebody is about to draw for real, or to look."""
        if _is_ours.get():
            return
        draws = self._of.get(_key(generator))
        if draws is not None and draws.last is not None:
            with drawing():
                is_left = draws.is_left()
            if not is_left and self._draw is not None:
                self._draw(draws.last)

    def generators(self) -> list[torch.Generator]:
        """Return the generators at which something waits."""
        with self.lock:
            return [draws.generator for draws in self._of.values()]

    def waiting_at(self, generator: torch.Generator) -> Draws | None:
        """Return what waits at a generator, if it comes before what others draw from now on."""
        draws = self._of.get(_key(generator))
        return None if draws is None or draws.is_left() else draws

    def leave_lost(self, is_lost: Callable[[Any], bool]) -> None:
        """Let generators go their own way whose last node never gets its numbers."""
        for key, draws in list(self._of.items()):
            if is_lost(draws.last):
                draws.leave()
                self._of.pop(key, None)

    def _leave(self, generator: torch.Generator) -> None:
        draws = None if _is_ours.get() else self._of.pop(_key(generator), None)
        if draws is not None:
            draws.leave()


class Standing:
    """Where generators stand before a forecast draws from them, which all of them go back to.

    Parameters
    ----------
    waiting : PromisedDraws
        What waits from before: what of it is drawn meanwhile, they stay behind.
    """

    def __init__(self, waiting: PromisedDraws) -> None:
        self._waiting = waiting
        self._noted = set[int]()
        self._of: dict[int, tuple[torch.Generator, torch.Tensor, Draws | None]] = {}
        with drawing():
            for generator in (torch.default_generator, *waiting.generators()):
                self.note(generator)

    def note(self, generator: torch.Generator) -> None:
        """Note where one stands that is about to be drawn from, or set."""
        key = _key(generator)
        if key not in self._noted:
            self._noted.add(key)  # first: we are told of our own look, too
            state, draws = generator.get_state(), self._waiting.waiting_at(generator)
            self._of[key] = generator, state, draws

    def put_back(self) -> None:
        """Let all stand where they stood; it can be done twice."""
        with drawing():
            for generator, state, draws in self._of.values():
                generator.set_state(state if draws is None else draws.catch_up())
