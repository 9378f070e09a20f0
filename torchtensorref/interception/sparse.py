"""What is asked of a sparse tensor's metadata and parts: answered at once, nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..memory.plain_views import alias_of
from ..memory.sparse import SparseRef, alias_of_sparse, become, make_sparse
from ..operators.layouts import COLUMNS_COMPRESSED, ROWS_COMPRESSED, without_elements
from .entry import dispatch

aten = torch.ops.aten


def dispatch_sparse(op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run one operator in which an operand is a SparseRef."""
    answer = ANSWERS.get(op)
    if answer is None or type(args[0]) is not SparseRef:
        return dispatch(op, types, args, kwargs)
    return answer(op, *args, **(kwargs or {}))


def _of_metadata(op: Any, ref: Any) -> Any:
    """What the sparse tensor without elements knows."""
    return op(ref._ttr_hollow)


def _nnz(op: Any, ref: Any) -> int:
    if ref.layout is torch.sparse_coo:
        return int(ref._ttr_parts[-1].size(0))
    return int(ref._ttr_parts[1].size(-1))


def _part(layouts: tuple[Any, ...], position: int, ordered: bool = False) -> Callable[..., Any]:
    """Give the part at a position, where the layout has it; else torch's own error is raised."""

    def answer(op: Any, ref: Any) -> Any:
        if ref.layout not in layouts or (
            ordered and ref.layout is torch.sparse_coo and not ref._ttr_hollow.is_coalesced()
        ):
            return op(ref._ttr_hollow)
        return alias_of(ref._ttr_parts[position])

    return answer


def _coalesced(op: Any, ref: Any, is_coalesced: bool) -> Any:
    hollow = without_elements(ref._ttr_hollow, ref.device)
    become(ref, make_sparse(op(hollow, is_coalesced), ref._ttr_parts))
    return ref


def _alias(op: Any, ref: Any) -> Any:
    return alias_of_sparse(ref)


def _transposed(op: Any, ref: Any, *dimensions: int) -> Any:
    """What is compressed along rows is the same as compressed along columns, of the transpose.

    Where the elements are blocks, each of them is turned as well.
    """
    if ref.layout is torch.sparse_coo or ref.dim() != 2:
        return dispatch(op, (), (ref, *dimensions))
    hollow = op(ref._ttr_hollow, *dimensions)
    if hollow.layout is ref.layout:
        return dispatch(op, (), (ref, *dimensions))  # a copy
    *indices, values = ref._ttr_parts
    if values.dim() == 3:
        values = dispatch(aten.transpose.int, (), (values, 1, 2))
    return make_sparse(hollow, [alias_of(part) for part in (*indices, values)])


_COO = (torch.sparse_coo,)
_ALL = (*_COO, *ROWS_COMPRESSED, *COLUMNS_COMPRESSED)

ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.is_coalesced.default: _of_metadata,
    aten.sparse_dim.default: _of_metadata,
    aten.dense_dim.default: _of_metadata,
    aten._dimI.default: _of_metadata,
    aten._dimV.default: _of_metadata,
    aten._nnz.default: _nnz,
    aten._indices.default: _part(_COO, 0),
    aten._values.default: _part(_COO, -1),
    aten.indices.default: _part(_COO, 0, ordered=True),
    aten.values.default: _part(_ALL, -1, ordered=True),
    aten.crow_indices.default: _part(ROWS_COMPRESSED, 0),
    aten.col_indices.default: _part(ROWS_COMPRESSED, 1),
    aten.ccol_indices.default: _part(COLUMNS_COMPRESSED, 0),
    aten.row_indices.default: _part(COLUMNS_COMPRESSED, 1),
    aten._coalesced_.default: _coalesced,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
}
