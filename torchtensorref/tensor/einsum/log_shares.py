"""Gradients of a logarithm of a sum, for all its operands from one walk through the terms.

The gradient for an element is the sum of the shares of the terms that it is a factor of. So each
share is computed once for all operands, and operands with the same dimensions have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import Chunks, Room, aligned, count_of, part_of, tiles
from .equation import Labels
from .kernels import Job, exp_, multiplied


class Shares:
    """The gradients of a logarithm: all of it that no value changes.

    Parameters
    ----------
    job : Job
        The sum.
    dtype : torch.dtype
        That of the operands and of the result.
    room : Room
        How large blocks may be.
    needs : sequence of bool
        Which operands need a gradient.
    """

    def __init__(self, job: Job, dtype: torch.dtype, room: Room, needs: Sequence[bool]) -> None:
        self._job, self._dtype, self._room, self._needs = job, dtype, room, needs
        wanted = (labels for labels, need in zip(job.inputs, needs, strict=True) if need)
        self._kinds = tuple(dict.fromkeys(wanted))

    @functools.cached_property
    def _chunks(self) -> Chunks:
        job = self._job
        return self._room.choose(job.output, job.reduced, job.sizes, self._nbytes)

    def _nbytes(self, chunks: Chunks) -> int:
        """Return the most bytes that a block takes: its terms, and what is summed of them."""
        job = self._job
        terms = (1 + (len(job.inputs) > 2)) * count_of(job.order, chunks)
        sums = sum(count_of(labels, chunks) for labels in self._kinds)
        return self._dtype.itemsize * (terms + sums)

    def run(self, g: Tensor, operands: Sequence[Tensor], total: Tensor) -> list[Tensor | None]:
        """Compute them.

        Parameters
        ----------
        g : Tensor
            The gradient of the result.
        operands : sequence of Tensor
            All of them.
        total : Tensor
            The result, and any number where that is of no terms.
        """
        job, chunks = self._job, self._chunks
        factors = (*operands, total, g)
        if all(chunks[label] == job.sizes[label] for label in job.order):
            found = self._sums(factors)
        else:
            found = {labels: g.new_zeros(job.shape(labels)) for labels in self._kinds}
            inputs = (*job.inputs, job.output, job.output)
            for tile in tiles(job.order, job.sizes, chunks):
                blocks = [part_of(x, own, tile) for x, own in zip(factors, inputs, strict=True)]
                for labels, part in self._sums(blocks).items():
                    part_of(found[labels], labels, tile).add_(part)
                del part
        return [
            found[labels] if need else None
            for labels, need in zip(job.inputs, self._needs, strict=True)
        ]

    def _sums(self, blocks: Sequence[Tensor]) -> dict[Labels, Tensor]:
        """Return the sums of the shares of a block's terms, of the dimensions of the operands."""
        job = self._job
        *operands, total, g = blocks
        factors = [
            aligned(x, labels, job.order) for x, labels in zip(operands, job.inputs, strict=True)
        ]
        exponent, is_own = multiplied(factors, torch.add, Tensor.add_)
        total, g = (aligned(x, job.output, job.order) for x in (total, g))
        shares = exponent.sub_(total) if is_own else exponent - total
        exp_(shares).mul_(g)
        return {labels: _summed(shares, job.order, labels) for labels in self._kinds}


def _summed(shares: Tensor, order: Labels, labels: Labels) -> Tensor:
    """Sum over what is not among some dimensions."""
    there = tuple(label for label in order if label in labels)
    others = [at for at, label in enumerate(order) if label not in labels]
    found = shares.sum(others) if others else shares
    return aligned(found, there, labels)
