"""The engine: goes through a sum of products block by block, and writes what it finds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .blocks import Chunks, Room, Tile, of_dtype, part_of, tiles
from .kernels import Job, Kernel

T = TypeVar("T")
#: The block of which nothing is cut.
_ALL: Tile = {}


class Walk:
    """A sum of products that is gone through block by block: all of it that no value changes.

    Parameters
    ----------
    job : Job
        The dimensions.
    kernel : Kernel
        The semiring.
    room : Room
        How large blocks may be.
    dtypes : sequence of torch.dtype
        Those of the factors.
    """

    def __init__(self, job: Job, kernel: Kernel, room: Room, dtypes: Sequence[torch.dtype]) -> None:
        self.job, self.kernel, self.room, self.dtypes = job, kernel, room, dtypes
        self._kept: dict[Any, Any] = {}

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The part of each dimension that one block has."""
        job, kernel = self.job, self.kernel
        return self.room.choose(
            job.output,
            job.reduced,
            job.sizes,
            lambda chunks: kernel.nbytes(job, chunks, self.dtypes),
            kernel.has_terms and bool(job.reduced),
        )

    @functools.cached_property
    def is_cut(self) -> tuple[bool, bool]:
        """Whether there are several blocks: of the result, and of the sums."""
        job, chunks = self.job, self.chunks
        of_output, of_sums = (
            any(chunks[label] < job.sizes[label] for label in labels)
            for labels in (job.output, job.reduced)
        )
        return of_output, of_sums

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether there is nothing to sum."""
        return any(self.job.sizes[label] == 0 for label in self.job.order)

    @functools.cached_property
    def instead(self) -> Walk:
        """The walk of the kernel that stands in where this one is not exact enough."""
        return Walk(self.job, self.kernel.instead(), self.room, self.dtypes)

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """Return what is made of this once, for gradients."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found

    def run(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute it.

        Returns
        -------
        tuple of Tensor
            The results of the kernel, with the dimensions of `job.output`.

        Raises
        ------
        InexactError
            The kernel says so.
        """
        job, dtypes = self.job, self.kernel.dtypes()
        if self.is_empty:
            zeros = zip(self.kernel.of_nothing(), dtypes, strict=True)
            shape = job.shape(job.output)
            return tuple(operands[0].new_full(shape, zero, dtype=dtype) for zero, dtype in zeros)
        if not self.is_cut[0]:
            found = self._part(operands, _ALL)
            return tuple(of_dtype(one, dtype) for one, dtype in zip(found, dtypes, strict=True))
        shape = job.shape(job.output)
        results = tuple(operands[0].new_empty(shape, dtype=dtype) for dtype in dtypes)
        for tile in tiles(job.output, job.sizes, self.chunks):
            for whole, part in zip(results, self._part(operands, tile), strict=True):
                part_of(whole, job.output, tile).copy_(part)
            del part
        return results

    def _part(self, operands: Sequence[Tensor], tile: Tile) -> tuple[Tensor, ...]:
        """Compute a part of the results."""
        job, kernel = self.job, self.kernel
        if self.is_cut == (False, False):
            return kernel.finish(kernel.take(None, operands, job, _ALL, False))
        state = None
        for inner in tiles(job.reduced, job.sizes, self.chunks):
            blocks = [
                part_of(x, labels, tile, inner)
                for x, labels in zip(operands, job.inputs, strict=True)
            ]
            state = kernel.take(state, blocks, job, inner, self.is_cut[1])
        return kernel.finish(state)
