"""Cuts along the very dimension that an operator goes along, where one row alone does not fit.

They are tried after those of `table.py`. But for those that choose among the elements, and sums of
integers, they add in another order than the whole operator does.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from . import exponentials, sums
from .cut import Along, Axis, Call, Cut, Inner, Rule, broadcast_along
from .rows import positive

aten = torch.ops.aten

#: A piece of a row has so many elements at least, where the row has them.
STEP = 256
#: Queries and keys of a tile: multiples of it.
STEP_OF_SCORES = 32
#: What is made on the way from scores to weights is there so many times at once.
SCORES_AT_ONCE = 3
#: Of whole numbers these make whole numbers.
OF_WHOLE_NUMBERS = frozenset(
    getattr(aten, name)
    for name in ("sum", "nansum", "prod", "amax", "amin", "max", "min", "cumsum", "cumprod")
)


def _is_exact(call: Call) -> bool:
    """Whether it gives the same in any order: whole numbers, made of whole numbers."""
    dtypes = [call["self"].dtype, call.arguments.get("dtype") or torch.int64]
    return call.op.overloadpacket in OF_WHOLE_NUMBERS and not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )


def _axes(x: torch.Tensor, along: list[int], *, keeps_bits: bool) -> tuple[list[int], list[Axis]]:
    """Return the dimensions that are cut, those with the longest strides first, and their axes.

    Of those that are gone along it is the longest one.
    """
    inner = max(along, key=x.size)
    dims = [d for d in range(x.dim()) if d == inner or d not in along]
    strides = x.stride()
    dims.sort(key=lambda d: -strides[d])
    step = max(STEP // max(prod(x.size(d) for d in along if d != inner), 1), 1)
    steps = [min(step, x.size(d)) if d == inner else 1 for d in dims]
    return dims, [
        Axis(x.size(d), step or 1, keeps_bits) for d, step in zip(dims, steps, strict=True)
    ]


def _inner(
    axis: int, kind: type[sums.Sums], passes: int = 1, *, is_in_order: bool = False
) -> Inner:
    return Inner(axis, kind, passes, is_in_order, after=tuple(range(axis)))


def reduction(kind: type[sums.Sums], *, is_choice: bool = False, result_count: int = 1) -> Rule:
    """Make the rule of an operator that reduces `self` over `dim`, or over everything."""

    def rule(call: Call) -> Cut | None:
        x = call["self"]
        dims = positive(call.arguments.get("dim"), x.dim())
        if dims is None:
            if kind is sums.Best or not x.dim():
                return None
            dims = list(range(x.dim()))
        if x.is_complex() and call.op.overloadpacket not in (aten.sum, aten.mean, aten.prod):
            return None
        if call.op.overloadpacket is aten.linalg_vector_norm and not _is_known_norm(call["ord"]):
            return None
        cut, axes = _axes(x, dims, keeps_bits=is_choice or _is_exact(call))
        number = {d: n for n, d in enumerate(cut)}
        kept = [
            None if d in dims else number[d]
            for d in range(x.dim())
            if d not in dims or call.arguments.get("keepdim")
        ]
        return Cut(
            axes=tuple(axes),
            operands={("self", None): tuple(number.get(d) for d in range(x.dim()))},
            results=(tuple(kept),) * result_count,
            inner=_inner(number[max(dims, key=x.size)], kind, is_in_order=kind is sums.Best),
        )

    return rule


def _is_known_norm(order: Any) -> bool:
    return order in (0, 1, 2, float("inf"), float("-inf"))


def along_one(
    kind: type[sums.Sums],
    *names: str,
    passes: int = 1,
    is_in_order: bool = False,
    result_count: int = 1,
) -> Rule:
    """Make the rule of an operator that goes along `dim` of operands of one size."""

    def rule(call: Call) -> Cut | None:
        first = call[names[0]]
        dims = positive(call["dim"], first.dim())
        if not dims or first.is_complex() or any(call[n].size() != first.size() for n in names):
            return None
        is_exact = kind is sums.Scan and _is_exact(call)
        cut, axes = _axes(first, dims, keeps_bits=is_exact)
        number = {d: n for n, d in enumerate(cut)}
        along: Along = tuple(number[d] for d in range(first.dim()))
        shorter = tuple(None if d in dims else number[d] for d in range(first.dim()))
        return Cut(
            axes=tuple(axes),
            operands={(name, None): along for name in names},
            results=(shorter if kind is sums.Top else along,) * result_count,
            inner=_inner(number[dims[0]], kind, passes, is_in_order=is_in_order),
        )

    return rule


def attention_for_cpu(call: Call) -> Cut | None:
    """Samples, queries, and at last keys: what they add up to is kept, and scaled as they come."""
    query, key, mask = call["query"], call["key"], call["attn_mask"]
    if query.dim() != 4 or call["dropout_p"] or (mask is not None and mask.dtype is torch.bool):
        return None
    samples, heads, length = query.size()[:3]
    width = 4 if query.dtype is not torch.float64 else 8
    shares_keys = key.size(1) != heads
    of_heads = None if shares_keys else 3
    sizes = (samples, length, key.size(2), 1 if shares_keys else heads)
    steps = (1, *(min(STEP_OF_SCORES, size) or 1 for size in sizes[1:3]), 1)
    operands: dict[tuple[str, int | None], Along] = {
        ("query", None): (0, of_heads, 1, None),
        ("key", None): (0, of_heads, 2, None),
        ("value", None): (0, of_heads, 2, None),
    }
    if mask is not None:
        axes_of_scores = (0, of_heads, 1, 2)
        along = broadcast_along(mask, (samples, heads, length, key.size(2)))
        operands["attn_mask", None] = tuple(None if d is None else axes_of_scores[d] for d in along)
    score_nbytes = width * samples * heads * length * key.size(2)
    kept = frozenset((0, 1, 3))
    scratch = [(SCORES_AT_ONCE * score_nbytes, kept | {2}), (width * query.numel(), kept)]
    if shares_keys:
        repeated = 2 * width * query.numel() // length * key.size(2)
        scratch.append((repeated, frozenset((0, 2))))
    return Cut(
        axes=tuple(Axis(n, step, False) for n, step in zip(sizes, steps, strict=True)),
        operands=operands,
        results=((0, of_heads, 1, None), (0, of_heads, 1)),
        inner=Inner(2, exponentials.Attention, is_always=call["is_causal"]),
        scratch=tuple(scratch),
    )


_joined = reduction(sums.Joined)
_counted = reduction(sums.Joined, is_choice=True)
_spread = reduction(sums.Spread)
_two = reduction(sums.Best, is_choice=True, result_count=2)
_where = reduction(sums.Best, is_choice=True)
_scan = along_one(sums.Scan, "self", is_in_order=True)
_softmax = along_one(exponentials.Softmax, "self", passes=2)
_softmax_backward = along_one(exponentials.SoftmaxBackward, "grad_output", "output", passes=2)

RULES: dict[Any, Rule] = {
    # partial results are joined by one operator
    aten.sum.default: _joined,
    aten.sum.dim_IntList: _joined,
    aten.nansum.default: _joined,
    aten.mean.default: _joined,
    aten.mean.dim: _joined,
    aten.prod.default: _joined,
    aten.prod.dim_int: _joined,
    aten.logsumexp.default: _joined,
    aten.linalg_vector_norm.default: _joined,
    # the largest of zeros may be another one's zero: its sign is not kept
    aten.amax.default: _joined,
    aten.amin.default: _joined,
    aten.max.default: _joined,
    aten.min.default: _joined,
    aten.any.default: _counted,
    aten.any.dim: _counted,
    aten.any.dims: _counted,
    aten.all.default: _counted,
    aten.all.dim: _counted,
    aten.all.dims: _counted,
    # mean and squares
    aten.var.correction: _spread,
    aten.std.correction: _spread,
    # what is found first stays
    aten.max.dim: _two,
    aten.min.dim: _two,
    aten.argmax.default: _where,
    aten.argmin.default: _where,
    # the best of runs: of equal ones which, nobody promises
    aten.topk.default: along_one(sums.Top, "self", result_count=2, is_in_order=True),
    # each piece goes on from the last one
    aten.cumsum.default: _scan,
    aten.cumprod.default: _scan,
    aten.logcumsumexp.default: _scan,
    # in two passes
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    # log-sum-exp merge
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_for_cpu,
}
