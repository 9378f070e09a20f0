"""What torch calls for every operator that meets a TensorRef.

Where every operand is ready on the accelerator nothing has to be decided, so nobody is asked: no
lock but the one that counts a result, no manager, no flattening, no event (`fast_path.py`). What is
not plain enough for that goes through the six phases of `op_call.py`, which can do everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..base.activation import watch
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from .by_value import run_with_carried
from .higher_order import run_higher_order
from .ready_path import SLOW, attach_plan
from .slow_path import OpCall

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def dispatch(op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run one operator in which at least one operand is a TensorRef."""
    try:
        plan = op._ttr_plan
    except AttributeError:
        if not isinstance(op, OpOverload):
            return run_higher_order(op, args, kwargs or {})
        plan = attach_plan(op)
    if _dispatch_modes():
        # They have seen the call and left it to us. Plain tensors over bytes that move, and what
        # the runtime does to storages, are not for them.
        tracer = _get_mode(_PROXY)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if tracer is None:
                return dispatch(op, types, args, kwargs)
            args, kwargs = _with_constants(tracer.tracer, (args, kwargs or {}))
        return op(*args, **kwargs)
    way = plan.way
    if way is not None and not watch.on:
        result = way(plan, args, kwargs)
        if result is SLOW and not _function_modes():
            result = run_with_carried(plan, args, kwargs)
        if result is not SLOW:
            return result
    if plan.op.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        # Also there, a view of a normal tensor is a normal tensor: autograd counts its versions.
        with torch.inference_mode(False):
            return OpCall(plan, args, kwargs or {}, tensorsManager).run()
    if _function_modes():
        # They have seen the call; what the runtime does for it, to storages, is not for them.
        with torch._C.DisableTorchFunction():
            return OpCall(plan, args, kwargs or {}, tensorsManager).run()
    return OpCall(plan, args, kwargs or {}, tensorsManager).run()


def _with_constants(tracer: Any, arguments: Any) -> Any:
    """Put plain tensors, which a tracer keeps as constants, in the place of what it has not made.

    It takes no subclass for a constant, and would leave the call out of what it writes down.
    """
    from torch.fx.experimental.proxy_tensor import has_proxy_slot

    def constant(value: Any) -> Any:
        if type(value) is not TensorRef or has_proxy_slot(value, tracer):
            return value
        return tensorsManager.ownership.exposed_plain(value, "a constant of a traced graph")

    return tree_map(constant, arguments)
