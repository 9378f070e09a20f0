"""An error at any line while promises are fulfilled: each has its own numbers, or says it is lost.

A part of the lines in each run of the tests; `INTERRUPT_EVERY_LINE` tries all, as in
`test_interrupts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchTensorRef import LostError, disabled, promising
from torchTensorRef.inject import hooks

from ..support.differential import differences
from ..support.interrupting import interrupt, lines_of
from ..support.promised import ERRORS, EVERY_LINE, assert_all_is_as_ever, at, sample_of
from ..support.sweeps import in_turn

dropout = torch.nn.functional.dropout


@pytest.fixture(autouse=True)
def injected(manage: Any) -> Iterator[None]:
    """Have what torch makes managed."""
    manage("lru", nbytes=200 << 10)
    with hooks.is_disabled.entered(False):
        yield


def writes(x: Any) -> list[Any]:
    """Write what is promised, and what is there."""
    made = x * 2
    made.add_(1)
    beside = made + x
    x.mul_(made)
    made[3:5] += beside[3:5]
    return [made, beside, x]


def draws(x: Any) -> list[Any]:
    """Draw by factories, operators, and in place."""
    first = torch.randn(40, 40)
    made = dropout(x + first)
    made.normal_()
    last = torch.rand(40, 40)
    return [first, made, last, made * last]


def writes_and_draws(x: Any) -> list[Any]:
    """Write what is drawn, and draw into what is written; resize what is given to be filled."""
    made = torch.empty(0)
    torch.add(x, 1, out=made)
    made.uniform_()
    other = dropout(made)
    other.add_(made)
    torch._foreach_mul_([made, other], 2.0)
    return [made, other, torch.randn(40)]


PROGRAMS: tuple[Callable[[Any], list[Any]], ...] = (writes, draws, writes_and_draws)


def asked(program: Callable[[Any], list[Any]], scope: Any) -> list[Any]:
    x = torch.arange(1600.0).view(40, 40).sin()
    torch.manual_seed(3)
    with scope():
        return program(x)


def fulfilled(promised: list[Any]) -> None:
    for one in promised:
        one.fulfil()


@pytest.mark.timeout(3600 if EVERY_LINE else 300)
@pytest.mark.parametrize(
    ("program", "error"),
    in_turn(PROGRAMS, ERRORS, each=1),
    ids=lambda given: getattr(given, "__name__", given),
)
def test_what_is_fulfilled_again_has_its_numbers_or_says_it_is_lost(program, error):
    with disabled():
        expected = asked(program, disabled)
        after = torch.randn(3)
    places = lines_of(lambda: fulfilled(asked(program, promising)))
    lost_count = 0
    for place in sample_of(places, len(program.__name__ + error)):
        promised = asked(program, promising)
        interrupt(lambda promised=promised: fulfilled(promised), ERRORS[error], place)
        lost = [one for one in promised if is_lost(one)]
        lost_count += len(lost)
        for one, wanted in zip(promised, expected, strict=True):
            if not any(one is other for other in lost):
                assert differences(wanted, one) == [], at(place)
        drawn = torch.randn(3)
        assert lost or differences(after, drawn) == [], at(place)
        given = [one.reshape(-1) for one in promised if not is_lost(one)]
        assert not given or not bool((drawn[:, None] == torch.cat(given)).any()), at(place)
        assert_all_is_as_ever(place)
    assert not EVERY_LINE or lost_count


def is_lost(promise: Any) -> bool:
    try:
        promise.fulfil()
    except LostError:
        return True
    return False
