"""Single numbers on the host that an operator on the accelerator reads: given to it by value.

A position, a count, a flag: made by the host, 4 or 8 bytes, and used by an operator or two. To
fetch it takes a replica, room, a copy and its event, 350 us on a real device for one number. There
a fresh tensor is filled with it instead, in the order of compute, and dies after the operator, as
the arguments of kernels do. A number that goes on being used is fetched in the end. Simulated
devices count every byte that crosses the link, so there it is always fetched.

This is no part of the slow path's fetch, but a second try at the ready path: with its numbers
exchanged the operator lacks nothing, so no strategy is asked or told, nothing is held, and it
costs what any ready operator costs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..devices.base import Device
from ..memory.budget import SHORTAGES
from ..memory.manager import tensorsManager
from ..memory.plain_views import make_ref, plain_on
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan
from .operands import flattened, folded
from .ready_path import SLOW, WAYS

#: So many operators are given a number by value; for the next one it is fetched.
BY_VALUE_AT_MOST = 16

#: What every device can fill a tensor with, exactly.
_FILLABLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

# Not `torch.full`: injection replaces that name.
_full = torch._C._VariableFunctions.full
_empty = torch._C._VariableFunctions.empty


def run_with_numbers(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run on the accelerator an operator that lacks nothing there but numbers, or return `SLOW`."""
    residency: Any = tensorsManager._residency
    device, host = residency.books.main, residency.books.host
    if plan.writes or plan.is_true_view or device.is_witness or device.is_host:
        return SLOW
    if device not in residency.books.ready_on:
        return SLOW  # a module is being recorded, by the slow path
    flat = list(flattened(plan, args))
    is_there = False
    numbers = []
    for position, arg in enumerate(flat):
        if isinstance(arg, TensorRef):
            ready = arg._ttr_block.ready
            if ready is device:
                is_there = True
            elif ready is host and _is_number(arg):
                numbers.append(position)
            else:
                return SLOW
    if not is_there or not numbers:
        return SLOW
    for position in numbers:
        copy = _by_value(flat[position], residency, device)
        if copy is None:
            return SLOW
        flat[position] = copy
    return WAYS[plan.ready_way](plan, tuple(folded(plan, args, flat)), kwargs)


def _is_number(ref: Any) -> bool:
    return (
        ref.numel() <= 1
        and ref.dtype in _FILLABLE
        and ref._ttr_block.given_by_value_count < BY_VALUE_AT_MOST
        and not ref.is_neg()
    )


def _by_value(ref: Any, residency: Any, device: Device) -> Any:
    """Make a TensorRef with the number of another, counted as results are; None without room."""
    host = residency.books.host
    home = ref._ttr_plain if ref._ttr_device is host else plain_on(ref, host)
    size, options = ref.size(), {"dtype": ref.dtype, "device": device.torch_device}
    try:
        plain = _full(size, home.item(), **options) if home.numel() else _empty(size, **options)
    except SHORTAGES:
        return None
    block = residency.books.ledgers[device].bear_if_room(plain, plain.nbytes, residency.books.tick)
    if block is None:
        return None  # the slow path makes room
    residency.given_by_value(ref._ttr_block)
    return make_ref(plain, block, device, ref.device)
