"""The fast path: an operator whose operands are all ready where it would run anyway.

Nothing has to be decided, so nobody is asked: no lock but the one that counts a result, no manager,
no flattening, no event. What is not plain enough for it goes to `OpCall`, which can do everything.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from .budget import SHORTAGES
from .costs import operator_cost
from .devices.base import Device
from .residency import Residency
from .schema import OpPlan
from .views import make_ref

#: Returned where the operator has to take the long way. Nothing has happened then.
SLOW = object()

_Tensor = torch.Tensor
_CPU = torch.device("cpu")
_function_modes = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


def try_fast(
    ref_type: type, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], residency: Residency
) -> Any:
    """Run an operator whose operands are all ready on the accelerator; `SLOW` if one is not."""
    first = args[0]
    device = residency.fast_device
    if type(first) is not ref_type or first._b.ready is not device or first._d is not device:
        return SLOW
    if plan.is_true_view:
        return _view(ref_type, plan, args, kwargs, device)
    ident = get_ident()
    hazards = residency.hazards
    outer = hazards.get(ident)
    # Announce first, look second: an evictor closes first and looks second (Movement._seize), so
    # that one of the two sees the other.
    hazards[ident] = args if outer is None else outer + args
    try:
        plain_args = []
        tick = residency.tick
        for arg in args:
            if type(arg) is ref_type:
                block = arg._b
                if block.ready is not device or arg._d is not device:
                    return SLOW
                block.last_use = tick
                plain_args.append(arg._t)
            elif isinstance(arg, _Tensor) and not (type(arg) is _Tensor and not arg.dim()):
                return SLOW
            else:
                plain_args.append(arg)
        if plan.writes and not first._b.owned:
            return SLOW
        residency.tick = tick + 1
        out = (plan.op if _function_modes() else plan.binding)(*plain_args, **kwargs)
        if device.is_simulated:
            _charge(ref_type, plan, args, plain_args, kwargs, out, device)
        if plan.writes:
            return first
        block = residency.born(out, device)
        label = first.device
        if label == _CPU and out.is_contiguous() and not out.storage_offset():
            # Fewer arguments, half the time.
            ref = _make_wrapper(ref_type, out.size(), dtype=out.dtype)
            ref._b = block
            ref._t = out
            ref._d = device
            return ref
        return make_ref(ref_type, out, block, device, label)
    except SHORTAGES:
        return SLOW
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def _view(
    ref_type: type, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
) -> Any:
    """Address arithmetic on a ready operand. No announcement: no kernel reads its bytes.

    An evictor may empty the storage meanwhile; then torch refuses the view, or the view is of a
    storage that is filled again before anybody reads it.
    """
    first = args[0]
    try:
        out = (plan.op if _function_modes() else plan.binding)(first._t, *args[1:], **kwargs)
    except RuntimeError:
        return SLOW  # the program's own mistake is raised again on the long way
    block, label = first._b, first.device
    if type(out) is list or type(out) is tuple:
        return type(out)([make_ref(ref_type, part, block, device, label) for part in out])
    if label == _CPU and out.is_contiguous() and not out.storage_offset():
        ref = _make_wrapper(ref_type, out.size(), dtype=out.dtype)
        ref._b = block
        ref._t = out
        ref._d = device
        return ref
    return make_ref(ref_type, out, block, device, label)


def _charge(
    ref_type: type,
    plan: OpPlan,
    args: tuple[Any, ...],
    plain_args: list[Any],
    kwargs: dict[str, Any],
    out: Any,
    device: Device,
) -> None:
    """Let a simulated device spend the time that the operator takes."""
    flops, nbytes, dtype_name = operator_cost(plan, plain_args, kwargs, out)
    bases = [arg._b.base_on(device) for arg in args if type(arg) is ref_type]
    writes = bases[:1] if plan.writes else ()
    device.after_operator(bases, writes, flops=flops, nbytes=nbytes, dtype_name=dtype_name)
