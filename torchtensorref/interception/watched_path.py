"""Operators that lack nothing but that the strategy hears of them: opened, run, told, closed.

While memory is short, a strategy that follows the program wants to hear of each use of what stays,
so such blocks are not ready. Where all of an operator's blocks are on the accelerator all the
same, or on their way there, nothing has to be decided: they are opened to the ready path for this
one operator. Anything else is left to the slow path. An evictor may close them again at any moment;
then the ready path finds them closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..base.interrupts import holds_operands
from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..memory.residency import Residency
from ..operators.plan import OpPlan
from .ready_path import SLOW, WAYS, all_owned, flattened, targets


def may_be_watched(residency: Residency) -> bool:
    """Whether the strategy only wants to hear of uses of what is there, and decides nothing.

    Where operators run is asked only of those that lack an operand.
    """
    feed = residency.feed
    return feed.watches_accesses and not feed.gives_back


def run_watched(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator whose blocks are closed only since they are watched, or return `SLOW`."""
    residency: Any = tensorsManager._residency
    books = residency.books
    if not books.is_pressed or books.ready_device is not books.main or plan.is_true_view:
        return SLOW
    if not may_be_watched(residency):
        return SLOW
    promises = tensorsManager.promises
    if promises is not None and promises.takes(args, kwargs or {}):
        return SLOW
    device = books.main
    used = {arg._ttr_block: None for arg in flattened(plan, args) if type(arg) is TensorRef}
    closed = [block for block in used if block.ready is not device]
    if not closed or any(b.ready is not None or b.births is not None for b in closed):
        return SLOW  # it is not only they that keep it from the ready path
    return _run_opened(plan, args, kwargs, residency, device, used, closed)


def run_promised(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a composite operator on promises that are written down, or return `SLOW`."""
    promises = tensorsManager.promises
    return SLOW if promises is None else promises.run_composite(plan, args, kwargs or {})


@holds_operands
def _run_opened(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: Any,
    residency: Residency,
    device: Device,
    used: Iterable[Block],
    closed: list[Block],
) -> Any:
    residency.holds.begin_operator()
    try:
        if residency.books.main is not device:
            return SLOW  # it was exchanged before this operator was counted as one that runs
        try:
            if not residency.open_watched(closed, device):
                return SLOW
            if not all_owned(plan, args):
                return SLOW
            written = [arg._ttr_block for arg in targets(plan, args)]
            # Before its results are there, as on the slow path: they are known by what came before.
            residency.feed.tell_uses(device, used, written, plan.kind, ahead=1)
            out = WAYS[plan.ready_way](plan, args, kwargs)
        finally:
            residency.close_watched(closed, device)
        if out is not SLOW:
            residency.feed.tell_deaths()
            residency.after_operator(device, ())
        return out
    finally:
        residency.holds.end_operator()
