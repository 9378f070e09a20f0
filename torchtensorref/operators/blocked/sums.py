"""What puts the tiles together of an operator that goes along the very axis that is cut.

The tiles of a result come one after the other, each in pieces along that axis. What is known of
those so far (a sum, the largest and where it is) stays on the accelerator, and is made there by
torch's own operators. In half precision all of it is computed in single precision, and rounded
once at the end. `along.py` says which operator is put together by which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ..plan import OpPlan, plan_of
from .cut import Inner, Tile

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

#: Runs an operator on tensors of ours where the tiles run.
RunOp = Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], Any]


class Sums:
    """The tile of a result that is at work, and what is known of it.

    Parameters
    ----------
    run : callable
        Runs an operator where the tiles run.
    inner : Inner
        The axis that is gone along.
    extent : int
        Its length.
    op : OpOverload
        The operator that is put together.
    arguments : dict
        Its arguments, whole.
    dtypes : sequence of torch.dtype
        What its results are of.
    """

    def __init__(
        self,
        run: RunOp,
        inner: Inner,
        extent: int,
        op: Any,
        arguments: dict[str, Any],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._run = run
        self._inner = inner
        self.extent = extent
        self.op = op
        self.whole = arguments
        self.dtypes = dtypes
        #: What is known so far; None before the first piece.
        self.state: Any = None
        #: How much of the axis has been seen, in all passes together.
        self.done = 0

    def add(self, given: dict[str, Any], tile: Tile) -> Any:
        """Take the pieces of a tile; return what is then known of the results, else None."""
        start, end = tile[self._inner.axis]
        out = self.see(given, start, tile)
        self.done += end - start
        if self.done < self.extent * self._inner.passes:
            return out
        if out is None:
            out = self.finish()
        self.state, self.done = None, 0
        return out

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> Any:
        """Look at a piece; return its result, where it has one by itself."""
        raise NotImplementedError

    def finish(self) -> Any:
        """Return the result once all pieces were seen."""
        return self.cast(self.state, self.dtypes[0])

    @property
    def is_first_pass(self) -> bool:
        """Whether pieces are looked at for the first time."""
        return self.done < self.extent

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator where the tiles run."""
        return self._run(plan_of(op), args, kwargs)

    def cast(self, piece: Any, dtype: torch.dtype) -> Any:
        """Return it in another dtype; itself, if that is its own."""
        if piece.dtype is dtype:
            return piece
        return self.call(aten._to_copy.default, piece, dtype=dtype)

    def widened(self, piece: Any) -> Any:
        """Return what is of half precision in single precision."""
        return self.cast(piece, torch.float32) if piece.dtype in HALF else piece


class Products(Sums):
    """A product of matrices: partial products are added."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Add a partial product."""
        a, b = self.widened(given["self"]), self.widened(given["mat2"])
        if self.state is None:
            self.state = self.call(aten.mm.default, a, b)
        else:
            self.call(aten.addmm_.default, self.state, a, b)


#: By the operator's name, what joins its results of two pieces.
JOINS: dict[str, Any] = {
    "sum": aten.add.Tensor,
    "nansum": aten.add.Tensor,
    "mean": aten.add.Tensor,
    "prod": aten.mul.Tensor,
    "amax": aten.maximum.default,
    "max": aten.maximum.default,
    "amin": aten.minimum.default,
    "min": aten.minimum.default,
    "any": aten.logical_or.default,
    "all": aten.logical_and.default,
    "logsumexp": aten.logaddexp.default,
    "linalg_vector_norm": aten.add.Tensor,  # of order 0
}


def count_along(arguments: dict[str, Any]) -> int:
    """Return how many numbers a reduction makes one of."""
    x, dims = arguments["self"], arguments.get("dim")
    if dims is None or dims == []:
        return int(x.numel())
    return prod(x.size(d) for d in ([dims] if isinstance(dims, int) else dims))


class Joined(Sums):
    """A reduction: that of the whole is made of those of two parts, by one operator."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Reduce a piece, and join it."""
        name = self.op.overloadpacket.__name__
        names = [argument.name for argument in self.op._schema.arguments]
        given = {key: given[key] for key in names} | {"self": self.widened(given["self"])}
        if given.get("dtype") in HALF:
            given["dtype"] = torch.float32
        op = self.op
        if name == "mean":
            op = aten.sum.default if op is aten.mean.default else aten.sum.dim_IntList
        found = self.call(op, given.pop("self"), **given)
        if self.state is None:
            self.state = found
        elif given.get("ord"):  # a norm is that of the norms of its parts
            both = self.call(aten.stack.default, [self.state, found])
            self.state = self.call(op, both, given["ord"], [0])
        else:
            self.state = self.call(JOINS[name], self.state, found)

    def finish(self) -> Any:
        """Divide where it is a mean; round."""
        found = self.state
        if self.op.overloadpacket is aten.mean:
            found = self.call(aten.div.Tensor, found, count_along(self.whole))
        return self.cast(found, self.dtypes[0])


class Spread(Sums):
    """A variance or deviation: mean and squares of two parts give those of both."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Add a piece's squares, and what its mean is off."""
        x, dims, keepdim = self.widened(given["self"]), given["dim"], given["keepdim"]
        var, mean = self.call(aten.var_mean.correction, x, dims, correction=0, keepdim=keepdim)
        count = count_along({"self": x, "dim": dims})
        squares = self.call(aten.mul.Tensor, var, count)
        if self.state is None:
            self.state = mean, squares, count
            return
        mine, mine_squares, mine_count = self.state
        total = mine_count + count
        off = self.call(aten.sub.Tensor, mean, mine)
        self.call(aten.add_.Tensor, mine, off, alpha=count / total)
        squares = self.call(aten.add.Tensor, mine_squares, squares)
        self.call(aten.addcmul_.default, squares, off, off, value=mine_count / total * count)
        self.state = mine, squares, total

    def finish(self) -> Any:
        """Divide; of a deviation, take the root."""
        _, squares, count = self.state
        correction = self.whole["correction"]
        free = max(count - (1 if correction is None else correction), 0)
        found = self.call(aten.div.Tensor, squares, free)
        if self.op.overloadpacket is aten.std:
            found = self.call(aten.sqrt.default, found)
        return self.cast(found, self.dtypes[0])


class Best(Sums):
    """The largest or least of each row, and where it is: of equal ones the first.

    The axis is gone along in order, so that bits are kept: what is found first stays.
    """

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Keep what is better in a piece than all before; nothing is better than NaN."""
        is_largest = self.op.overloadpacket in (aten.max, aten.argmax)
        best = aten.max.dim if is_largest else aten.min.dim
        values, where = self.call(best, given["self"], given["dim"], given["keepdim"])
        where = self.call(aten.add.Tensor, where, start)
        if self.state is not None:
            before, where_before = self.state
            beats = aten.gt.Tensor if is_largest else aten.lt.Tensor
            is_better = self.call(beats, values, before)
            if values.dtype.is_floating_point:
                is_new = self.call(aten.isnan.default, values)
                was = self.call(aten.isnan.default, before)
                is_new = self.call(aten.gt.Tensor, is_new, was)
                is_better = self.call(aten.logical_or.default, is_better, is_new)
            values = self.call(aten.where.self, is_better, values, before)
            where = self.call(aten.where.self, is_better, where, where_before)
        self.state = values, where

    def finish(self) -> Any:
        """Return both; of `argmax` where it is."""
        return self.state if len(self.dtypes) > 1 else self.state[1]


class Top(Sums):
    """The largest of each row: those of what was found so far and of the next piece."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Choose among what was found before and what a piece has."""
        x, k, dim = given["self"], given["k"], given["dim"]
        how = given["largest"], given["sorted"]
        values, where = self.call(aten.topk.default, x, min(k, x.size(dim)), dim, *how)
        where = self.call(aten.add.Tensor, where, start)
        if self.state is not None:
            values = self.call(aten.cat.default, [self.state[0], values], dim)
            where = self.call(aten.cat.default, [self.state[1], where], dim)
            k = min(k, values.size(dim))
            values, chosen = self.call(aten.topk.default, values, k, dim, *how)
            where = self.call(aten.gather.default, where, dim, chosen)
        self.state = values, where

    def finish(self) -> Any:
        """Return both."""
        return self.state


class Scan(Sums):
    """A sum, product, ... of all before: each piece is begun with what the last one ended with."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> Any:
        """Scan a piece, and go on from what was before."""
        x, dim = given["self"], given["dim"]
        name = self.op.overloadpacket.__name__
        wide = torch.float32 if self.dtypes[0] in HALF else self.dtypes[0]
        found = self.call(self.op, self.cast(x, wide), dim)
        if self.state is not None:
            join = {"cumsum": aten.add.Tensor, "cumprod": aten.mul.Tensor}
            found = self.call(join.get(name, aten.logaddexp.default), self.state, found)
        end = found.size(dim)
        self.state = self.call(aten.slice_copy.Tensor, found, dim, end - 1, end)
        return self.cast(found, self.dtypes[0])

    def finish(self) -> None:
        """All results are there."""
