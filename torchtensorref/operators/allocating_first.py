"""Operators in place whose kernels on accelerators allocate after they have begun to write.

A kernel that finds no memory is run again once there is room, which is right only if it has written
nothing yet. These sum up first, then allocate the counts by which they divide. So here the whole
result is made beside the operand, and copied into it at last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _aside(in_place: OpOverload, out_of_place: OpOverload) -> Callable[..., Any]:
    """Make what stands for an operator in place, which finds its memory before it writes."""

    def run(
        target: Tensor,
        dim: int,
        index: Tensor,
        src: Tensor,
        reduce: str,
        *,
        include_self: bool = True,
    ) -> Any:
        if reduce != "mean":
            return in_place(target, dim, index, src, reduce, include_self=include_self)
        made = out_of_place(target, dim, index, src, reduce, include_self=include_self)
        return target.copy_(made)

    return run


scatter_reduce_ = _aside(aten.scatter_reduce_.two, aten.scatter_reduce.two)
index_reduce_ = _aside(aten.index_reduce_.default, aten.index_reduce.default)
