"""How kernels lay out the results of elementwise operators: asked of small ones.

What torch foretells of tensors without bytes is another implementation, which orders the dimensions
of some results otherwise than kernels do, and by that order the next kernel may go another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..operators.blocked.cut import is_dense
from .pieces import strides_of_whole


def as_kernels_lay_out(
    op: Callable[..., Any], args: Any, kwargs: dict[str, Any], foretold: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what results will be like, laid out as the host's kernel does it.

    Parameters
    ----------
    args, kwargs
        Of the call.
    foretold : sequence of torch.Tensor
        Its results as torch foretells them, without bytes; returned where the host has no kernel.

    Notes
    -----
    The small operands have what a kernel goes by: which strides and sizes are equal, which are less
    than others, which are 0, and whether there are gaps.
    """
    sizes = {n for x in _tensors_in((args, kwargs)) for n in x.size() if n > 1}
    small_of = {n: at for at, n in enumerate(sorted(sizes), 2)}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        small_args, small_kwargs = tree_map_only(
            torch.Tensor, lambda x: _small(x, small_of), (args, kwargs)
        )
        try:
            out = op(*small_args, **small_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return list(foretold)
        return [
            torch._C._VariableFunctions.empty_strided(
                like.size(), strides_of_whole(like, made), dtype=like.dtype, device="meta"
            )
            for like, made in zip(foretold, _tensors_in(out), strict=True)
        ]


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _small(tensor: torch.Tensor, small_of: dict[int, int]) -> torch.Tensor:
    """Return a small tensor like it, full of ones."""
    sizes = [small_of.get(n, n) for n in tensor.size()]
    strides = _small_strides(tensor, sizes)
    reach = 1 + sum((max(n, 1) - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    ones = torch._C._VariableFunctions.ones((reach,), dtype=tensor.dtype)
    return ones.as_strided(sizes, strides)


def _small_strides(tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    strides = [0] * tensor.dim()
    reach, step, last = (1 if is_dense(tensor) else 2), 0, 0
    for dim in sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim)):
        if tensor.stride(dim) > last:
            step, last = reach, tensor.stride(dim)
        strides[dim] = step
        reach = max(reach, step * max(sizes[dim], 2))
    return strides
