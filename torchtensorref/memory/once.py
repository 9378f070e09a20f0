"""What is said once, and what to do about it: each time as a Python warning.

In a process, when an operator has ended: that a budget is too small, for an operator or for what is
used again and again; that a model stays plain. Where the program listens to our logger, it gets a
record, too. At each line of the program: that `toGPU()` has moved what cannot stay.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path

import torch

from ..base.listeners import listeners
from ..base.units import format_nbytes
from ..devices.base import Device
from .block import Block
from .bookkeeping import Books
from .exposure import Exposure

_log = logging.getLogger("torchTensorRef")

_OURS = str(Path(__file__).parents[1])
#: Of files that stand between a program's line and ours: scopes, and methods of Python's own lists.
_BETWEEN = (_OURS, contextlib.__file__, "<frozen ")
#: What has been said.
said: set[str] = set()

#: Thrash is told when it has copied so many budgets, and is so much of all that was fetched.
THRASH_BUDGETS = 4
THRASH_SHARE = 1 / 4


def note_lack_of_room(operator: str, books: Books) -> None:
    """An operator runs on the host for want of room."""
    if "room" not in said:
        limit = format_nbytes(books.ledgers[books.main].limit_nbytes)
        _say_later(
            "room",
            f"{operator} does not fit the budget of {limit} on {books.main.name} and runs on the "
            "host: same results, slower. tensorsManager.report() says how much it needs.",
        )


def note_thrash(books: Books) -> None:
    """Blocks were fetched again soon after they had been given up (no lock needed)."""
    costs = books.counts.costs
    if "thrash" in said or not costs.thrash_nbytes:
        return
    limit_nbytes = books.ledgers[books.main].limit_nbytes
    is_much = costs.thrash_nbytes > THRASH_BUDGETS * limit_nbytes
    if is_much and costs.thrash_nbytes > THRASH_SHARE * costs.fetched_nbytes:
        way_out = "" if books.looks_ahead else "strategy = 'flow', or "
        _say_later(
            "thrash",
            f"{format_nbytes(costs.thrash_nbytes)} were fetched again soon after eviction "
            f"(budget {format_nbytes(limit_nbytes)}). Set {way_out}a larger budget; "
            "see tensorsManager.report().",
        )


def note_plain(element_count: int) -> None:
    """A plain parameter has met TensorRefs in several operators."""
    _say_later(
        "plain",
        f"a parameter of {element_count:,} elements is plain, so every operator fetches it anew. "
        "Call tensorsManager.adopt(model). Plain are models that were built before the import of "
        "torchTensorRef, and single parameters from pickle.loads; what fully_shard gathers stays "
        "plain.",
    )


def note_held(block: Block, exposure: Exposure, device: Device) -> None:
    """A program has moved a block to an accelerator, where plain tensors keep it from staying.

    Once for a line of the program: it may move all the parameters of a model.
    """
    depth = frames_of_ours()
    line = sys._getframe(depth - 1)
    key = f"held {line.f_code.co_filename}:{line.f_lineno}"
    if key not in said:
        said.add(key)
        length = "for good" if exposure.forever else "while that lives"
        warnings.warn(
            f"toGPU() has not made {block.name} stay on {device.name}: {exposure.why} holds it on "
            f"{exposure.device.name} {length}, and every operator fetches it anew. Delete what "
            "holds it first, or take a clone() there. Others that this line moves go unmentioned.",
            RuntimeWarning,
            stacklevel=depth,
        )


def _say_later(key: str, text: str) -> None:
    """Say something when no operator is halfway: a program may turn warnings into errors."""
    said.add(key)

    def say() -> None:
        if _log.hasHandlers():
            _log.warning("torchTensorRef: %s", text)
        warnings.warn(
            f"torchTensorRef: {text}",
            RuntimeWarning,
            stacklevel=frames_of_ours(),
        )

    listeners.later(say)


def frames_of_ours() -> int:
    """How many frames up the program's own line is."""
    frame, count = sys._getframe(1), 1
    folders = (*_BETWEEN, str(Path(torch.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, count = frame.f_back, count + 1
    return count
