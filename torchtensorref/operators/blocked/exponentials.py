"""Softmax and attention where one row alone does not fit: by a maximum and a sum that follow it.

Exponentials are taken of what is left when the largest number so far is taken off; where a larger
one comes, what was added before is scaled down.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from .cut import Tile
from .sums import Sums

aten = torch.ops.aten


class Softmax(Sums):
    """Softmax and its logarithm: maximum and sum of all pieces, then each piece again."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> Any:
        """Add the exponentials of a piece; in the second pass, divide them by the sum."""
        x, dim = self.widened(given["self"]), given["dim"]
        if self.is_first_pass:
            most = self.call(aten.amax.default, x, [dim], True)
            most = self.call(aten.clamp_min.default, most, torch.finfo(x.dtype).min)
            if self.state is not None:
                most = self.call(aten.maximum.default, most, self.state[0])
            total = self.call(aten.sum.dim_IntList, self._exp(x, most), [dim], True)
            if self.state is not None:
                share = self._exp(self.state[0], most)
                self.call(aten.addcmul_.default, total, self.state[1], share)
            self.state = most, total
            return None
        most, total = self.state
        if self.op is aten._softmax.default:
            found = self.call(aten.div_.Tensor, self._exp(x, most), total)
        else:
            found = self.call(aten.sub.Tensor, x, most)
            self.call(aten.sub_.Tensor, found, self.call(aten.log.default, total))
        return self.cast(found, self.dtypes[0])

    def _exp(self, x: Any, most: Any) -> Any:
        return self.call(aten.exp_.default, self.call(aten.sub.Tensor, x, most))

    def finish(self) -> None:
        """All results are there."""


class SoftmaxBackward(Sums):
    """Their gradients: what each row sums up to, then each piece again."""

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> Any:
        """Sum a piece up; in the second pass, take the sum from it."""
        grad, out = self.widened(given["grad_output"]), self.widened(given["output"])
        is_log = self.op is aten._log_softmax_backward_data.default
        if self.is_first_pass:
            terms = grad if is_log else self.call(aten.mul.Tensor, grad, out)
            total = self.call(aten.sum.dim_IntList, terms, [given["dim"]], True)
            if self.state is not None:
                self.call(aten.add_.Tensor, total, self.state)
            self.state = total
            return None
        if is_log:
            scaled = self.call(aten.mul_.Tensor, self.call(aten.exp.default, out), self.state)
            found = self.call(aten.sub.Tensor, grad, scaled)
        else:
            found = self.call(aten.sub.Tensor, grad, self.state)
            self.call(aten.mul_.Tensor, found, out)
        return self.cast(found, self.dtypes[0])

    def finish(self) -> None:
        """All results are there."""


class Attention(Sums):
    """Attention over pieces of the keys: what their values add up to by their weights."""

    #: The axis of the queries.
    _queries = 1

    def see(self, given: dict[str, Any], start: int, tile: Tile) -> None:
        """Add what the queries see of some keys."""
        first, last = tile[self._queries][0], tile[self._queries][1] - 1
        if given["is_causal"] and start > last:
            return  # no query of the tile sees these
        scores = self._scores(given)
        if given["is_causal"]:
            hidden = self.call(aten.full_like.default, scores, -inf)
            self.call(aten.triu_.default, hidden, first - start + 1)
            self.call(aten.add_.Tensor, scores, hidden)
        largest = self.call(aten.amax.default, scores, [-1], True)
        shares = self.call(aten._softmax.default, scores, -1, False)
        # The largest weight is 1 before all are divided by their sum.
        total = self.call(aten.reciprocal.default, self.call(aten.amax.default, shares, [-1], True))
        found = self.call(aten.matmul.default, shares, self._of_heads(given, "value"))
        sees_none = self.call(aten.eq.Scalar, largest, -inf)
        self.call(aten.masked_fill_.Scalar, total, sees_none, 0)
        self.call(aten.masked_fill_.Scalar, found, sees_none, 0)
        self.call(aten.mul_.Tensor, found, total)
        most = self.call(aten.clamp_min.default, largest, torch.finfo(largest.dtype).min)
        self.state = self._joined(self.state, (most, total, found))

    def _joined(self, before: Any, piece: Any) -> Any:
        """Add two parts' weights, and values times weights, by the larger maximum of both."""
        if before is None:
            return piece
        most = self.call(aten.maximum.default, before[0], piece[0])
        sums = []
        for part in (before, piece):
            share = self.call(aten.exp_.default, self.call(aten.sub.Tensor, part[0], most))
            sums.append([self.call(aten.mul_.Tensor, one, share) for one in part[1:]])
        pairs = zip(*sums, strict=True)
        return most, *(self.call(aten.add_.Tensor, one, other) for one, other in pairs)

    def _of_heads(self, given: dict[str, Any], name: str) -> Any:
        """Return keys or values of each head of the queries, which may share them."""
        piece, heads = self.widened(given[name]), given["query"].size(1)
        if piece.size(1) == heads:
            return piece
        return self.call(aten.repeat_interleave.self_int, piece, heads // piece.size(1), 1)

    def _scores(self, given: dict[str, Any]) -> Any:
        query, mask, scale = self.widened(given["query"]), given["attn_mask"], given["scale"]
        scale = query.size(-1) ** -0.5 if scale is None else scale
        query = self.call(aten.mul.Tensor, query, scale)
        keys = self.call(aten.transpose.int, self._of_heads(given, "key"), -2, -1)
        scores = self.call(aten.matmul.default, query, keys)
        if mask is not None:
            self.call(aten.add_.Tensor, scores, mask)
        return scores

    def finish(self) -> Any:
        """Divide by the sum of the weights; who sees nothing gets 0, as from torch's kernel."""
        most, total, found = self.state
        sees_none = self.call(aten.eq.Scalar, total, 0)
        self.call(aten.masked_fill_.Scalar, total, sees_none, 1)
        self.call(aten.masked_fill_.Scalar, most, sees_none, 0)
        self.call(aten.div_.Tensor, found, total)
        weights = self.call(aten.add_.Tensor, self.call(aten.log_.default, total), most)
        return self.cast(found, self.dtypes[0]), self.call(aten.squeeze_copy.dim, weights, -1)
