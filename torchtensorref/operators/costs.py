"""What an operator is expected to cost: floating point operations and bytes moved.

Prior by roofline (THEORY: `t0 + max(flops / F, bytes / b)`). The counts come from the operator's
row, else from torch's own `flop_counter` registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .layouts import SPARSE, parts_of
from .plan import OpPlan


@functools.cache
def flop_rule(plan: OpPlan) -> Callable[[Sequence[Any], dict[str, Any], Any], int]:
    """Return what counts the floating point operations of a call; torch's registry loads late."""
    own = plan.own_flops
    if own is not None:
        return lambda args, kwargs, out: 0 if _is_nested(out) else own(args, out)
    from torch.utils.flop_counter import flop_registry

    counted = flop_registry.get(plan.op.overloadpacket)
    return _no_flops if counted is None else functools.partial(_by_torchs_rule, counted)


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


def _flops_of_sparse(sparse: list[torch.Tensor], out: Any) -> int:
    """Two for each product of elements; of two sparse matrices as many as there are on average."""
    if len(sparse) > 1:
        a, b = sparse[:2]
        return 2 * a._nnz() * b._nnz() // max(b.size(0), 1)
    width = out.size(-1) if isinstance(out, torch.Tensor) and out.dim() > 1 else 1
    return int(2 * sparse[0]._nnz() * width)


def touched_nbytes(tensor: torch.Tensor) -> int:
    """Bytes an operator moves for one operand; repeated (expanded) elements count once."""
    if tensor.layout in SPARSE:
        return sum(part.nbytes for part in parts_of(tensor))
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0  # it has no strides to ask for; such operators run on the host
    if tensor.is_contiguous():
        return tensor.nbytes
    nbytes = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            nbytes *= size
    return nbytes


def _of_groups(table: torch.Tensor, x: torch.Tensor) -> int:
    """Bytes of the groups that may have rows: no more are read than there are rows."""
    nbytes, rows = touched_nbytes(table), x.size(0)
    count = 0 if table.dim() == 2 else table.size(0)  # groups along what is summed over are all
    return nbytes * rows // count if rows < count else nbytes


_dtype_names: dict[Any, str] = {None: "float32"}


def operator_cost(
    plan: OpPlan, plain_args: list[Any] | tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int, int, str]:
    """Floating point operations, bytes and dtype of a call that has just run."""
    rule = flop_rule(plan)
    if rule is _no_flops:
        flops = 0
    else:
        sparse = [a for a in plain_args if isinstance(a, torch.Tensor) and a.layout in SPARSE]
        flops = _flops_of_sparse(sparse, out) if sparse else rule(plain_args, kwargs, out)
    nbytes = 0
    dtype = None
    for position, arg in enumerate(plain_args):
        for tensor in arg if type(arg) in (list, tuple) else (arg,):
            if isinstance(tensor, torch.Tensor):
                if dtype is None:
                    dtype = tensor.dtype
                if plan.reads_groups and position:
                    nbytes += _of_groups(tensor, plain_args[0])
                elif position or not plan.gathers_rows:
                    nbytes += touched_nbytes(tensor)
    for tensor in out if type(out) in (list, tuple) else (out,):
        if isinstance(tensor, torch.Tensor):
            nbytes += touched_nbytes(tensor) * (2 if plan.gathers_rows else 1)
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return flops, nbytes, name
