"""What an operator is expected to cost: floating point operations and bytes moved.

Prior by roofline (THEORY: `t0 + max(flops / F, bytes / b)`). The counts come from torch's own
`flop_counter` registry; rows for operators that only reach us whole under inference mode are here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .schema import OpPlan

aten = torch.ops.aten

FlopRule = Callable[[Sequence[Any], torch.Tensor], int]


def _contract(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    """Each element of the result is a sum over the last dimension of the first operand."""
    return 2 * out.numel() * (args[0].shape[-1] if args[0].dim() else 1)


def _convolve(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    return 2 * out.numel() * prod(args[1].shape[1:])


def _attend(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    query, key = args[0], args[1]
    return 4 * query.numel() * key.shape[-2]


def _add_contraction(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    return 2 * out.numel() * args[1].shape[-1]


#: Composite operators, whole under inference mode, that torch's registry does not know; and the
#: few that run most often, for which flattening their arguments would cost more than they do.
OWN_FLOPS: dict[Any, FlopRule] = {
    aten.mm: _contract,
    aten.bmm: _contract,
    aten.addmm: _add_contraction,
    aten.baddbmm: _add_contraction,
    aten.linear: _contract,
    aten.matmul: _contract,
    aten.conv1d: _convolve,
    aten.conv2d: _convolve,
    aten.conv3d: _convolve,
    aten.scaled_dot_product_attention: _attend,
    aten._scaled_dot_product_flash_attention_for_cpu: _attend,
}

_UNKNOWN = object()


def flop_rule(plan: OpPlan) -> Callable[[Sequence[Any], dict[str, Any], Any], int]:
    """Return what counts the floating point operations of a call; cached in the plan."""
    if plan.flops is not None:
        rule: Callable[[Sequence[Any], dict[str, Any], Any], int] = plan.flops
        return rule
    packet = plan.op.overloadpacket
    composite = OWN_FLOPS.get(packet)
    if composite is not None:
        plan.flops = lambda args, kwargs, out: 0 if _is_nested(out) else composite(args, out)
    else:
        from torch.utils.flop_counter import flop_registry

        counted = flop_registry.get(packet)
        if counted is None:
            plan.flops = _no_flops
        else:
            plan.flops = functools.partial(_by_torchs_rule, counted)
    return plan.flops  # type: ignore[no-any-return]


def _is_nested(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.is_nested


def _by_torchs_rule(
    count: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> int:
    """Ask torch's own counter, which refuses what has no sizes (nested tensors)."""
    try:
        return int(count(*args, **kwargs, out_val=out))
    except Exception:
        return 0  # only the clock of a simulated device would know


def _no_flops(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bound by memory: its bytes tell its time."""
    return 0


def touched_nbytes(tensor: torch.Tensor) -> int:
    """Bytes an operator moves for one operand; repeated (expanded) elements count once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0  # it has no strides to ask for; such operators run on the host
    if tensor.is_contiguous():
        return tensor.nbytes
    nbytes = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            nbytes *= size
    return nbytes


#: Operators that touch only the rows they are asked for, and the position of their table.
GATHERS = {
    aten.embedding.default: 0,
    aten.index_select.default: 0,
    aten.gather.default: 0,
    aten.index.Tensor: 0,
    aten.take.default: 0,
}

_dtype_names: dict[Any, str] = {None: "float32"}


def operator_cost(
    plan: OpPlan, plain_args: list[Any] | tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int, int, str]:
    """Floating point operations, bytes and dtype of a call that has just run."""
    rule = plan.flops or flop_rule(plan)
    flops = 0 if rule is _no_flops else rule(plain_args, kwargs, out)
    nbytes = 0
    gathered = GATHERS.get(plan.op, -1) if plan.runs_at_home else -1
    dtype = None
    for position, arg in enumerate(plain_args):
        for tensor in arg if type(arg) in (list, tuple) else (arg,):
            if isinstance(tensor, torch.Tensor):
                if dtype is None:
                    dtype = tensor.dtype
                if position != gathered:
                    nbytes += touched_nbytes(tensor)
    for tensor in out if type(out) in (list, tuple) else (out,):
        if isinstance(tensor, torch.Tensor):
            nbytes += touched_nbytes(tensor) * (1 if gathered < 0 else 2)
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return flops, nbytes, name
