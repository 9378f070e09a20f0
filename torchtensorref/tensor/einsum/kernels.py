"""Kernels: what a sum of products is in each semiring, one block after the other.

A kernel is given the factors of one block at a time, as views that broadcast: first the dimensions
of the result, then the summed ones. It keeps a state of what it has seen, and finishes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .blocks import Chunks, Tile, aligned, count_of, of_dtype
from .equation import Label, Labels
from .extremes import best_of
from .semirings import Named, Semiring

_HALVES = (torch.float16, torch.bfloat16)
_LOG2_E = 1 / math.log(2)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add numbers of a dtype in: that of halves is float32."""
    return torch.float32 if dtype in _HALVES else dtype


def exp_(x: Tensor) -> Tensor:
    """Exchange numbers, of which most are at most 0, for their exponentials; to base 2.

    On the host `Tensor.exp_` is MKL's, which on other processors than Intel's takes up to three
    times as long as `Tensor.exp2_`. Scaling rounds a number by as much as the sum that it is has
    been rounded (Dao 2023, "FlashAttention-2", does likewise).
    """
    return x.mul_(_LOG2_E).exp2_()


class InexactError(Exception):
    """Internal: a kernel would not be as exact as another one, which is to be used instead."""


@dataclass(frozen=True, eq=False)
class Job:
    """A sum of products: which dimensions factors have, and which the result.

    Each dimension of the result is one of a factor's, and no factor has one twice.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    sizes: Mapping[Label, int]

    @functools.cached_property
    def reduced(self) -> Labels:
        """The dimensions that are summed over, in the order in which they first appear."""
        every = dict.fromkeys(label for labels in self.inputs for label in labels)
        return tuple(label for label in every if label not in self.output)

    @functools.cached_property
    def order(self) -> Labels:
        """All dimensions, as the terms of a block have them: the summed ones last."""
        return (*self.output, *self.reduced)

    @functools.cached_property
    def last(self) -> tuple[int, ...]:
        """The summed dimensions of the terms, counted from the end."""
        return tuple(range(-len(self.reduced), 0))

    def shape(self, labels: Labels) -> list[int]:
        """Return the sizes of some dimensions."""
        return [self.sizes[label] for label in labels]


@dataclass(frozen=True, eq=False)
class Kernel:
    """The base of kernels.

    Parameters
    ----------
    dtype : torch.dtype
        That of the result.
    work : torch.dtype
        That of the products and sums.
    """

    dtype: torch.dtype
    work: torch.dtype

    #: Tensors of the size of a block's products that are there at once, for two factors.
    copies = 1
    #: Whether there are any.
    has_terms: ClassVar[bool] = True

    def start(self, block: Tensor) -> Tensor:
        """Bring a factor to the dtype of the work."""
        return of_dtype(block, self.work)

    def take(self, state: Any, blocks: Sequence[Tensor], job: Job, tile: Tile, is_cut: bool) -> Any:
        """Add the products of one block to the state; the first state is None.

        Parameters
        ----------
        state : object
            Of the blocks before, of the same part of the result.
        blocks : sequence of Tensor
            The parts of the operands.
        job : Job
            The whole sum.
        tile : dict
            Which part of the summed dimensions it is.
        is_cut : bool
            Whether it is a part, and not all.
        """
        factors = [
            aligned(self.start(block), labels, job.order)
            for block, labels in zip(blocks, job.inputs, strict=True)
        ]
        return self.absorb(state, factors, job, tile)

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Add the products of the factors of a block, which broadcast."""
        raise NotImplementedError

    def finish(self, state: Any) -> tuple[Tensor, ...]:
        """Return the results of a block of the result."""
        return (state,)

    def instead(self) -> Kernel:
        """Return the kernel to be used where this one is not exact enough."""
        return self

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the results."""
        return (self.dtype,)

    def of_nothing(self) -> tuple[Any, ...]:
        """Return the results of a sum without terms."""
        return (0,)

    def nbytes(self, job: Job, chunks: Chunks, dtypes: Sequence[torch.dtype]) -> int:
        """Return the most bytes that a block takes beside operands, of some dtypes, and results."""
        size = self.work.itemsize
        copies = self.copies + (len(dtypes) > 2)
        found = size * copies * count_of(job.order, chunks)
        found += 6 * max(size, 8 * (len(self.dtypes()) > 1)) * count_of(job.output, chunks)
        for labels, dtype in zip(job.inputs, dtypes, strict=True):
            if dtype != self.work:
                found += size * count_of(labels, chunks)
        return found


def multiplied(
    factors: Sequence[Tensor],
    new: Callable[[Tensor, Tensor], Tensor],
    into: Callable[[Tensor, Tensor], Any],
    is_own: bool = False,
) -> tuple[Tensor, bool]:
    """Multiply factors that broadcast; return the product and whether it is a tensor of our own.

    Whether the first one is says the caller.
    """
    product = factors[0]
    for factor in factors[1:]:
        shape = product.shape
        if is_own and (shape == factor.shape or _covers(shape, factor.shape)):
            into(product, factor)
        else:
            product, is_own = new(product, factor), True
    return product, is_own


def _covers(shape: torch.Size, other: torch.Size) -> bool:
    """Whether what has the other shape broadcasts to the first."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return len(other) <= len(shape) and all(size in (1, most) for most, size in pairs)


@dataclass(frozen=True, eq=False)
class Folding(Kernel):
    """Sums in a semiring of the user's own."""

    semiring: Semiring

    copies = 3

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Add the sum of the block's products."""
        product = factors[0]
        for factor in factors[1:]:
            product = self.semiring.multiply(product, factor)
        found = self.semiring.sum_block(product, len(job.reduced))
        return found if state is None else self.semiring.add(state, found)

    def of_nothing(self) -> tuple[Any, ...]:
        """Return its zero."""
        return (self.semiring.zero,)


@dataclass(frozen=True, eq=False)
class Counting(Kernel):
    """Numbers of ways: sums of products of integers; of booleans, where there is one."""

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Add the block's products."""
        if self.work is torch.bool:
            product, _ = multiplied(factors, torch.logical_and, Tensor.logical_and_)
            found = product.any(job.last) if job.last else product
            return found if state is None else state.logical_or_(found)
        product, _ = multiplied(factors, torch.mul, Tensor.mul_)
        found = product.sum(job.last, dtype=self.work) if job.last else product
        return found if state is None else state.add_(found)

    def start(self, block: Tensor) -> Tensor:
        """Take anything but 0 for true, where the work is on booleans."""
        return block.ne(0) if self.work is torch.bool else of_dtype(block, self.work)


@dataclass(frozen=True, eq=False)
class LogSum(Kernel):
    """Logarithms of sums of exponentials, about a maximum that runs along.

    The state is the maximum so far, and the sum of the exponentials below it: each term is at most
    1, and that of the maximum is 1 (Milakov and Gimelshein 2018, "Online normalizer calculation for
    softmax").
    """

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Add the block's terms, about the larger maximum."""
        terms, is_own = multiplied(factors, torch.add, Tensor.add_)
        dims = job.last
        info = torch.finfo(self.work)
        # Of infinities the differences would be NaN; of finite numbers they are what they should.
        top = (terms.amax(dims) if dims else terms).clamp(info.min, info.max)
        if state is not None:
            top = torch.maximum(top, state[0])
        shift = top
        for _ in dims:
            shift = shift.unsqueeze(-1)
        scaled = exp_(terms.sub_(shift) if is_own else terms - shift)
        found = scaled.sum(dims) if dims else scaled
        if state is not None:
            found.add_(state[1].mul_(exp_(state[0].sub_(top))))
        return top, found

    def finish(self, state: Any) -> tuple[Tensor, ...]:
        """Return the logarithm of the sum."""
        top, found = state
        return (found.log_().add_(top),)

    def of_nothing(self) -> tuple[Any, ...]:
        """Return the logarithm of 0."""
        return (-math.inf,)


@dataclass(frozen=True, eq=False)
class SumOfProducts(Kernel):
    """Sums of products of numbers, and of exponentials of what is added and taken away.

    `roles` says of each factor whether it is a "real" one, or one added ("log") or subtracted
    ("minus") in the exponent. All derivatives of sums and of logarithms of sums are of this kind,
    and so are its own.
    """

    roles: tuple[str, ...]

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Add the block's products."""
        reals = [f for f, role in zip(factors, self.roles, strict=True) if role == "real"]
        product = self._exponential(factors)
        if product is not None:
            reals.insert(0, product)
        found, _ = multiplied(reals, torch.mul, Tensor.mul_, product is not None)
        if job.last:
            found = found.sum(job.last)
        if state is None:
            return found
        return state.add_(found)

    def _exponential(self, factors: list[Tensor]) -> Tensor | None:
        pairs = [(f, role) for f, role in zip(factors, self.roles, strict=True) if role != "real"]
        if not pairs:
            return None
        pairs.sort(key=lambda pair: pair[1] == "minus")  # those that are added come first
        exponent, is_own = pairs[0][0], False
        for factor, role in pairs[1:]:
            sign = -1 if role == "minus" else 1
            if is_own and _covers(exponent.shape, factor.shape):
                exponent.add_(factor, alpha=sign)
            else:
                exponent, is_own = torch.add(exponent, factor, alpha=sign), True
        return exp_(exponent if is_own else exponent.clone())

    @property
    def copies(self) -> int:  # type: ignore[override]
        """With exponentials a product of the others is a second tensor."""
        return 1 if all(role == "real" for role in self.roles) else 2


@dataclass(frozen=True, eq=False)
class Best(Kernel):
    """The greatest (or the least) of sums, and where it is if that is asked for.

    The second result is the place in all summed dimensions, counted as of one, the first of equals.
    """

    is_greatest: bool
    with_pointers: bool

    @property
    def copies(self) -> int:  # type: ignore[override]
        """The sums, in one piece."""
        return 2 if self.with_pointers else 1

    def absorb(self, state: Any, factors: list[Tensor], job: Job, tile: Tile) -> Any:
        """Keep what is better than all before."""
        terms, _ = multiplied(factors, torch.add, Tensor.add_)
        count = len(job.reduced)
        if not self.with_pointers:
            reduce = torch.amax if self.is_greatest else torch.amin
            better = torch.maximum if self.is_greatest else torch.minimum
            found = reduce(terms, job.last) if count else terms
            return found if state is None else better(state, found)
        if not count:
            return terms, torch.zeros_like(terms, dtype=torch.int64)
        lengths = terms.shape[-count:]
        values, at = best_of(terms.flatten(-count), self.is_greatest)
        if tile:
            at = _in_whole(at, list(lengths), job, tile)
        return (values, at) if state is None else self._better(state, (values, at))

    def _better(self, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Any:
        is_more = new[0] > old[0] if self.is_greatest else new[0] < old[0]
        is_more |= (new[0] == old[0]) & (new[1] < old[1])
        if self.work.is_floating_point:
            is_more |= new[0].isnan() & ~old[0].isnan()
        return torch.where(is_more, new[0], old[0]), torch.where(is_more, new[1], old[1])

    def finish(self, state: Any) -> tuple[Tensor, ...]:
        """Return the best, and where it is."""
        return state if self.with_pointers else (state,)

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the results."""
        return (self.dtype, torch.int64) if self.with_pointers else (self.dtype,)

    def of_nothing(self) -> tuple[Any, ...]:
        """Return what any number is better than."""
        zero = Named("", -math.inf if self.is_greatest else math.inf, "", lambda _: True)
        return (zero.zero_of(self.dtype), 0)[: len(self.dtypes())]


def _in_whole(at: Tensor, lengths: list[int], job: Job, tile: Tile) -> Tensor:
    """Turn places in a block into places in all summed dimensions, counted as of one."""
    found = torch.zeros_like(at)
    inner = outer = 1
    for label, length in zip(reversed(job.reduced), reversed(lengths), strict=True):
        start = tile.get(label, (0, 0))[0]
        found += ((at // inner) % length + start) * outer
        inner *= length
        outer *= job.sizes[label]
    return found
