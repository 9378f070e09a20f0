"""Operators that lack their operands and no decision: fetched or opened, run by the ready path.

While memory is short, or a strategy gives all back at once as if it were, most operators are of
one of two kinds. A strategy that follows the program wants to hear of each use of what stays, so
such blocks are not ready. Where all of an operator's blocks are on the accelerator all the same, or
on their way there, nothing has to be decided: they are opened to the ready path for this one
operator. An evictor may close them again at any moment; then the ready path finds them closed.

Or blocks are at home too, and nobody asks where the operator runs. They are brought and held, as
the slow path does, and the ready path runs the operator, a composite one as a whole. Where there is
no room, or a copy fails, the slow path tries all that it can.

Anything else is left to the slow path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..base.interrupts import holds_operands
from ..base.listeners import listeners
from ..devices.base import Device
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..memory.residency import Residency
from ..memory.spreading import choose_among
from ..memory.states import INVALID
from ..operators.plan import OpPlan
from .onlookers.passing import deliver
from .operands import flattened, sizes_of_call, targets
from .read_alone import LEAST_NBYTES, groups_of, is_short
from .ready_path import SLOW, WAYS, all_owned, known_peak

_Tensor = torch.Tensor


def may_be_watched(residency: Residency) -> bool:
    """Whether the strategy only wants to hear of uses of what is there, and decides nothing.

    Where operators run is asked only of those that lack an operand.
    """
    feed = residency.feed
    return residency.books.watches_accesses and not feed.gives_back


def run_watched(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator whose blocks only have to be opened or fetched, or return `SLOW`."""
    result = _run_watched(plan, args, kwargs)
    if listeners.waiting and result is not SLOW:
        deliver(plan, args, kwargs or {})
    return result


def run_ready_or_watched(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator that has a ready way by it, or by this path, or return `SLOW`."""
    result = WAYS[plan.ready_way](plan, args, kwargs)
    return run_watched(plan, args, kwargs) if result is SLOW else result


def _run_watched(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    residency: Any = tensorsManager._residency
    books = residency.books
    if not residency.is_under_pressure or books.main not in books.ready_on or plan.is_true_view:
        return SLOW
    if plan.peak_nbytes is not None and known_peak(plan, args, kwargs or {}) is None:
        return SLOW  # it is taken apart, and the strategy hears of its parts
    promises = tensorsManager.promises
    if promises is not None and promises.takes(plan, args, kwargs or {}):
        return SLOW
    flat = flattened(plan, args)
    first: Any = flat[0] if flat else None
    if not isinstance(first, TensorRef) or (kwargs and not plan.allows(kwargs, first)):
        return SLOW  # so would the ready path, once half of it had been told of
    used: dict[Block, None] = {}
    for arg in flat:
        if isinstance(arg, TensorRef):
            used[arg._ttr_block] = None
        elif isinstance(arg, _Tensor) and arg.dim():
            return SLOW
    written: list[Block] = []
    for target in targets(plan, args) if plan.writes else ():
        if not isinstance(target, TensorRef):
            return SLOW  # a formula fills the single number that it has made
        written.append(target._ttr_block)
    device = _place_among(plan, args, used, residency) if books.spreads else books.main
    closed = closed_among(used, residency, device)
    if not closed:
        return _run_owned(plan, args, kwargs, residency, device, written) if written else SLOW
    for block in closed:
        if block.ready is not None or block.result is not None:
            return SLOW  # it is not only they that keep it from the ready path
    call = plan, args, kwargs, residency, device, used, written
    if (
        may_be_watched(residency)
        and all(block.is_on(device) for block in closed)
        and all(_may_be_written(block, device) for block in written)
    ):
        return _run_opened(*call, closed)
    if may_be_fetched(residency) and _lacks_operands_only(plan, args, closed):
        return _run_fetched(*call)
    return SLOW


def _place_among(
    plan: OpPlan, args: tuple[Any, ...], used: Iterable[Block], residency: Residency
) -> Device:
    """Return which of several accelerators runs an operator: one that has all that it uses."""
    books, blocks = residency.books, list(used)
    for device in books.accelerators:
        if all(block.is_on(device) for block in blocks):
            if device is books.main:
                break
            label = next(
                (x.device for x in flattened(plan, args) if isinstance(x, TensorRef)), None
            )
            return choose_among(residency, plan.name, blocks, label)  # it may live elsewhere
    return books.main


def closed_among(used: Iterable[Block], residency: Residency, device: Device) -> list[Block]:
    """Return what is not ready of what an operator uses: its use ends a lease, and so do others."""
    if not [block for block in used if block.ready is not device]:
        return []  # it is taken apart, or not ready for reasons of its own
    residency.feed.catch_up()
    return [block for block in used if block.ready is not device]


def may_be_fetched(residency: Residency) -> bool:
    """Whether nobody is asked where operators run that lack operands."""
    feed = residency.feed
    return not (feed.places or feed.spreads or residency.books.main.is_host)


def _may_be_written(block: Block, device: Device) -> bool:
    """Whether nobody else has the bytes of a block that is there: what they have would be stale."""
    return all(
        replica.state is INVALID or replica.device is device
        for replica in list(block.replicas.values())
    )


def _lacks_operands_only(plan: OpPlan, args: tuple[Any, ...], closed: Sequence[Block]) -> bool:
    if not plan.may_be_fetched:
        return False
    for block in closed:
        if not (block.exposure is None and block.sharers is None and block.promise is None):
            return False
        if block.nbytes >= LEAST_NBYTES:  # else no part of it is moved alone
            refs = (arg for arg in flattened(plan, args) if isinstance(arg, TensorRef))
            if all(is_short(ref, block) for ref in refs if ref._ttr_block is block):
                return False
    if not tensorsManager.unsupported:
        return True
    dtypes = [arg.dtype for arg in args if isinstance(arg, TensorRef)]
    return not dtypes or (plan.number, dtypes[0]) not in tensorsManager.unsupported


def run_promised(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a composite operator on promises that are written down, or return `SLOW`."""
    promises = tensorsManager.promises
    return SLOW if promises is None else promises.run_composite(plan, args, kwargs or {})


@holds_operands
def _run_owned(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: Any,
    residency: Residency,
    device: Device,
    written: Sequence[Block],
) -> Any:
    """Run an operator on what is ready, and would be written unasked but for a copy elsewhere."""
    residency.holds.begin_operator()
    try:
        if residency.books.main is not device or all(block.owned for block in written):
            return SLOW  # it is not only that
        if not all(residency.own(block, device) for block in written):
            return SLOW
        return WAYS[plan.ready_way](plan, args, kwargs)
    finally:
        residency.holds.end_operator()


@holds_operands
def _run_opened(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: Any,
    residency: Residency,
    device: Device,
    used: dict[Block, None],
    written: Sequence[Block],
    closed: Sequence[Block],
) -> Any:
    residency.holds.begin_operator()
    try:
        books = residency.books
        if device is not books.main and not (books.spreads and device in books.accelerators):
            return SLOW  # it was exchanged before this operator was counted as one that runs
        try:
            if books.spreads and not _has_room_for_result(plan, args, residency, device):
                return SLOW
            if not residency.readiness.open_watched(closed, device, residency.feed.places):
                return SLOW
            if not all_owned(plan, args):
                return SLOW
            # Before its results are there, as on the slow path: they are known by what came before.
            parts = groups_of(plan, args, kwargs or {})
            residency.feed.tell_uses(device, used, written, plan.kind, ahead=1, parts=parts)
            # Some results count as what stays from then on, and are closed.
            is_open = residency.readiness.open_held(list(used), device)
            out = WAYS[plan.ready_way](plan, args, kwargs) if is_open else SLOW
        finally:
            residency.readiness.close_watched(list(used), device)
        if out is SLOW:
            residency.feed.has_not_run(plan.kind)
        else:
            residency.feed.tell_deaths()
            residency.after_operator(device, ())
        return out
    finally:
        residency.holds.end_operator()


@holds_operands
def _run_fetched(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: Any,
    residency: Residency,
    device: Device,
    used: dict[Block, None],
    written: Sequence[Block],
) -> Any:
    books, operands = residency.books, list(used)
    residency.holds.begin_operator()
    try:
        if books.main is not device:
            return SLOW
        residency.feed.tell_uses(device, operands, written, plan.kind, ahead=1)
        sizes = sizes_of_call(plan, args)
        try:
            expected_nbytes = residency.times.result_nbytes.get(sizes, 0)
            held = residency.acquire(device, operands, written, expected_nbytes)
        except SHORTAGES:
            return SLOW
        try:
            # First: an exception may come when part of the operands has been written.
            for block in written:
                residency.copier.written(block, device)
            residency.tell_operator(device, held, written)
            is_open = residency.readiness.open_held(operands, device)
            out = WAYS[plan.ready_way](plan, args, kwargs) if is_open else SLOW
        finally:
            residency.release(held)
            residency.readiness.close_watched(operands, device)
        if out is SLOW:
            residency.feed.has_not_run(plan.kind)
            # Its parts would find what it uses ready, and give that up for their results.
            residency.readiness.close(operands, device)
        else:
            made = [block for block in _blocks_of(out) if block not in used]
            if made:
                residency.times.remember_results(sizes, made[-1].nbytes)
            blocks = [*operands, *dict.fromkeys(made)]
            books.counts.slow_op_count += 1
            books.counts.costs.note_operator(plan.name, sum([block.nbytes for block in blocks]))
            residency.feed.tell_deaths()
            residency.after_operator(device, blocks)
        return out
    finally:
        residency.holds.end_operator()


def _blocks_of(out: Any) -> list[Block]:
    """Return the blocks of what an operator gave back."""
    if isinstance(out, TensorRef):
        return [out._ttr_block]
    return [leaf._ttr_block for leaf in tree_leaves(out) if isinstance(leaf, TensorRef)]


def _has_room_for_result(
    plan: OpPlan, args: tuple[Any, ...], residency: Residency, device: Device
) -> bool:
    """Whether nothing has to go for what an operator made the last time: room is made before it.

    Of several accelerators that wait for one another: 1.13 of the time without it, where four have
    half of the weights, is 1.10 with it.
    """
    ledger = residency.books.ledgers[device]
    result_nbytes = residency.times.result_nbytes.get(sizes_of_call(plan, args), 0)
    return ledger.resident_nbytes + result_nbytes <= ledger.most_nbytes
