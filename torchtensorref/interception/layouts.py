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
    out = _of_small_ones(op, args, kwargs, _small_of(args, kwargs))
    if out is None:
        return list(foretold)
    return [
        _like(made, like.size(), strides_of_whole(like, made))
        for like, made in zip(foretold, _tensors_in(out), strict=True)
    ]


def as_operands_lie(op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what results will be like, without bytes, where they are laid out as the operands.

    Those are of one layout, or have one element. None where the host has no kernel, or it lays out
    results otherwise.

    Notes
    -----
    Torch foretells them in Python, and loads its compiler for the first one: a second and more.
    """
    small_of = _small_of(args, kwargs)
    whole = max(_tensors_in((args, kwargs)), key=torch.Tensor.numel)
    out = _of_small_ones(op, args, kwargs, small_of)
    wanted = _small(whole, small_of)
    if out is None or any(
        (x.size(), x.stride()) != (wanted.size(), wanted.stride()) for x in _tensors_in(out)
    ):
        return None
    return tree_map_only(torch.Tensor, lambda made: _like(made, whole.size(), whole.stride()), out)


def strides_on_kernels(
    op: Callable[..., Any], args: Any, kwargs: dict[str, Any], foretold: torch.Tensor
) -> Sequence[int]:
    """Return the strides of a result without gaps, those of dimensions of one element included.

    By these, too, the next kernel may go another way: they tell whether channels come last.
    """
    out = _of_small_ones(op, args, kwargs, _small_of(args, kwargs))
    if not isinstance(out, torch.Tensor) or out.dim() != foretold.dim() or not is_dense(out):
        return foretold.stride()
    steps, small, whole = {1: 1}, 1, 1
    for dim in sorted(range(out.dim()), key=out.stride):
        if out.size(dim) > 1:
            small, whole = small * out.size(dim), whole * foretold.size(dim)
            steps[small] = whole
    strides = [steps.get(step, 0) for step in out.stride()]
    return strides if all(strides) else foretold.stride()


def _small_of(args: Any, kwargs: dict[str, Any]) -> dict[int, int]:
    sizes = {n for x in _tensors_in((args, kwargs)) for n in x.size() if n > 1}
    return {n: at for at, n in enumerate(sorted(sizes), 2)}


def _of_small_ones(
    op: Callable[..., Any], args: Any, kwargs: dict[str, Any], small_of: dict[int, int]
) -> Any:
    """Return what the host's kernel makes of small operands; None where it has none."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        small_args, small_kwargs = tree_map_only(
            torch.Tensor, lambda x: _small(x, small_of), (args, kwargs)
        )
        try:
            return op(*small_args, **small_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _like(made: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return torch._C._VariableFunctions.empty_strided(
            sizes, strides, dtype=made.dtype, device="meta"
        )


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
