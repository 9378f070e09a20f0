"""Cuts of what goes along some dimensions: the others are axes.

Reductions, softmax, norms, scans, sorting. What lies before the first dimension that an operator
goes along is only more of the same to its kernel. What lies behind is computed side by side, in
vectors: cut there, other elements are left over at the end, and the bits may differ; so it is cut
only where the operator adds nothing (the largest, the order).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .cut import Along, Axis, Call, Cut, Rule, is_dense


def positive(dims: Any, rank: int) -> list[int] | None:
    """Dimensions as non-negative numbers; all of them where none is named."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return None
    dims = [dims] if isinstance(dims, int) else list(dims)
    if any(not -rank <= dim < rank for dim in dims):
        return None
    return [dim % rank for dim in dims]


def _axes(tensor: torch.Tensor, along: Iterable[int], *, is_choice: bool) -> dict[int, Axis]:
    """Return the axes by the dimension that each is; `along` is not cut, nor what is behind it."""
    along = set(along)
    if is_choice:
        return {d: Axis(size) for d, size in enumerate(tensor.size()) if d not in along}
    if not is_dense(tensor):
        return {}
    strides = tensor.stride()
    inner = max((strides[d] for d in along if tensor.size(d) > 1), default=0)
    return {
        d: Axis(size, 2)
        for d, size in enumerate(tensor.size())
        if d not in along and size > 1 and strides[d] > inner
    }


def _numbered(axes: dict[int, Axis]) -> tuple[tuple[Axis, ...], dict[int, int]]:
    return tuple(axes.values()), {d: number for number, d in enumerate(axes)}


def reduction(result_count: int = 1, *, is_choice: bool = False) -> Rule:
    """Make the rule of an operator that reduces `self` over `dim`.

    Parameters
    ----------
    is_choice : bool, optional
        It chooses among the elements, or counts them, and adds none.
    """

    def rule(call: Call) -> Cut | None:
        x = call["self"]
        dims = positive(call["dim"], x.dim())
        if dims is None:
            return None
        axes, number = _numbered(_axes(x, dims, is_choice=is_choice))
        if not axes:
            return None
        kept: list[int | None] = []
        for d in range(x.dim()):
            if d not in dims:
                kept.append(number.get(d))
            elif call["keepdim"]:
                kept.append(None)
        return Cut(
            axes=axes,
            operands={("self", None): tuple(number.get(d) for d in range(x.dim()))},
            results=(tuple(kept),) * result_count,
        )

    return rule


def along_one(
    *names: str,
    result_count: int = 1,
    is_choice: bool = False,
    is_flat: bool = False,
) -> Rule:
    """Make the rule of an operator that goes along `dim` of operands of one size.

    One that adds makes what is not contiguous so first: what lies behind is not what lay there.

    Parameters
    ----------
    is_flat : bool, optional
        Threads divide all that it does at once, before `dim` and behind it, so that others are left
        over in a tile. Of softmaxes along another dimension than the last, cut before it, 42 of 130
        had other bits with two threads and 77 of 141 with four; with one thread, along the last
        dimension, of its backward or of `log_softmax`, none of more than 100 each.
    """

    def rule(call: Call) -> Cut | None:
        tensors = [call[name] for name in names]
        first = tensors[0]
        dims = positive(call["dim"], first.dim())
        if dims is None or any(
            tensor.size() != first.size() or tensor.stride() != first.stride() for tensor in tensors
        ):
            return None
        if not (is_choice or first.is_contiguous()):
            return None
        axes, number = _numbered(_axes(first, dims, is_choice=is_choice))
        if not axes:
            return None
        if is_flat and call.thread_count > 1 and any(first.stride(d) > 1 for d in dims):
            axes = tuple(axis._replace(keeps_bits=False) for axis in axes)
        along = tuple(number.get(d) for d in range(first.dim()))
        return Cut(
            axes=axes,
            operands={(name, None): along for name in names},
            results=(along,) * result_count,
        )

    return rule


def layer_norm(call: Call) -> Cut | None:
    """Every dimension before those that are normalised; mean and deviation keep the rank."""
    return _norm(call, 3)


def rms_norm(call: Call) -> Cut | None:
    """The same, with one number per row."""
    return _norm(call, 2)


def _norm(call: Call, result_count: int) -> Cut | None:
    x = call["input"]
    lead = x.dim() - len(call["normalized_shape"])
    if lead < 1 or not x.is_contiguous():
        return None
    along: Along = (*range(lead), *(None,) * (x.dim() - lead))
    return Cut(
        axes=tuple(Axis(size) for size in x.size()[:lead]),
        operands={("input", None): along},
        results=(along,) * result_count,
    )


def layer_norm_backward(call: Call) -> Cut | None:
    """By rows, where the sums over all rows are not asked for."""
    x = call["input"]
    lead = x.dim() - len(call["normalized_shape"])
    wants = call["output_mask"]
    if (
        lead < 1
        or wants[1]
        or wants[2]
        or not (x.is_contiguous() and call["grad_out"].is_contiguous())
    ):
        return None
    along: Along = (*range(lead), *(None,) * (x.dim() - lead))
    return Cut(
        axes=tuple(Axis(size) for size in x.size()[:lead]),
        operands={(name, None): along for name in ("grad_out", "input", "mean", "rstd")},
        results=(along,),
    )


def group_norm(call: Call) -> Cut | None:
    """Sample by sample."""
    x = call["input"]
    along: Along = (0, *(None,) * (x.dim() - 1))
    return Cut(
        axes=(Axis(x.size(0)),),
        operands={("input", None): along},
        results=(along, (0, None), (0, None)),
        localise=lambda tile: {"N": tile[0][1] - tile[0][0]},
    )


def cat(call: Call) -> Cut | None:
    """Every dimension but the one along which they are put together."""
    return _together(call, 0)


def stack(call: Call) -> Cut | None:
    """Every dimension that they have."""
    return _together(call, 1)


def _together(call: Call, more: int) -> Cut | None:
    tensors = call["tensors"]
    first = tensors[0]
    rank = first.dim() + more
    dims = positive(call["dim"], rank)
    if dims is None or any(t.dim() != first.dim() or t.dtype != first.dtype for t in tensors):
        return None
    (dim,) = dims
    result = [d for d in range(rank) if d != dim]
    sizes = list(first.size())
    if not more:
        del sizes[dim]
    mine = [
        None if not more and d == dim else d - (d > dim and not more) for d in range(first.dim())
    ]
    return (
        Cut(
            axes=tuple(map(Axis, sizes)),
            operands={("tensors", i): tuple(mine) for i in range(len(tensors))},
            results=(tuple(None if d == dim else result.index(d) for d in range(rank)),),
        )
        if sizes
        else None
    )
