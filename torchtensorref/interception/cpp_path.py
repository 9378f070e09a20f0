"""What operators in C++ (`csrc/`) ask Python: an operator's plan, a block, and the other path.

The library calls `dispatch` for what is not ready, as torch calls it on the path in Python.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..base.activation import watch
from ..memory import core
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.manager import tensorsManager
from ..memory.plain_views import make_ref
from ..memory.ref import TensorRef
from ..operators import peaks
from ..operators.plan import OpPlan, ReadyWay, plan_of
from ..operators.python_kernels import is_replaced_above
from ..operators.row import Special
from ..operators.substitutes import ByDevice, Substitute, stand_ins
from ..operators.table import ROWS
from .entry import dispatch
from .fallback import settled
from .guards import below_function_modes
from .onlookers.passing import pass_onlookers
from .ready_path import SLOW
from .tracebacks import hides, shorten
from .watched_path import run_promised, run_ready_or_watched

__tracebackhide__ = hides


class Peak(enum.IntEnum):
    """Which rule says what a composite operator takes: `Peak` in plan.h."""

    NOT_WHOLE = 0
    LINEAR = 1
    MATMUL = 2
    ATTENTION = 3
    NORM = 4


RULES: dict[Any, Peak] = {
    None: Peak.NOT_WHOLE,
    peaks.linear: Peak.LINEAR,
    peaks.matmul: Peak.MATMUL,
    peaks.attention: Peak.ATTENTION,
    peaks.norm: Peak.NORM,
}


def set_up() -> None:
    """Give the library the class of TensorRefs and the functions that it calls."""
    give_functions()
    core.library.watch(watch.on)
    watch.listeners.append(core.library.watch)
    core.library.note_stand_ins(stand_ins.made)
    stand_ins.listeners.append(core.library.note_stand_ins)


def give_functions() -> None:
    """Give the library the functions that it calls, as they are named here now."""
    core.library.set_up(dispatch, run_whole, describe, bear, adopt, written)


def run_whole(op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operator as one where it has to be seen; NotImplemented: in its parts."""
    try:
        with below_function_modes():
            plan = plan_of(op).of_call(args, kwargs)
            if not watch.on:
                result = _run_ready(plan, args, kwargs)
            elif watch.takes_apart:
                result = SLOW
            else:
                result = pass_onlookers(plan, args, kwargs, _run_ready)
    except BaseException as error:
        tensorsManager.doubt()  # it may have come at any line
        shorten(error)
        raise
    return NotImplemented if result is SLOW else result


def _run_ready(plan: OpPlan, args: Any, kwargs: Any, placed: Any = None) -> Any:
    if watch.is_slow:  # perhaps it is only to be promised
        return run_promised(plan, args, kwargs)
    return run_ready_or_watched(plan, args, kwargs)


class Engine(torch._C._ImperativeEngine):
    """Torch's engine of backward passes: what its formulas make for TensorRefs is TensorRefs."""

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, as torch's own does."""
        run = super().run_backward
        if any(isinstance(output, TensorRef) for output in outputs):
            return core.library.call_with_factories(run, outputs, *args, **kwargs)
        return run(outputs, *args, **kwargs)


def describe(name: str, overload: str) -> dict[str, Any]:
    """Return what the plan of an operator says, as far as C++ has to know; asked once."""
    space, _, base = name.partition("::")
    op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    plan = plan_of(op)
    # Where all of these are given and not false it writes, or is for Python.
    conditions, names = plan.writing_arguments, plan.argument_names
    writes = plan.writes if conditions and plan.ready_way != ReadyWay.NONE else ()
    if plan.is_random and plan.random_argument is not None:
        conditions = (plan.random_argument,)
    plan = plan.reading or plan
    by_device = plan.op if isinstance(plan.op, ByDevice) else None
    return {
        "op": op,
        "may_be_ready": _may_be_ready(plan),
        "is_seen_above": is_replaced_above(op, as_one=plan.peak_nbytes is not None),
        "is_view": plan.ready_way == ReadyWay.VIEW and not plan.is_recorded_inside,
        "counts_lists": plan.counts_lists,
        "makes_dense": plan.makes_dense,
        "shares": plan.special is Special.SHARE,
        "minds_labels": plan.minds_labels,
        "comes_in_parts": plan.comes_in_parts,
        "is_recorded_inside": plan.is_recorded_inside,
        "is_for_host": by_device is not None,
        "minds_stand_ins": by_device is not None and by_device.minds_stand_ins,
        "conditions": tuple(map(names.index, conditions)),
        "writes_then": bool(writes),
        "peak": int(RULES[plan.peak_nbytes]),
        "writes": writes or plan.writes,
        "twins": tuple(-1 if twin is None else twin for twin in plan.result_of_write),
    }


def forget(name: str, overload: str) -> None:
    """Have C++ ask again what is known of an operator, and of those that may be made of it."""
    if core.library is None:
        return
    core.library.forget(name, overload)
    if name.startswith("aten::"):
        for schema in (row.op._schema for row in ROWS if row.peak_nbytes is not None):
            core.library.forget(schema.name, schema.overload_name)


def _may_be_ready(plan: OpPlan) -> bool:
    """Whether C++ may run an operator: not where Python exchanges it, or waits for its number."""
    if plan.ready_way == ReadyWay.NONE or plan.is_number:
        return False
    if isinstance(plan.op, ByDevice):
        return plan.op.is_itself_at_home
    return not isinstance(plan.op, Substitute)


def _doubting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an error that comes at any line of a function repaired: C++ only hands it on."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            with below_function_modes():
                return function(*args)
        except BaseException:
            tensorsManager.doubt()
            raise

    return call


@_doubting
def adopt(plain: torch.Tensor) -> Any:
    """Return the TensorRef of what a factory has made while an operator was taken apart."""
    return tensorsManager.ownership.adopt_tensor(plain, sole=True)


@_doubting
def written(block: Block, device: Any) -> None:
    """Note that a block has been written while another thread had begun to copy it."""
    tensorsManager.residency.copier.has_been_written(block, device)


@_doubting
def bear(plain: torch.Tensor, device: Any, op: Any, label: torch.device) -> Any:
    """Make the block of a fresh result for which room has to be made.

    Parameters
    ----------
    op : OpOverload or None
        The operator, if it has written, too, and cannot run again.

    Returns
    -------
    Block, Tensor or None
        None where there is no room; a TensorRef where it has gone home for want of it.
    """
    residency = tensorsManager.residency
    try:
        if op is None:
            return residency.born(plain, device)
        plain, block, where = settled(plain, plan_of(op), residency, device, has_written=True)
    except SHORTAGES:
        return None
    return block if where is device else make_ref(plain, block, where, label)
