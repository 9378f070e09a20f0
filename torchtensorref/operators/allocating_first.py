"""Operators in place whose kernels on accelerators allocate after they have begun to write.

A kernel that finds no memory is run again once there is room, which is right only if it has written
nothing yet. These sum up first, then allocate the counts by which they divide. So here the whole
result is made beside the operand, and copied into it at last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def scatter_reduce_(
    target: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """`Tensor.scatter_reduce_`, which finds its memory before it writes."""
    how = (dim, index, src, reduce)
    if reduce != "mean":
        return aten.scatter_reduce_.two(target, *how, include_self=include_self)
    return target.copy_(aten.scatter_reduce.two(target, *how, include_self=include_self))


def index_reduce_(
    target: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """`Tensor.index_reduce_`, likewise."""
    how = (dim, index, src, reduce)
    if reduce != "mean":
        return aten.index_reduce_.default(target, *how, include_self=include_self)
    return target.copy_(aten.index_reduce.default(target, *how, include_self=include_self))
