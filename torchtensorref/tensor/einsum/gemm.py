"""Products of two tensors of numbers as matrix products, which vendors' libraries are best at.

Each dimension is one of four kinds: both factors and the result have it (a batch), one factor and
the result (rows or columns), both factors and not the result (inner). Dimensions of a kind that lie
behind each other in memory become one without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blocks import Chunks, Tile, count_of
from .equation import Labels
from .kernels import Job, Kernel, wide


@dataclass(frozen=True, eq=False)
class MatrixProduct(Kernel):
    """Sums of products of two factors."""

    has_terms = False

    def product(self, job: Job, blocks: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products of a block, of the dimensions of the result."""
        (a, la), (b, lb) = (
            _without_own(block, labels, other, job.output)
            for block, labels, other in zip(blocks, job.inputs, reversed(job.inputs), strict=True)
        )
        batch = tuple(label for label in la if label in lb and label in job.output)
        inner = tuple(label for label in la if label in lb and label not in job.output)
        rows = tuple(label for label in la if label not in lb)
        columns = tuple(label for label in lb if label not in la)
        inner, rows, columns = (
            _as_they_lie(labels, x, own)
            for labels, x, own in ((inner, a, la), (rows, a, la), (columns, b, lb))
        )
        sizes = {**dict(zip(la, a.shape, strict=True)), **dict(zip(lb, b.shape, strict=True))}
        m, n, k = (count_of(labels, sizes) for labels in (rows, columns, inner))
        lead = [count_of(batch, sizes)] if batch else []
        left = a.permute([la.index(x) for x in batch + rows + inner]).reshape([*lead, m, k])
        right = b.permute([lb.index(x) for x in batch + inner + columns]).reshape([*lead, k, n])
        found = torch.bmm(left, right) if batch else torch.mm(left, right)
        order = batch + rows + columns
        found = found.reshape([sizes[label] for label in order])
        return found if order == job.output else found.permute([order.index(x) for x in job.output])

    def take(self, state: Any, blocks: Sequence[Tensor], job: Job, tile: Tile, is_cut: bool) -> Any:
        """Add the products of a block; where sums are cut, those of halves in float32."""
        if is_cut:
            blocks = [block.to(wide(block.dtype)) for block in blocks]
        found = self.product(job, blocks)
        return found if state is None else state.add_(found)

    def nbytes(self, job: Job, chunks: Chunks, dtypes: Sequence[torch.dtype]) -> int:
        """Return the most bytes that a block takes: copies of factors, and products twice."""
        size = self.work.itemsize
        is_cut = any(chunks[label] < job.sizes[label] for label in job.reduced)
        widened = is_cut and wide(dtypes[0]) != dtypes[0]
        factors = sum(count_of(labels, chunks) for labels in job.inputs)
        return size * ((1 + widened) * factors + 2 * count_of(job.output, chunks))


def _without_own(x: Tensor, labels: Labels, other: Labels, output: Labels) -> tuple[Tensor, Labels]:
    """Sum over what neither the other factor nor the result has."""
    own = [at for at, label in enumerate(labels) if label not in other and label not in output]
    if not own:
        return x, labels
    return x.sum(own), tuple(label for at, label in enumerate(labels) if at not in own)


def _as_they_lie(labels: Labels, x: Tensor, own: Labels) -> Labels:
    """Order dimensions as they lie in memory, so that they become one without a copy."""
    strides = x.stride()
    return tuple(sorted(labels, key=lambda label: -strides[own.index(label)]))
