"""A product whose sums are cut: partial products are added up on the accelerator.

In half precision they are added in single precision, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..operators.blocked.cut import Tile
from ..operators.plan import OpPlan, plan_of

aten = torch.ops.aten

#: Runs an operator on tensors of ours where the tiles run.
RunOp = Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], Any]


class PartialSums:
    """The sums of the tile of a result that is at work."""

    def __init__(self, run: RunOp, inner: int, extent: int) -> None:
        self._run = run
        self._inner = inner
        self._extent = extent
        self._sum: Any = None
        self._done = 0

    def add(self, a: Any, b: Any, tile: Tile) -> Any:
        """Add the product of two pieces; return the result once all are added, else None."""
        dtype = a.dtype
        a, b = self._widened(a), self._widened(b)
        if self._sum is None:
            self._sum = self._run(plan_of(aten.mm.default), (a, b), {})
        else:
            self._run(plan_of(aten.addmm_.default), (self._sum, a, b), {})
        start, end = tile[self._inner]
        self._done += end - start
        if self._done < self._extent:
            return None
        found, self._sum, self._done = self._sum, None, 0
        return found if found.dtype is dtype else self._cast(found, dtype)

    def _widened(self, piece: Any) -> Any:
        is_half = piece.dtype in (torch.float16, torch.bfloat16)
        return self._cast(piece, torch.float32) if is_half else piece

    def _cast(self, piece: Any, dtype: torch.dtype) -> Any:
        return self._run(plan_of(aten._to_copy.default), (piece,), {"dtype": dtype})
