"""The same program with plain torch and on promises, and what is so after an error in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import torchTensorRef
from torchTensorRef import disabled, tensorsManager
from torchTensorRef.base.activation import watch

from .differential import differences
from .interrupting import PACKAGE, Place, no_memory, sent

EVERY_LINE = bool(os.environ.get("INTERRUPT_EVERY_LINE"))
#: Of the places that a program passes, how many are tried in a usual run.
SAMPLE = 24
ERRORS = {"sent by a thread": sent, "no memory": no_memory}


def asked_on_both(program: Callable[[], Any]) -> tuple[Any, Any]:
    """Run a program with plain torch and, from the same seed, on promises; return both results."""
    with torchTensorRef.disabled():
        torch.manual_seed(3)
        plain = program()
    torch.manual_seed(3)
    with torchTensorRef.promising():
        ours = program()
    return plain, ours


def sample_of(places: list[Place], first: int) -> list[Place]:
    """Return every place, or so many of them, beginning elsewhere for each case."""
    step = 1 if EVERY_LINE else max(1, len(places) // SAMPLE)
    return places[first % step :: step]


def at(place: Place) -> str:
    """Say where a place is."""
    return f"at {place[0].removeprefix(PACKAGE)}:{place[1]} {place[2]}"


def plain_program() -> list[Any]:
    """What nobody has interrupted, with random numbers and in place."""
    torch.manual_seed(5)
    x = torch.rand(64, 64)
    y = x.clone()
    y.add_(1)
    torch.manual_seed(7)
    return [x, y, torch.nn.functional.dropout(y @ x), torch.randn(3)]


def assert_all_is_as_ever(place: Place) -> None:
    """Nothing is open, held or wrong: the next program is plain torch's."""
    with disabled():
        expected = plain_program()
    ours = plain_program()
    assert differences(expected, ours) == [], at(place)
    assert not [x for x in ours if x._ttr_block.promise is not None], at(place)
    assert not watch.on, at(place)
    assert tensorsManager.violations() == [], at(place)
    holds = tensorsManager.residency.holds
    assert not {**holds.pins_by_thread, **holds.announced, **holds.in_flight}, at(place)
