"""What the results of kernels are: torch's shape functions, as the device in use has its kernels.

And functions of our own where torch's refuses what its kernels take, or knows CUDA's only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ..base.activation import shaped_for
from ..memory.manager import tensorsManager
from ..operators.plan import OpPlan
from ..operators.substitutes import Substitute

__all__ = ["shapes_of"]


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of rows: torch's shape function takes bfloat16 alone, as on CUDA."""
    group_count = [] if offs is None else [offs.size(0)]
    if a.dim() == b.dim() == 2:
        sizes = [*group_count, a.size(0), b.size(1)]
    elif a.dim() == b.dim():
        sizes = [a.size(0), a.size(1), b.size(2)]
    else:
        sizes = [a.size(-2), b.size(-1)]
    return a.new_empty(sizes, dtype=out_dtype or a.dtype)


def _kept(given: torch.Tensor, is_empty: bool, args: Sequence[Any]) -> torch.Tensor:
    """Make what the host's kernels of norms keep for the gradient, of the parameters' dtype.

    That of CUDA's is single precision.
    """
    dtypes = [value.dtype for value in args if isinstance(value, torch.Tensor)]
    return given.new_empty((0,) if is_empty else given.size(), dtype=(dtypes[1:] or dtypes)[0])


def _layer_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    out, *kept = torch.ops.aten.native_layer_norm.default(*args)
    return (out, *(_kept(one, False, args) for one in kept))


def _batch_norm(op: Callable[..., Any], training: int | None, *args: Any) -> Any:
    """Give the shapes of a batch norm, which is told at argument `training` whether it trains."""
    out, mean, deviation, *rest = op(*args)
    is_trained = training is None or args[training]
    kept = (_kept(one, not is_trained, args) for one in (mean, deviation))
    out = torch.empty_like(out, memory_format=suggest_memory_format(args[0]))
    return (out, *kept, *rest)


#: Operators by name, and what is asked in the place of torch's shape function.
_OURS: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_mm}

_aten = torch.ops.aten

#: The same where the host's kernels run.
_HOSTS: dict[str, Callable[..., Any]] = {
    "aten.native_layer_norm.default": _layer_norm,
    **{
        str(op): functools.partial(_batch_norm, op, training)
        for op, training in (
            (_aten.native_batch_norm.default, 5),
            (_aten._native_batch_norm_legit.default, 5),
            (_aten._native_batch_norm_legit.no_stats, 3),
            (_aten._batch_norm_with_update.default, None),
        )
    },
}


def shapes_of(plan: OpPlan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator on tensors without bytes."""
    # What C++ chose for the host has the host's shapes, wherever its bytes will be.
    op = plan.op.op if isinstance(plan.op, Substitute) else plan.op
    kind = tensorsManager.residency.books.main.torch_device.type
    shapes = _OURS.get(plan.name) or (_HOSTS.get(plan.name) if kind == "cpu" else None)
    token = shaped_for.set(kind)
    try:
        return (shapes or op)(*args, **kwargs)
    except AssertionError as error:  # kernels check what shape functions in Python assert
        raise RuntimeError(*error.args) from error
    finally:
        shaped_for.reset(token)
