"""Where the best terms are: in which steps that is found, and how it is told label by label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .equation import Label, Labels
from .kernels import Job
from .paths import Step


def steps_to_best(inputs: Sequence[Labels], output: Labels) -> tuple[Step, ...]:
    """Choose what is best of one operand alone before operands are multiplied, all at once.

    Of equals the first is to be found, in the order of all summed dimensions. What is chosen before
    keeps that order where its dimensions are the last ones.
    """
    now, found = list(inputs), []
    reduced = list(dict.fromkeys(x for labels in now for x in labels if x not in output))
    place = _last_owner(now, reduced)
    while place is not None and len(now) > 1:
        owned = _owned(now, place, reduced)
        now[place] = tuple(label for label in now[place] if label not in owned)
        found.append(Step((place,), now[place]))
        del reduced[len(reduced) - len(owned) :]
        place = _last_owner(now, reduced)
    return (*found, Step(tuple(range(len(now))), output))


def _last_owner(inputs: Sequence[Labels], reduced: Sequence[Label]) -> int | None:
    """Return the operand that alone has the last of the summed dimensions."""
    owners = [at for at, labels in enumerate(inputs) if reduced and reduced[-1] in labels]
    return owners[0] if len(owners) == 1 else None


def _owned(inputs: Sequence[Labels], place: int, reduced: Sequence[Label]) -> list[Label]:
    """Return the last of the summed dimensions, as far as one operand alone has them."""
    found: list[Label] = []
    for label in reversed(reduced):
        if [at for at, labels in enumerate(inputs) if label in labels] != [place]:
            break
        found.append(label)
    return found


def told(found: Sequence[tuple[Job, Tensor]]) -> Tensor:
    """Return where the best terms are: one index for each summed dimension, in a last dimension.

    Parameters
    ----------
    found : sequence of pairs
        The steps, the last one last, each with the places in all its summed dimensions, counted as
        of one.
    """
    *before, (job, pointers) = found
    if not before and len(job.reduced) == 1:
        return pointers.unsqueeze(-1)
    labels = [*job.reduced, *(label for one, _ in reversed(before) for label in one.reduced)]
    whole = pointers.new_empty([*pointers.shape, len(labels)])
    column = {label: whole.select(-1, at) for at, label in enumerate(labels)}
    _write(pointers, job, column)
    for one, where in reversed(before):
        index = tuple(
            _ramp(job, label, where) if label in job.output else column[label]
            for label in one.output
        )
        _write(where[index] if index else where, one, column)
    return whole


def _write(pointers: Tensor, job: Job, column: dict[Label, Tensor]) -> None:
    inner = 1
    for label in reversed(job.reduced):
        column[label].copy_((pointers // inner) % max(job.sizes[label], 1))
        inner *= max(job.sizes[label], 1)


def _ramp(job: Job, label: Label, like: Tensor) -> Tensor:
    at = job.output.index(label)
    ramp = torch.arange(job.sizes[label], device=like.device)
    return ramp.view([-1] + [1] * (len(job.output) - at - 1))
