"""Semirings: what is meant by "add" and "multiply" in a sum of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigError, did_you_mean, nearest

Block = Callable[[Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Semiring:
    """An addition and a multiplication of one's own for `einsum`, made of torch's operators.

    Multiplication has to distribute over addition, and addition may be done in any order: sums are
    taken block by block, and several operands are multiplied two at a time.

    Parameters
    ----------
    add, multiply : callable
        Each takes two tensors, which broadcast, and returns a new one.
    zero, one : number
        What adding, or multiplying by, changes nothing; `zero` is the sum of nothing.
    sum : callable, optional
        Takes a tensor and a tuple of its last dimensions, and returns the sum over these. Without
        it halves are added until one is left.
    name : str, optional
        What errors call it.
    commutative : bool, optional
        Whether `multiply(a, b)` is `multiply(b, a)`. If not, operands are multiplied from left to
        right.

    Notes
    -----
    Where `add`, `multiply` and `sum` have gradients, the result has, once: the blocks are computed
    again.

    Examples
    --------
    >>> import torch, torchTensorRef
    >>> widest = torchTensorRef.Semiring(
    ...     torch.maximum, torch.minimum, zero=-torch.inf, one=torch.inf, sum=torch.amax
    ... )  # the widest of all paths is as wide as its narrowest part
    >>> roads = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
    >>> torchTensorRef.einsum("ij,jk->ik", roads, roads, semiring=widest).tolist()
    [[4.0, 1.0], [2.0, 3.0]]
    """

    add: Callable[[Tensor, Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]
    zero: Any
    one: Any
    sum: Block | None = None
    name: str = "one's own"
    commutative: bool = True

    def sum_block(self, block: Tensor, count: int) -> Tensor:
        """Return the sum over the last `count` dimensions of a block that has elements."""
        if count == 0:
            return block
        if self.sum is not None:
            return self.sum(block, tuple(range(block.dim() - count, block.dim())))
        block = block.flatten(block.dim() - count)
        while block.shape[-1] > 1:
            half = block.shape[-1] // 2
            rest = block[..., 2 * half :]
            block = self.add(block[..., :half], block[..., half : 2 * half])
            block = torch.cat([block, rest], -1) if rest.shape[-1] else block
        return block.squeeze(-1)


@dataclass(frozen=True)
class Named:
    """A semiring that we know, and have kernels for (`kernels.py`)."""

    name: str
    #: The sum of nothing, for tensors of floating point.
    zero: Any
    #: What of dtypes it is about, in words, and the test of one.
    domain: str
    takes: Callable[[torch.dtype], bool]
    #: The dtype of its results, if not that of the operands.
    dtype: torch.dtype | None = None
    commutative: bool = True

    def zero_of(self, dtype: torch.dtype) -> Any:
        """Return the sum of nothing in a dtype; integers have no infinity."""
        if isinstance(self.zero, float) and not dtype.is_floating_point and not dtype.is_complex:
            info = torch.iinfo(dtype)
            return info.min if self.zero < 0 else info.max if self.zero > 0 else 0
        return self.zero


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_ordered(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and dtype is not torch.bool


_INF = float("inf")

#: The semirings that have names.
SEMIRINGS = {
    one.name: one
    for one in (
        Named("real", 0, "numbers", lambda dtype: dtype is not torch.bool),
        Named("log", -_INF, "floating point", _is_real),
        Named("max-plus", -_INF, "numbers that have an order", _is_ordered),
        Named("min-plus", _INF, "numbers that have an order", _is_ordered),
        Named("boolean", False, "anything, where only 0 is false", lambda _: True, torch.bool),
        Named("counting", 0, "integers and booleans", _is_whole, torch.int64),
    )
}


def semiring_of(given: Any) -> Semiring | Named:
    """Return a semiring by its name, or the user's own.

    Raises
    ------
    ConfigError
        None has that name; the nearest is named.
    """
    if isinstance(given, (Semiring, Named)):
        return given
    found = SEMIRINGS.get(given) if isinstance(given, str) else None
    if found is None:
        name = given if isinstance(given, str) else type(given).__name__
        raise ConfigError(
            f"There is no semiring {given!r}. {did_you_mean(name, SEMIRINGS)} Or give a "
            "torchTensorRef.Semiring of your own.",
            name=name,
            known=tuple(SEMIRINGS),
            nearest=nearest(name, SEMIRINGS),
        )
    return found


def refuse_dtypes(semiring: Semiring | Named, operands: tuple[Tensor, ...]) -> None:
    """Raise a TypeError for operands that a semiring is not about, or that are not alike."""
    if isinstance(semiring, Named):
        for place, operand in enumerate(operands):
            if not semiring.takes(operand.dtype):
                raise TypeError(
                    f"Operand {place} is of {operand.dtype}, and the semiring {semiring.name!r} is "
                    f"about {semiring.domain}. Convert it first."
                )
        if semiring.dtype is not None:
            return
    dtypes = sorted({str(operand.dtype) for operand in operands})
    if len(dtypes) > 1:
        raise TypeError(f"Operands are of {' and '.join(dtypes)}. Convert them to one of them.")
