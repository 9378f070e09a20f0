"""Shape functions of our own, where torch's refuses what its kernels take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..operators.plan import OpPlan
from ..operators.substitutes import Substitute

__all__ = ["shape_function"]


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


#: Operators by name, and what is asked in the place of torch's shape function.
_OURS: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_mm}


def shape_function(plan: OpPlan) -> Callable[..., Any]:
    """Return what gives the results of an operator on tensors without bytes."""
    # What C++ chose for the host has the host's shapes, wherever its bytes will be.
    op = plan.op.op if isinstance(plan.op, Substitute) else plan.op
    return _OURS.get(plan.name, op)
