"""What torch calls for every operator that meets a TensorRef.

Where every operand is ready on the accelerator the operator runs at once (`fast.py`); everything
else goes through the six phases of `op_call.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from .fast import SLOW, try_fast
from .manager import tensorsManager
from .op_call import OpCall
from .schema import plan_of


def dispatch(ref_type: type, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator in which at least one operand is a TensorRef."""
    try:
        plan = op._ref_plan
    except AttributeError:
        if not isinstance(op, OpOverload):
            return _run_higher_order(ref_type, op, args, kwargs)
        # On the operator itself: the dictionary would hash it, in Python, at every call.
        plan = op._ref_plan = plan_of(op)
    if torch.is_inference_mode_enabled() and plan.op.is_view and _is_normal(args[0]):
        # Also there, a view of a normal tensor is a normal tensor: autograd counts its versions.
        with torch.inference_mode(False):
            return OpCall(ref_type, plan, args, kwargs, tensorsManager).run()
    residency = tensorsManager.residency
    if plan.is_fast and not (kwargs and plan.has_kwarg_tensors):
        result = try_fast(ref_type, plan, args, kwargs, residency)
        if result is not SLOW:
            return result
    return OpCall(ref_type, plan, args, kwargs, tensorsManager).run()


def _is_normal(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _run_higher_order(ref_type: type, op: Any, args: Any, kwargs: Any) -> Any:
    """Run what is no plain operator (control flow, flex attention) on plain tensors at home."""
    from torch.utils._pytree import tree_map

    def plain(value: Any) -> Any:
        return tensorsManager.plain_at_home(value) if type(value) is ref_type else value

    def wrapped(value: Any) -> Any:
        return tensorsManager.adopt(value) if type(value) is torch.Tensor else value

    return tree_map(wrapped, op(*tree_map(plain, args), **tree_map(plain, kwargs)))
