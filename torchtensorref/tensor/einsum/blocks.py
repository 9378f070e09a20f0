"""Blocks: which part of each dimension is computed at once, so that memory is bounded."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...base.units import format_nbytes
from ...memory.ref import TensorRef
from .equation import Label, Labels

#: How much of each dimension: all labels have one.
Chunks = dict[Label, int]
#: Where a block begins and how long it is, by label; dimensions that are whole are missing.
Tile = dict[Label, tuple[int, int]]

#: Elements of the products of one block. A processor has them in its cache; an accelerator is busy
#: for much longer than a kernel takes to start.
FAST_ON_HOST, FAST_ON_ACCELERATOR = 1 << 19, 1 << 24

#: Cut no dimension smaller than this as long as another one can be cut.
LEAST_LENGTH = 16


@dataclass(frozen=True)
class Room:
    """How large blocks may be.

    Parameters
    ----------
    lengths : mapping
        The most elements at once, of some labels.
    default : int, optional
        The most elements at once of summed dimensions that are not in `lengths`.
    spare_nbytes : int, optional
        What may be taken beside operands, results and gradients.
    whole_nbytes : int
        What these take: for errors.
    is_strict : bool
        A number of bytes was asked for, so more is an error.
    fast_elements : int
        How many products are computed at once where memory is no question.
    """

    lengths: Mapping[Label, int] = field(default_factory=dict)
    default: int | None = None
    spare_nbytes: int | None = None
    whole_nbytes: int = 0
    is_strict: bool = False
    fast_elements: int = FAST_ON_HOST

    def choose(
        self,
        output: Labels,
        reduced: Labels,
        sizes: Mapping[Label, int],
        nbytes_of: Callable[[Chunks], int],
        has_terms: bool = True,
    ) -> Chunks:
        """Return the part of each dimension that one block has.

        Notes
        -----
        Dimensions of the result are cut first: what is cut there is added in no other order. Of
        these the longest is halved until the block fits, then of the summed ones. What has no terms
        in memory is as large as there is room for.

        Raises
        ------
        ConfigError
            A number of bytes was asked for, and the smallest block takes more.
        """
        chunks = {label: max(1, sizes[label]) for label in (*output, *reduced)}
        for label in chunks:
            most = self.lengths.get(label, self.default if label in reduced else None)
            if most is not None:
                chunks[label] = min(chunks[label], most)
        # With lengths the user knows what is fast.
        is_bounded = has_terms and not self.lengths and self.default is None

        def fits() -> bool:
            if is_bounded and math.prod(chunks.values()) > self.fast_elements:
                return False
            return self.spare_nbytes is None or nbytes_of(chunks) <= self.spare_nbytes

        if fits():
            return chunks
        for least in (LEAST_LENGTH, 1):
            for labels in (output, reduced):
                while not fits():
                    longest = max(labels, key=lambda label: chunks[label], default=None)
                    if longest is None or chunks[longest] <= least:
                        break
                    chunks[longest] = max(least, (chunks[longest] + 1) // 2)
        if self.is_strict and not fits():
            self._refuse(nbytes_of(chunks))
        return chunks

    def _refuse(self, need_nbytes: int) -> None:
        least_nbytes = self.whole_nbytes + need_nbytes
        raise ConfigError(
            f"A budget of {format_nbytes(self.whole_nbytes + (self.spare_nbytes or 0))} is too "
            f"little for this einsum: its operands, result and gradients take "
            f"{format_nbytes(self.whole_nbytes)}, and its smallest block {need_nbytes:,} bytes. "
            f"Give budget={least_nbytes} or more.",
            name="budget",
        )


def tiles(labels: Labels, sizes: Mapping[Label, int], chunks: Chunks) -> Iterator[Tile]:
    """Yield the blocks of some dimensions, the last one fastest."""
    cut = [label for label in labels if chunks[label] < sizes[label]]
    ranges = [
        [
            (at, min(chunks[label], sizes[label] - at))
            for at in range(0, sizes[label], chunks[label])
        ]
        for label in cut
    ]
    for parts in itertools.product(*ranges):
        yield dict(zip(cut, parts, strict=True))


def part_of(x: Tensor, labels: Labels, *blocks: Tile) -> Tensor:
    """Return the view of a tensor that lies in some blocks."""
    for block in blocks:
        for label, (start, length) in block.items():
            if label in labels:
                x = x.narrow(labels.index(label), start, length)
    return x


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype: the same one where it is of that, as nearly all are."""
    return x if x.dtype == dtype else x.to(dtype)


def count_of(labels: Labels, chunks: Mapping[Label, int]) -> int:
    """Return how many elements a tensor of these dimensions has."""
    return math.prod(chunks[label] for label in labels)


def held_nbytes(tensors: tuple[Tensor, ...]) -> int:
    """Return the bytes of some tensors, those of a storage that several share once."""
    found: dict[object, int] = {}
    for tensor in tensors:
        if isinstance(tensor, TensorRef):
            found[tensor._ttr_block.block_id] = tensor._ttr_block.nbytes
        else:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(found.values())


def aligned(x: Tensor, labels: Labels, order: Labels) -> Tensor:
    """Return a view with the dimensions in an order, so that it broadcasts with all of them."""
    permutation, missing = _alignment(labels, order)
    if permutation is not None:
        x = x.permute(permutation)
    for place in missing:
        x = x.unsqueeze(place)
    return x


@functools.lru_cache(maxsize=4096)
def _alignment(labels: Labels, order: Labels) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return a permutation, if it needs one, and where dimensions are to be put in one by one."""
    there = tuple(labels.index(label) for label in order if label in labels)
    first = next((at for at, label in enumerate(order) if label in labels), len(order))
    rest = order[first:]  # dimensions in front broadcast by themselves
    missing = tuple(at for at, label in enumerate(rest) if label not in labels)
    return (there if there != tuple(sorted(there)) else None), missing
