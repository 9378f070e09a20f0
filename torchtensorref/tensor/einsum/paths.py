"""In which order several operands are multiplied."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from .equation import Label, Labels

T = TypeVar("T")


class Step(NamedTuple):
    """Operands that are multiplied at once, and the dimensions of what comes of it.

    They are taken off the list, by their places in it, and the result is added at its end; that of
    one of several operands, which is only summed, stays in its place.
    """

    places: tuple[int, ...]
    output: Labels

    def replaced(self, waiting: list[T], made: T) -> list[T]:
        """Return what is left on the list after the step, with what comes of it."""
        if len(self.places) == 1:
            return [made if at == self.places[0] else one for at, one in enumerate(waiting)]
        left = [one for at, one in enumerate(waiting) if at not in self.places]
        return [*left, made]


@functools.lru_cache(maxsize=1024)
def steps(
    inputs: tuple[Labels, ...], output: Labels, sizes: tuple[tuple[Label, int], ...], reorder: bool
) -> tuple[Step, ...]:
    """Choose the order: by opt_einsum where it is installed, else from left to right.

    Parameters
    ----------
    inputs, output : tuple
        The dimensions.
    sizes : tuple of pairs
        Their sizes.
    reorder : bool
        Whether operands may be multiplied in another order than the given one.

    Returns
    -------
    tuple of Step
        What only one operand has is summed first.
    """
    found: list[Step] = []
    now = list(inputs)
    for place in range(len(inputs) if len(inputs) > 1 else 0):
        kept = _kept([now[place]], now[:place] + now[place + 1 :], output)
        if kept != now[place]:
            now[place] = kept
            found.append(Step((place,), kept))
    for places in pairs(tuple(now), output, sizes, reorder):
        taken = [now[place] for place in places]
        now = [labels for place, labels in enumerate(now) if place not in places]
        kept = _kept(taken, now, output) if now else output
        now.append(kept)
        found.append(Step(places, kept))
    return tuple(found)


def at_once(inputs: Sequence[Labels], output: Labels) -> tuple[Step, ...]:
    """Multiply all at once: nothing is made on the way."""
    return (Step(tuple(range(len(inputs))), output),)


def elements_between(chosen: Sequence[Step], sizes: dict[Label, int]) -> int:
    """Return how many elements the results have that are made on the way."""
    return sum(math.prod(sizes[label] for label in step.output) for step in chosen[:-1])


def _kept(taken: Sequence[Labels], others: Sequence[Labels], output: Labels) -> Labels:
    """Return the dimensions of some operands that somebody else needs."""
    needed = {label for labels in (*others, output) for label in labels}
    return tuple(dict.fromkeys(label for labels in taken for label in labels if label in needed))


def pairs(
    inputs: tuple[Labels, ...], output: Labels, sizes: tuple[tuple[Label, int], ...], reorder: bool
) -> list[tuple[int, ...]]:
    """Choose which operands are multiplied, two at a time, by their places in what is left."""
    count = len(inputs)
    if count > 2 and reorder:
        try:
            import opt_einsum
        except ImportError:
            pass
        else:
            names = {label: opt_einsum.get_symbol(at) for at, (label, _) in enumerate(sizes)}
            sides = [",".join("".join(names[x] for x in labels) for labels in inputs)]
            sides.append("".join(names[x] for x in output))
            size_of = dict(sizes)
            shapes = [tuple(size_of[label] for label in labels) for labels in inputs]
            path, _ = opt_einsum.contract_path("->".join(sides), *shapes, shapes=True)
            return [tuple(sorted(places)) for places in path]
    if count <= 2:
        return [tuple(range(count))]
    # The result of the first two is at the end of the list, and multiplied by what is at its head.
    return [(0, 1), *((left, 0) for left in range(count - 2, 0, -1))]
