"""Sparse tensors whose indices and values are blocks.

torch's own sparse tensor has its indices and values in C++. A `SparseRef` is one without elements,
which has the metadata, and beside it the TensorRefs that indices and values are. These are fetched,
counted, evicted and written like any; an operator is given a sparse tensor that is put together
of what stands for them where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..operators.layouts import SPARSE, parts_of, sparse_of, without_elements
from .ref import TensorRef

_Made = Callable[[torch.Tensor], Any]


class SparseRef(torch.Tensor):
    """A sparse tensor whose indices and values are TensorRefs.

    Attributes
    ----------
    _ttr_parts : tuple of TensorRef
        What `parts_of` gives of a plain one: indices first, values last.
    _ttr_hollow : torch.Tensor
        The plain sparse tensor without elements that answers what is asked of the metadata.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _ttr_parts: tuple[Any, ...]
    _ttr_hollow: torch.Tensor


def make_sparse(hollow: torch.Tensor, parts: Sequence[Any]) -> Any:
    """Make the SparseRef with a hollow tensor's metadata over TensorRefs."""
    ref: Any = torch.Tensor._make_subclass(SparseRef, hollow)
    ref._ttr_parts, ref._ttr_hollow = tuple(parts), hollow
    return ref


def sparse_over(plain: torch.Tensor, label: torch.device, made: _Made) -> Any:
    """Make the SparseRef for a plain sparse tensor; `made` gives the TensorRef for each part.

    Returns
    -------
    SparseRef or torch.Tensor
        The plain tensor itself where it is not sparse, or a part cannot be a TensorRef.
    """
    if plain.layout not in SPARSE:
        return plain
    parts = [made(part) for part in parts_of(plain)]
    if any(not isinstance(part, TensorRef) for part in parts):
        return plain
    return make_sparse(without_elements(plain, label), parts)


def plain_sparse(ref: Any, plain: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Make the plain sparse tensor of what `plain` gives for each of a SparseRef's parts."""
    parts = [plain(part) for part in ref._ttr_parts]
    is_coalesced = ref.layout is torch.sparse_coo and ref._ttr_hollow.is_coalesced()
    return sparse_of(parts, ref.size(), ref.layout, is_coalesced)


def alias_of_sparse(ref: Any) -> Any:
    """Make another SparseRef of the same indices and values, whose sizes it has, too, as torch."""
    return make_sparse(ref._ttr_hollow, ref._ttr_parts)


def become(ref: Any, other: Any) -> None:
    """Make a SparseRef stand for what another one stands for, keeping its identity and autograd."""
    if ref._ttr_hollow is not other._ttr_hollow:
        with torch.no_grad():
            torch._C.TensorBase.data.__set__(ref, other)  # type: ignore[attr-defined]
    ref._ttr_parts, ref._ttr_hollow = other._ttr_parts, other._ttr_hollow
