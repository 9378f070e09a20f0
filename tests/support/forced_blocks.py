"""Every operator that has a rule forced into blocks of random sizes, whether it fits or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from torchTensorRef.base.options import options
from torchTensorRef.interception.blocks import Blocks
from torchTensorRef.operators.blocked import along, table
from torchTensorRef.operators.blocked.cut import Axis, Cut

from . import differential

#: How far sums in another order may be off, as a share of the largest element.
BOUNDS = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 2e-5,
    torch.float64: 1e-12,
    torch.complex64: 2e-5,
}


@contextmanager
def forced_blocks(seed: int, *, keep_bits: bool) -> Iterator[dict[str, int]]:
    """Run what can be cut in blocks of random sizes, and count by operator.

    Parameters
    ----------
    keep_bits : bool
        Cut only where and as the rule says that every bit is kept; else anywhere on an axis.
    """
    generator = random.Random(seed)
    counts: dict[str, int] = {}
    cut_of = table.cut_of

    def tiling_of(cut: Cut, chosen: Any) -> Any:
        lengths = [
            axis.step * generator.randint(1, axis.most_tiles) if axis.extent else 0
            for axis in cut.axes
        ]
        inner = None if cut.inner is None else cut.inner.axis
        order = [axis for axis in range(len(lengths)) if axis != inner]
        generator.shuffle(order)
        order += [] if inner is None else [inner]  # sums are finished one by one
        return replace(chosen, lengths=tuple(lengths), order=tuple(order))

    def anywhere(rule: Any, call: Any) -> Cut | None:
        # Of two rules, that for what the first one does not find to fit has its turns, too.
        if call.op in along.RULES and rule is table.rule_of(call.op) and generator.random() < 0.5:
            return None
        cut = cut_of(lambda call: _with_steps_of_one(rule(call)), call)
        if cut is not None and cut.can_be_cut:
            counts[str(call.op)] = counts.get(str(call.op), 0) + 1
        return cut

    def as_it_says(rule: Any, call: Any) -> Cut | None:
        cut = cut_of(rule, call)
        if cut is not None and cut.keeping_bits().can_be_cut:
            counts[str(call.op)] = counts.get(str(call.op), 0) + 1
        return cut

    import torchTensorRef.interception.blocks as blocks

    before = differential.same_values
    Blocks.forced = staticmethod(tiling_of)
    blocks.cut_of = as_it_says if keep_bits else anywhere
    if not keep_bits:
        differential.same_values = close_values
    try:
        with options(blocks="exact" if keep_bits else "any"):
            yield counts
    finally:
        Blocks.forced = None
        blocks.cut_of = cut_of
        differential.same_values = before


def _with_steps_of_one(cut: Cut | None) -> Cut | None:
    return None if cut is None else replace(cut, axes=tuple(Axis(a.extent) for a in cut.axes))


def close_values(plain: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal within the bound of the dtype; equal to the bit where it has none."""
    bound = BOUNDS.get(plain.dtype)
    if bound is None or plain.layout is not torch.strided:
        return torch.equal(differential.bits(plain.to_dense()), differential.bits(other.to_dense()))
    a, b = plain.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=bound, atol=bound * max(scale, 1e-30), equal_nan=True)
