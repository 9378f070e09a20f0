"""Composite operators on promises: written down as one, and in the parts that run where it cannot.

Torch takes a composite operator apart before it arrives below autograd. On real tensors it runs as
one where every operand is ready (`ready_path._whole`), which takes other bytes and another time.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interception.operands import analyse
from ..interception.ready_path import SLOW
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEYS
from ..memory.ref import TensorRef
from ..operators.costs import operator_cost
from ..operators.plan import OpPlan
from .recorder import Recorder

__all__ = ["run_composite"]


def run_composite(
    recorder: Recorder, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a composite operator in its parts, and write down that it may run as one.

    Returns
    -------
    TensorRef or object
        Its result; `SLOW` where it never runs as one.
    """
    peak_nbytes = _peak_nbytes(plan, args, kwargs)
    if peak_nbytes is None:
        return SLOW
    operands = analyse(plan, args, kwargs, tensorsManager)
    place = recorder.begin_whole(plan, operands, peak_nbytes)
    born, cost = None, (0, 0, "")
    try:
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            out = plan.op(*args, **kwargs)
        if isinstance(out, TensorRef) and out._ttr_block not in operands.blocks:
            born, cost = out._ttr_block, operator_cost(plan, args, kwargs, out)
    finally:
        recorder.end_whole(place, born, cost)
    return out


def _peak_nbytes(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return what it takes in passing as one; None where it always comes in its parts."""
    values = (*args, *kwargs.values())
    refs = [value for value in values if isinstance(value, TensorRef)]
    if any(
        isinstance(value, torch.Tensor) and not isinstance(value, TensorRef) for value in values
    ):
        return None
    if not refs or refs[0] is not args[0] or any(ref.is_complex() for ref in refs):
        return None
    if plan.draws_random(args, kwargs) or not plan.allows(kwargs, args[0]):
        return None
    assert plan.peak_nbytes is not None
    return plan.peak_nbytes(*args, **kwargs)
