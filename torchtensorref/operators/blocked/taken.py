"""What operators that read a few rows, elements or groups of a table take from it.

Each rule packs what a call reads at home, and says which places of the pack it then asks for: the
operator itself, called with the pack instead of the table, gives the same result bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .cut import has_one_layout

aten = torch.ops.aten

#: Groups move alone that have less than this share of their table.
GROUPS_SHARE = 1 / 2

#: The arguments of a call by their names, tensors as they are at home; and the most numbers that
#: may be taken. Returns the arguments that change; None where it may not, or cannot.
Take = Callable[[dict[str, Any], float], "dict[str, Any] | None"]


def _counted(index: torch.Tensor) -> torch.Tensor:
    """Return an index of the same shape that asks for one place after the other."""
    return torch.arange(index.numel(), dtype=index.dtype, device=index.device).view(index.size())


def _embedding(call: dict[str, Any], most: float) -> dict[str, Any] | None:
    weight, indices = call["weight"], call["indices"]
    if weight.dim() != 2 or indices.numel() * weight.size(1) >= most:
        return None
    return {
        "weight": weight.index_select(0, indices.reshape(-1)),
        "indices": _counted(indices),
    }


def _index_select(call: dict[str, Any], most: float) -> dict[str, Any] | None:
    x, index = call["self"], call["index"]
    if not x.dim() or index.dim() != 1:
        return None
    dim = call["dim"] % x.dim()
    if index.numel() * (x.numel() // max(x.size(dim), 1)) >= most:
        return None
    return {"self": x.index_select(dim, index), "index": _counted(index)}


def _gather(call: dict[str, Any], most: float) -> dict[str, Any] | None:
    x, index = call["self"], call["index"]
    if not x.dim() or index.dim() != x.dim() or index.numel() >= most:
        return None
    dim = call["dim"] % x.dim()
    sizes = [1] * x.dim()
    sizes[dim] = index.size(dim)
    places = torch.arange(index.size(dim), dtype=index.dtype, device=index.device)
    return {
        "self": x.gather(dim, index),
        "index": places.view(sizes).expand(index.size()).contiguous(),
    }


def _take(call: dict[str, Any], most: float) -> dict[str, Any] | None:
    x, index = call["self"], call["index"]
    if index.numel() >= most:
        return None
    return {"self": x.take(index).reshape(-1), "index": _counted(index)}


def _index(call: dict[str, Any], most: float) -> dict[str, Any] | None:
    """Indices that are broadcast to one shape, in any places; masks as what they are true for.

    Their shape stands in the result where the indices stand if these are neighbours, else first.
    """
    x = call["self"]
    indices = _without_masks(call["indices"], x.size())
    if indices is None or len(indices) > x.dim():
        return None
    asked = [dim for dim, index in enumerate(indices) if index is not None]
    if not asked:
        return None
    shape = torch.broadcast_shapes(*(indices[dim].size() for dim in asked))
    rest = math.prod(size for dim, size in enumerate(x.size()) if dim not in asked)
    if math.prod(shape) * rest >= most:
        return None
    first = asked[0]
    are_neighbours = asked[-1] - first == len(asked) - 1
    pack = aten.index.Tensor(x, indices)
    if not (pack.is_contiguous() and has_one_layout(pack)):
        return None  # its layout is that of the table
    start = first if are_neighbours else 0
    sizes = list(pack.size())
    pack = pack.reshape(*sizes[:start], math.prod(shape), *sizes[start + len(shape) :])
    pack = pack.movedim(start, first)
    for dim in asked[1:]:
        pack = pack.unsqueeze(dim)
    places = torch.arange(math.prod(shape), device=x.device).view(shape)
    local = [None if dim not in asked else torch.zeros_like(places) for dim in range(len(indices))]
    local[first] = places
    return {"self": pack.contiguous(), "indices": local}


def _without_masks(indices: list[Any], sizes: torch.Size) -> list[Any] | None:
    """Exchange masks for the indices of what they are true for; None where that cannot be.

    Nor where they are of other sizes than the dimensions that they stand for.
    """
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype in (torch.long, torch.int):
            found.append(index)
            continue
        if index.dtype is not torch.bool or not index.dim() or index.is_meta:
            return None
        if index.size() != sizes[len(found) : len(found) + index.dim()]:
            return None
        found += index.nonzero().unbind(1)
    return found


TAKES: dict[Any, Take] = {
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.take.default: _take,
    aten.index.Tensor: _index,
}


class Groups(NamedTuple):
    """The arguments of a product of groups of rows, each with a matrix of its own.

    Attributes
    ----------
    rows, table, ends : str
        What has the rows, one group after the other; the matrices; and where each group ends.
    """

    rows: str
    table: str
    ends: str


def groups_with_rows(ends: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the groups that have rows: the matrices of others are not read."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return (ends > starts).nonzero().view(-1)


#: Operators that read some groups of a table, by name: another library's is registered late.
GROUPS = {
    "aten._grouped_mm.default": Groups("self", "mat2", "offs"),
    # Where the accelerator has no kernel for it (CUDA before compute capability 8.0).
    "transformers.grouped_mm_fallback.default": Groups("input", "weight", "offs"),
}
