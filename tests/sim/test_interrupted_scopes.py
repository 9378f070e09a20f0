"""An error at any line where a scope begins and ends: none stays open, nothing stays half changed.

A part of the lines in each run of the tests; `INTERRUPT_EVERY_LINE` tries all, as in
`test_interrupts.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import disabled, middlewares, promising, tensorsManager
from torchTensorRef.base.activation import is_disabled, making
from torchTensorRef.base.errors import StrategyError
from torchTensorRef.inject import hooks
from torchTensorRef.promises.promising import promises

from ..support.interrupting import interrupt, lines_of
from ..support.promised import ERRORS, EVERY_LINE, assert_all_is_as_ever, at, sample_of
from ..support.sweeps import in_turn


@pytest.fixture(autouse=True)
def injected(manage: Any) -> Iterator[None]:
    """Have what torch makes managed."""
    manage("lru", nbytes=200 << 10)
    with hooks.is_disabled.entered(False):
        yield


class Program:
    """What is there before a scope, and is to be the same after it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.x = torch.rand(40, 40)
        self.model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
        self.model(self.x).sum().backward()
        with torch.device("meta"):
            self.large = nn.Linear(40, 1 << 20)

    def state(self) -> list[Any]:
        """Return what a program sees of it."""
        parts = [self.model[0], self.model[1], self.large]
        registered = [t for p in parts for t in (*p._parameters.values(), *p._buffers.values())]
        there = [t for t in registered if not t.is_meta]
        gradients = [t.grad for t in self.model.parameters()]
        seen = [t.tolist() for t in (self.x, *there, *gradients)]
        return [*map(id, registered), *map(id, gradients), *seen]


def promises_made(program: Program) -> None:
    with promising():
        (program.x * 2).add_(torch.randn(40))


def promises_computed(program: Program) -> None:
    with promising(values="compute"):
        assert (program.x * 2).sum().item() > 0


def forecast(program: Program) -> None:
    def step() -> None:
        program.x.mul_(2).add_(1)
        made = program.model(program.x)
        program.large(made)
        made.sum().backward()
        program.x[0].zero_()

    torchTensorRef.forecast(step, device="sim:h200")


def nothing_managed(program: Program) -> None:
    with disabled():
        torch.ones(3)


class Noting(middlewares.Middleware):
    """Looks on."""

    def after(self, op: Any, result: Any) -> None:
        """Note that it was called."""


def looked_on(program: Program) -> None:
    with tensorsManager.middlewares.scoped(Noting(), middlewares.NanGuard()):
        program.x + 1


def looked_on_in_all_threads(program: Program) -> None:
    with tensorsManager.middlewares.scoped(Noting(), all_threads=True):
        program.x + 1


def pinned(program: Program) -> None:
    mine = middlewares.Pin("0"), middlewares.Pin("*.weight"), middlewares.Place("1", "cpu")
    with tensorsManager.middlewares.scoped(*mine), torch.no_grad():
        program.model.eval()(program.x)


def pinned_by_the_list(program: Program) -> None:
    mine = tensorsManager.middlewares
    try:
        mine.extend([middlewares.Pin("0"), middlewares.Place("1", "cpu")])
        with torch.no_grad():
            program.model.eval()(program.x)
        del mine[:]
    finally:
        mine.clear()


PROGRAMS: tuple[Callable[[Program], None], ...] = (
    promises_made,
    promises_computed,
    forecast,
    nothing_managed,
    looked_on,
    looked_on_in_all_threads,
    pinned,
    pinned_by_the_list,
)


@pytest.mark.timeout(3600 if EVERY_LINE else 300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("run", "error"),
    in_turn(PROGRAMS, ERRORS, each=1),
    ids=lambda run: getattr(run, "__name__", run),
)
def test_after_an_error_at_any_line_of_a_scope_all_is_as_before(run, error):
    program = Program()
    places = lines_of(lambda: run(program))
    before, version = program.state(), program.x._version
    for place in sample_of(places, len(run.__name__ + error)):
        with contextlib.suppress(StrategyError):  # it says that it had no memory
            interrupt(lambda: run(program), ERRORS[error], place)
        assert program.state() == before, at(place)
        # What is interrupted counts as written, as outside of all scopes.
        assert program.x._version - version in (0, 1), at(place)
        assert (promises.recorder, making.get()) == (None, None), at(place)
        assert not is_disabled.get(), at(place)
        assert not tensorsManager.middlewares.here(), at(place)
        kept = [t for t in program.model.parameters() if t._ttr_block.is_kept]
        assert not kept, at(place)
        assert_all_is_as_ever(place)
        program.model(program.x.clone())  # trains on promises no more
        before, version = program.state(), program.x._version
