"""Tensors of other layouts than rows of numbers: the strided tensors that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

#: Compressed along rows, and along columns: row starts, columns and values, or the other way round.
ROWS_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
COLUMNS_COMPRESSED = (torch.sparse_csc, torch.sparse_bsc)
SPARSE = frozenset({torch.sparse_coo, *ROWS_COMPRESSED, *COLUMNS_COMPRESSED})

_SCALED_AS_A_WHOLE = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that a plain tensor of another layout is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in ROWS_COMPRESSED:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in COLUMNS_COMPRESSED:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized and tensor.qscheme() not in _SCALED_AS_A_WHOLE:
        return [tensor, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return [] if tensor.is_mkldnn else [tensor]


def sparse_of(
    parts: Sequence[torch.Tensor],
    size: Sequence[int],
    layout: torch.layout,
    is_coalesced: bool = False,
) -> torch.Tensor:
    """Make a sparse tensor of the parts that `parts_of` gives, which it shares; checks nothing."""
    values = parts[-1]
    options: dict[str, Any] = {"dtype": values.dtype, "device": values.device, "layout": layout}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if layout is torch.sparse_coo:
            made = aten._sparse_coo_tensor_unsafe.default(
                *parts, size, is_coalesced=is_coalesced, **options
            )
        else:
            made = aten._sparse_compressed_tensor_unsafe.default(*parts, size, **options)
    return made  # type: ignore[no-any-return]


def without_elements(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a sparse tensor on a device with the metadata of another, and no elements."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        empty = torch._C._VariableFunctions.empty
        first, *_, values = parts_of(like)
        if like.layout is torch.sparse_coo:
            indices = empty((first.size(0), 0), dtype=first.dtype, device=device)
            none = empty((0, *values.size()[1:]), dtype=values.dtype, device=device)
            parts = [indices, none]
        else:
            lead = first.size()[:-1]
            starts = torch._C._VariableFunctions.zeros(
                (*lead, 1), dtype=first.dtype, device=device
            ).expand(first.size())
            parts = [
                starts,
                empty((*lead, 0), dtype=first.dtype, device=device),
                empty((*lead, 0, *values.size()[first.dim() :]), dtype=values.dtype, device=device),
            ]
    is_coalesced = like.layout is torch.sparse_coo and like.is_coalesced()
    return sparse_of(parts, like.size(), like.layout, is_coalesced)
