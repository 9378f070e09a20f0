"""Logarithms of sums of exponentials of two factors as matrix products, where these are as exact.

The exponential of x + y is that of x less the greatest x of its sum, times the same of y, times a
number that a whole sum has in common: so the sum is one of a matrix product, which takes a
hundredth of the time. It has lost something only where the greatest x and the greatest y of a sum
are so far from each other that next to nothing is left of it. That is looked at, and then the terms
are added one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blocks import Chunks, Tile, aligned, count_of, of_dtype
from .equation import Labels
from .gemm import MatrixProduct
from .kernels import InexactError, Job, Kernel, LogSum, exp_

#: The least that may be left of a sum whose greatest possible term is 1. What is lost is as little
#: below that as the least number of the dtype is: nothing of the sum, nothing of a gradient.
LEAST = {torch.float32: 1e-15, torch.float64: 1e-140}
#: Fewer terms than this are added faster than they are looked at.
FEWEST_TERMS = 1 << 14
#: So many terms there have to be for each number of factors and result.
TERMS_PER_NUMBER = 4


def is_worth_it(job: Job) -> bool:
    """Whether a sum is one of two factors, and large enough."""
    if len(job.inputs) != 2 or not job.reduced:
        return False
    terms = math.prod(job.sizes[label] for label in (*job.output, *job.reduced))
    numbers = sum(count_of(labels, job.sizes) for labels in (*job.inputs, job.output))
    return terms >= max(FEWEST_TERMS, TERMS_PER_NUMBER * numbers)


@dataclass(frozen=True, eq=False)
class LogProduct(MatrixProduct):
    """The logarithm of a sum; the state is what `LogSum` has, but about what no term is above."""

    def instead(self) -> Kernel:
        """Return what does it one by one."""
        return LogSum(self.dtype, self.work)

    def take(self, state: Any, blocks: Sequence[Tensor], job: Job, tile: Tile, is_cut: bool) -> Any:
        """Add the products of a block.

        Raises
        ------
        InexactError
            They would not be as exact as the terms one by one, or are no numbers.
        """
        pairs = [
            _below_the_greatest(of_dtype(block, self.work), labels, job.output)
            for block, labels in zip(blocks, job.inputs, strict=True)
        ]
        found = self.product(job, [factor for factor, _ in pairs])
        top = pairs[0][1] + pairs[1][1]
        del pairs
        self._look_at(found, job, blocks)
        if state is None:
            return top, found
        old_top, old = state
        both = torch.maximum(top, old_top)
        found.mul_(exp_(top.sub_(both)))
        found.add_(old.mul_(exp_(old_top.sub_(both))))
        return both, found

    def _look_at(self, found: Tensor, job: Job, blocks: Sequence[Tensor]) -> None:
        least, most = (float(one) for one in found.aminmax())
        if not most < math.inf:
            raise InexactError
        if least >= LEAST[self.work]:
            return
        # What is impossible is 0, and has to be.
        are_possible = self.product(job, [block.gt(-math.inf).to(self.work) for block in blocks])
        if bool(found.lt(LEAST[self.work]).logical_and_(are_possible.gt_(0)).any()):
            raise InexactError

    def finish(self, state: Any) -> tuple[Tensor, ...]:
        """Return the logarithm of the sum."""
        top, found = state
        return (found.log_().add_(top),)

    def of_nothing(self) -> tuple[Any, ...]:
        """Return the logarithm of 0."""
        return (-math.inf,)

    def nbytes(self, job: Job, chunks: Chunks, dtypes: Sequence[torch.dtype]) -> int:
        """Return the most bytes that a block takes: factors thrice, products six times."""
        factors = sum(count_of(labels, chunks) for labels in job.inputs)
        widened = dtypes[0] != self.work
        return self.work.itemsize * ((3 + widened) * factors + 6 * count_of(job.output, chunks))


@dataclass(frozen=True, eq=False)
class LogShares(MatrixProduct):
    """The gradient for one of the factors: of what the results get, the share that it has.

    The operands are the gradient of the result, the factor, the other one, and the result.
    """

    def take(self, state: Any, blocks: Sequence[Tensor], job: Job, tile: Tile, is_cut: bool) -> Any:
        """Add the shares in a block of results.

        Raises
        ------
        InexactError
            As that of the sums.
        """
        g, x, y, total = (of_dtype(block, self.work) for block in blocks)
        output, mine, others, _ = job.inputs
        factor, top = _below_the_greatest(x, mine, output)
        other, other_top = _below_the_greatest(y, others, output)
        rest = (top + other_top).sub_(total)
        rest.masked_fill_(total == -math.inf, -math.inf)  # nothing has a share of nothing
        limit, largest = -math.log(LEAST[self.work]), torch.finfo(self.work).max / 4
        if not (float(rest.amax()) <= limit and float(total.amax()) < largest):
            raise InexactError
        exp_(rest).mul_(g)
        there = tuple(label for label in mine if label in output or label in others)
        found = self.product(Job((output, others), there, job.sizes), [rest, other])
        del rest, other
        factor.mul_(aligned(found, there, mine))
        return factor if state is None else state.add_(factor)

    def nbytes(self, job: Job, chunks: Chunks, dtypes: Sequence[torch.dtype]) -> int:
        """Return the most bytes that a block takes."""
        output, mine, others, _ = (count_of(labels, chunks) for labels in job.inputs)
        widened = dtypes[1] != self.work
        each = (5 + widened) * output + (4 + widened) * mine + (3 + widened) * others
        return self.work.itemsize * each


def _below_the_greatest(x: Tensor, labels: Labels, output: Labels) -> tuple[Tensor, Tensor]:
    """Return the exponentials of what numbers are below the greatest of their sum, and that.

    It is finite, so that no difference is one of infinities, and so is a sum of two; it has the
    dimensions of the result.
    """
    dims = [at for at, label in enumerate(labels) if label not in output]
    info = torch.finfo(x.dtype)
    top = x.amax(dims, keepdim=True) if dims else x
    top = top.clamp(info.min / 4, info.max / 4)
    factor = exp_(x - top)
    kept = tuple(label for label in labels if label in output)
    return factor, aligned(top.squeeze(dims) if dims else top, kept, output)
