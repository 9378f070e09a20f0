"""The fast path: an operator whose operands are all ready where it would run anyway.

Nothing has to be decided, so nobody is asked: no lock but the one that counts a result, no manager,
no flattening, no event. What is not plain enough for it goes to `OpCall`, which can do everything.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from .blocks.block import Block
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
_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


def try_fast(
    ref_type: type, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], residency: Residency
) -> Any:
    """Run an operator whose operands are all ready on the accelerator; `SLOW` if one is not."""
    device = residency.fast_device
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
        first = args[0]
        if type(first) is not ref_type:
            return SLOW
        if plan.writes:
            if not first._b.owned:
                return SLOW
        elif plan.is_true_view:
            return _view(ref_type, plan.op(*plain_args, **kwargs), first, device)
        out = plan.op(*plain_args, **kwargs)
        residency.tick = tick + 1
        if device.is_simulated:
            _charge(ref_type, plan, args, plain_args, kwargs, out, device)
        if plan.writes:
            return first
        block = residency.born(out, device)
        return _fresh(ref_type, out, block, device, first)
    except SHORTAGES:
        return SLOW
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def _fresh(ref_type: type, out: torch.Tensor, block: Block, device: Device, first: Any) -> Any:
    """Wrap a kernel's result, in fewer steps where it is contiguous and labelled cpu."""
    if out.is_contiguous() and first.device == _CPU and not out.storage_offset():
        ref = _make_wrapper(ref_type, out.size(), dtype=out.dtype)
        ref._b = block
        ref._t = out
        ref._d = device
        return ref
    return make_ref(ref_type, out, block, device, first.device)


def _view(ref_type: type, out: Any, first: Any, device: Device) -> Any:
    block, label = first._b, first.device
    if type(out) is list or type(out) is tuple:
        return type(out)([make_ref(ref_type, part, block, device, label) for part in out])
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
