"""Sweeps over combinations: all of them by `make sweeps`, in a usual run a sample of each sweep."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest

#: Whether all combinations are run.
WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))

Combination = tuple[Any, ...]

#: Marks what takes long, and of which something else shows most.
only_in_sweeps = pytest.mark.skipif(not WHOLE, reason="takes a while: by `make sweeps`")


def usual(sample: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The sample, and where all is run the others too, which show the same of another case."""
    return [*sample, *(others if WHOLE else ())]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """One in so many of the values, the first among them; all where all is run."""
    return list(values)[:: 1 if WHOLE else count]


def turn_of(name: str, values: Iterable[Any]) -> list[Any]:
    """The one of the values whose turn it is, another for each name; all where all is run."""
    given = list(values)
    return given if WHOLE else [given[sum(map(ord, name)) % len(given)]]


def give_by_turns(metafunc: pytest.Metafunc, fixture: str, values: Iterable[Any]) -> None:
    """Give each test that has a fixture one of the values for it by turns; all where all is run."""
    if fixture in metafunc.fixturenames:
        given = turn_of(metafunc.function.__name__, values)
        metafunc.parametrize(fixture, given, indirect=True)


def in_turn(first: Iterable[Any], second: Iterable[Any], *, each: int = 2) -> list[Combination]:
    """Every value of the first axis with so many of the second, which take turns."""
    firsts, seconds = list(first), list(second)
    if WHOLE:
        return list(itertools.product(firsts, seconds))
    turns = itertools.cycle(seconds)
    found = []
    for number, value in enumerate(firsts):
        if number and number * each % len(seconds) == 0:
            next(turns)  # else a value would meet the same ones as the last but one
        found += [(value, next(turns)) for _ in range(each)]
    return found


def by_pairs(*axes: Iterable[Any]) -> list[Combination]:
    """So many combinations that each two values of different axes meet in one of them."""
    values = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in values)))
    chosen = places if WHOLE else _covering(places)
    return [tuple(axis[at] for axis, at in zip(values, place, strict=True)) for place in chosen]


def _covering(places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Take the place with the most pairs that no other has, until all have been met."""
    pairs_of = {place: set(itertools.combinations(enumerate(place), 2)) for place in places}
    unmet = set().union(*pairs_of.values())
    chosen = []
    while unmet:
        best = max(places, key=lambda place: len(pairs_of[place] & unmet))
        chosen.append(best)
        unmet -= pairs_of[best]
    return sorted(chosen)
