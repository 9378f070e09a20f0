"""Cuts of what takes from, or gives to, places that are told: along all other dimensions."""

from __future__ import annotations

import torch

from .cut import Along, Axis, Call, Cut


def embedding(call: Call) -> Cut | None:
    """The places that are asked for; then the columns."""
    weight, indices = call["weight"], call["indices"]
    rank = indices.dim()
    return Cut(
        axes=(*map(Axis, indices.size()), Axis(weight.size(1))),
        operands={("weight", None): (None, rank), ("indices", None): tuple(range(rank))},
        results=(tuple(range(rank + 1)),),
    )


def embedding_dense_backward(call: Call) -> Cut | None:
    """The columns: each row is the sum of the same numbers in the same order."""
    grad = call["grad_output"]
    rank = grad.dim()
    along: Along = (*(None,) * (rank - 1), 0)
    return Cut(
        axes=(Axis(grad.size(-1)),), operands={("grad_output", None): along}, results=((None, 0),)
    )


def index_select(call: Call) -> Cut | None:
    """What is asked for, and all other dimensions."""
    x, index = call["self"], call["index"]
    if not x.dim() or index.dim() != 1:
        return None
    dim = call["dim"] % x.dim()
    sizes = list(x.size())
    sizes[dim] = index.size(0)
    axes = tuple(map(Axis, sizes))
    return Cut(
        axes=axes,
        operands={
            ("self", None): tuple(None if d == dim else d for d in range(x.dim())),
            ("index", None): (dim,),
        },
        results=(tuple(range(x.dim())),),
    )


def gather(call: Call) -> Cut | None:
    """All dimensions of the index; the operand is whole along the one it is indexed in."""
    x, index = call["self"], call["index"]
    if not x.dim() or index.dim() != x.dim():
        return None
    dim = call["dim"] % x.dim()
    every = tuple(range(x.dim()))
    return Cut(
        axes=tuple(map(Axis, index.size())),
        operands={
            ("self", None): tuple(None if d == dim else d for d in every),
            ("index", None): every,
        },
        results=(every,),
    )


def nll_loss_forward(call: Call) -> Cut | None:
    """Row by row, where no mean or sum of them is asked for; else of each row what is read of it.

    The kernel adds one number per row, whichever columns they are in: so it gets them in the first
    of two columns, and adds the same numbers in the same order.
    """
    x, target = call["self"], call["target"]
    if x.dim() != 2:
        return None
    if call["reduction"] == 0:
        return Cut(
            axes=(Axis(x.size(0)),),
            operands={("self", None): (0, None), ("target", None): (0,)},
            results=((0,), ()),
        )
    if call["weight"] is not None:
        return None
    ignored = call["ignore_index"]

    def gather(homes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        logits, column = homes["self"], homes["target"]
        is_read = column != ignored
        column = column.where(is_read, 0)
        if not column.is_meta and bool(((column < 0) | (column >= logits.size(1))).any()):
            return None
        picked = logits.gather(1, column.unsqueeze(1)).expand(-1, 2).contiguous()
        return {"self": picked, "target": is_read.logical_not().mul(ignored).add(is_read * slot)}

    slot = 1 if ignored == 0 else 0
    return Cut(
        axes=(),
        operands={("self", None): (None, None), ("target", None): (None,)},
        results=((), ()),
        gather=gather,
        gathered_nbytes=x.size(0) * (2 * x.element_size() + target.element_size()),
    )


def nll_loss_backward(call: Call) -> Cut | None:
    """Row by row."""
    x, grad = call["self"], call["grad_output"]
    if x.dim() != 2:
        return None
    operands: dict[tuple[str, int | None], Along] = {
        ("self", None): (0, None),
        ("target", None): (0,),
    }
    if grad.dim() == 1:
        operands["grad_output", None] = (0,)
    return Cut(axes=(Axis(x.size(0)),), operands=operands, results=((0, None),))
