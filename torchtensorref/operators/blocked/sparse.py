"""Products of sparse matrices, cut along the rows of the sparse one.

Rows of a product are made of the same rows of what stands on the left, whatever the layout, so a
few of them at a time is all that has to be on the accelerator, beside what stands on the right. If
that does not fit, it is cut in columns. Measured with torch 2.13 and MKL 2024.2 (1 and 2 threads,
550 products of random sizes up to 1500): no cut changed a bit, but for a matrix compressed in rows
times a vector, and for the order of the columns within a row where the product of two such matrices
is cut in columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..layouts import COLUMNS_COMPRESSED, parts_of, sparse_of

aten = torch.ops.aten
# Not `torch.arange`: injection replaces that name.
_arange = torch._C._VariableFunctions.arange

#: In which the cuts have been measured.
MEASURED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Product:
    """Where the operands of a product stand, by the names of its arguments."""

    left: str
    right: str
    #: Lies along the rows of the result: what is added, or what is multiplied where it is sampled.
    along: tuple[str, ...] = field(default=())
    #: The result has the elements of the left operand, which is not multiplied.
    is_sampled: bool = False


PRODUCTS: dict[Any, Product] = {
    aten.mm.default: Product("self", "mat2"),
    aten.mv.default: Product("self", "vec"),
    aten._sparse_sparse_matmul.default: Product("self", "other"),
    aten.addmm.default: Product("mat1", "mat2", ("self",)),
    aten._sparse_addmm.default: Product("mat1", "mat2", ("self",)),
    aten.sparse_sampled_addmm.default: Product("self", "mat2", ("mat1",), is_sampled=True),
}


def is_in_order(plain: torch.Tensor) -> bool:
    """Whether no kernel sorts the elements of a matrix first."""
    return plain.layout is not torch.sparse_coo or plain.is_coalesced()


class RowTooLargeError(Exception):
    """Internal: not even one row fits."""


class Rows:
    """A sparse matrix at home, of which rows are taken.

    Parameters
    ----------
    plain : torch.Tensor
        COO or CSR. One whose elements are in no order is put in the order of rows, those of a row
        as they were; a kernel that sorts them itself is given what it would make of all of them.
    is_sorted_by_kernel : bool
        The kernel coalesces.
    """

    def __init__(self, plain: torch.Tensor, is_sorted_by_kernel: bool) -> None:
        self.is_coo = plain.layout is torch.sparse_coo
        self.columns = plain.size(1)
        if not self.is_coo:
            self.starts, self.indices, self.values = parts_of(plain)
            return
        if is_sorted_by_kernel:
            plain = plain.coalesce()
        self.is_coalesced = plain.is_coalesced()
        self.indices, self.values = parts_of(plain)
        if not self.is_coalesced:
            order = self.indices[0].argsort(stable=True)
            self.indices, self.values = self.indices[:, order], self.values[order]
        bounds = _arange(plain.size(0) + 1, device=self.indices.device)
        self.starts = torch.searchsorted(self.indices[0].contiguous(), bounds)

    @property
    def column_indices(self) -> torch.Tensor:
        """The column of each element."""
        return self.indices[1] if self.is_coo else self.indices

    @property
    def element_nbytes(self) -> int:
        """Bytes that an element takes with its indices."""
        per_index = self.indices.element_size() * (2 if self.is_coo else 1)
        return per_index + self.values.element_size()

    def between(self, start: int, end: int) -> torch.Tensor:
        """Return the sparse matrix of some rows; its values are where they were."""
        first, last = int(self.starts[start]), int(self.starts[end])
        values, size = self.values[first:last], (end - start, self.columns)
        if self.is_coo:
            indices = self.indices[:, first:last].clone()
            indices[0] -= start
            return sparse_of([indices, values], size, torch.sparse_coo, self.is_coalesced)
        starts = self.starts[start : end + 1] - first
        return sparse_of([starts, self.indices[first:last], values], size, torch.sparse_csr)


def columns_of(plain: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return some columns of a matrix at home."""
    if plain.layout is torch.strided:
        return plain[:, start:end]
    size = (plain.size(0), end - start)
    first, *_, values = parts_of(plain)
    if plain.layout is torch.sparse_coo:
        chosen = ((first[1] >= start) & (first[1] < end)).nonzero()[:, 0]
        indices = first[:, chosen]
        indices[1] -= start
        return sparse_of([indices, values[chosen]], size, plain.layout, plain.is_coalesced())
    indices = parts_of(plain)[1]
    if plain.layout in COLUMNS_COMPRESSED:
        low, high = int(first[start]), int(first[end])
        return sparse_of(
            [first[start : end + 1] - low, indices[low:high], values[low:high]], size, plain.layout
        )
    is_chosen = (indices >= start) & (indices < end)
    counts = torch.nn.functional.pad(is_chosen.cumsum(0, dtype=first.dtype), (1, 0))
    chosen = is_chosen.nonzero()[:, 0]
    parts = [counts[first.long()], indices[chosen] - start, values[chosen]]
    return sparse_of(parts, size, plain.layout)


def row_counts(plain: torch.Tensor) -> torch.Tensor:
    """Return how many elements each row of a sparse matrix has."""
    first, rows, *_ = parts_of(plain)
    if plain.layout in COLUMNS_COMPRESSED:
        return torch.bincount(rows, minlength=plain.size(0))
    if plain.layout is torch.sparse_coo:
        return torch.bincount(first[0], minlength=plain.size(0))
    return first.diff().long()


def row_ranges(nbytes: torch.Tensor, room_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, as long as what their rows take together fits.

    Parameters
    ----------
    nbytes : torch.Tensor
        What each row takes.

    Raises
    ------
    RowTooLargeError
        One row does not fit.
    """
    if int(nbytes.max()) > room_nbytes:
        raise RowTooLargeError(f"a row takes {int(nbytes.max())} of {room_nbytes} bytes")
    total = nbytes.cumsum(0)
    start, done, count = 0, 0, nbytes.numel()
    while start < count:
        end = int(torch.searchsorted(total, done + room_nbytes, right=True))
        yield start, end
        start, done = end, int(total[end - 1])


def joined(tiles: list[tuple[int, torch.Tensor]], size: torch.Size) -> list[torch.Tensor]:
    """Return the parts of a sparse matrix whose tiles of columns are given, each with its first.

    Each is of all rows. Within a row, elements come tile by tile.
    """
    layout = tiles[0][1].layout
    if len(tiles) == 1:
        return parts_of(tiles[0][1])
    counts = [row_counts(tile) for _, tile in tiles]
    starts = torch.nn.functional.pad(sum(counts).cumsum(0), (1, 0))  # type: ignore[union-attr]
    total = int(starts[-1])
    example = parts_of(tiles[0][1])
    columns = example[-2].new_empty(total) if layout is not torch.sparse_coo else None
    both = example[0].new_empty((2, total)) if columns is None else None
    values = example[-1].new_empty(total)
    free = starts[:-1].clone()
    for (begin, tile), count in zip(tiles, counts, strict=True):
        first, *_, tile_values = parts_of(tile)
        own = torch.nn.functional.pad(count.cumsum(0), (1, 0))[:-1]
        rows = torch.repeat_interleave(_arange(size[0], device=count.device), count)
        at = (free - own)[rows] + _arange(rows.numel(), device=rows.device)
        if both is not None:
            both[0, at], both[1, at] = first[0], first[1] + begin
        else:
            assert columns is not None
            columns[at] = parts_of(tile)[1] + begin
        values[at] = tile_values
        free += count
    if both is not None:
        return [both, values]
    return [starts.to(example[0].dtype), columns, values]  # type: ignore[list-item]


def stacked(
    tiles: list[tuple[int, list[torch.Tensor]]], layout: torch.layout
) -> list[torch.Tensor]:
    """Return the parts of a sparse matrix whose tiles of rows are given, each with its first."""
    values = torch.cat([parts[-1] for _, parts in tiles])
    if layout is torch.sparse_coo:
        for begin, (indices, _) in tiles:
            indices[0] += begin
        return [torch.cat([parts[0] for _, parts in tiles], 1), values]
    ends = [tiles[0][1][0][:1]]
    for _, (starts, *_) in tiles:
        ends.append(starts[1:] + ends[-1][-1:])
    return [torch.cat(ends), torch.cat([parts[1] for _, parts in tiles]), values]
