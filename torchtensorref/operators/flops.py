"""Floating point operations of composite operators that torch's own `flop_counter` does not know.

And of the few that run most often, for which flattening their arguments would cost more than they
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch


def contract(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    """Each element of the result is a sum over the last dimension of the first operand."""
    return 2 * out.numel() * (args[0].shape[-1] if args[0].dim() else 1)


def add_contraction(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    """The same over the last dimension of the second."""
    return 2 * out.numel() * args[1].shape[-1]


def convolve(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    """Each element of the result is a sum over one filter."""
    return 2 * out.numel() * prod(args[1].shape[1:])


def attend(args: Sequence[torch.Tensor], out: torch.Tensor) -> int:
    """Two products, of queries with keys and of weights with values."""
    query, key = args[0], args[1]
    return 4 * query.numel() * key.shape[-2]


def recur(args: Sequence[torch.Tensor], out: object) -> int:
    """Each row of each step goes through both matrices of a recurrent layer."""
    steps, of_input, of_hidden = args[:3]
    rows = steps.numel() // max(steps.shape[-1], 1)
    return 2 * rows * (of_input.numel() + of_hidden.numel())


def recur_backward(args: Sequence[torch.Tensor], out: object) -> int:
    """As many for the gradients of the rows, and for those of the matrices."""
    return 2 * recur(args, out)
