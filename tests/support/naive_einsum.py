"""Sums of products as one writes them down: every term, in float64, with torch's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def naive_einsum(text: str, *operands: Tensor, semiring: str = "real") -> Tensor:
    """Return what an equation with `->` says, by a tensor of all terms."""
    left, _, right = text.replace(" ", "").partition("->")
    inputs = left.split(",")
    dots = [
        operand.dim() - len(labels.replace("...", ""))
        for labels, operand in zip(inputs, operands, strict=True)
    ]
    most = max(
        (count for count, labels in zip(dots, inputs, strict=True) if "..." in labels), default=0
    )
    names = "0123456789"[:most]
    inputs = [
        labels.replace("...", names[len(names) - count :] if count else "")
        for labels, count in zip(inputs, dots, strict=True)
    ]
    output = right.replace("...", names)
    return naive_terms([list(labels) for labels in inputs], list(output), operands, semiring)


def naive_terms(
    inputs: list[list[Any]], output: list[Any], operands: tuple[Tensor, ...], semiring: str
) -> Tensor:
    """Return the sum over all labels that the result has not."""
    add, multiply, convert = _RINGS[semiring]
    sizes: dict[Any, int] = {}
    for labels, operand in zip(inputs, operands, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    order = [*output, *(label for label in sizes if label not in output)]
    terms = None
    for labels, operand in zip(inputs, operands, strict=True):
        index = tuple(
            _grid(order, label, sizes)
            if size == sizes[label]
            else torch.zeros((), dtype=torch.int64)
            for label, size in zip(labels, operand.shape, strict=True)
        )
        factor = convert(operand)
        factor = factor[index] if index else factor
        factor = factor.expand([sizes[label] for label in order])
        terms = factor if terms is None else multiply(terms, factor)
    assert terms is not None
    return add(terms.flatten(len(output)) if len(order) > len(output) else terms.unsqueeze(-1))


def _grid(order: list[Any], label: Any, sizes: dict[Any, int]) -> Tensor:
    shape = [sizes[label] if one == label else 1 for one in order]
    return torch.arange(sizes[label]).view(shape)


def _to_double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _amax(terms: Tensor) -> Tensor:
    return terms.amax(-1) if terms.shape[-1] else terms.sum(-1) - torch.inf


def _amin(terms: Tensor) -> Tensor:
    return terms.amin(-1) if terms.shape[-1] else terms.sum(-1) + torch.inf


_RINGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor], Callable[..., Tensor]]]
_RINGS = {
    "real": (lambda x: x.sum(-1), torch.mul, _to_double),
    "log": (lambda x: x.logsumexp(-1), torch.add, _to_double),
    "max-plus": (_amax, torch.add, _to_double),
    "min-plus": (_amin, torch.add, _to_double),
    "boolean": (lambda x: x.any(-1), torch.logical_and, lambda x: x != 0),
    "counting": (lambda x: x.sum(-1), torch.mul, lambda x: x.to(torch.int64)),
}

#: Equations of every kind, with the sizes of their operands.
FAMILIES: dict[str, tuple[tuple[int, ...], ...]] = {
    # one operand: as it is, transposed, sums, diagonals, traces
    "i->i": ((5,),),
    "i->": ((5,),),
    "ij->ji": ((4, 5),),
    "ij->j": ((4, 5),),
    "ij->": ((4, 5),),
    "ii->i": ((4, 4),),
    "ii->": ((4, 4),),
    "iji->j": ((4, 3, 4),),
    "iijj->ij": ((3, 3, 4, 4),),
    "iii->i": ((3, 3, 3),),
    "biid->bdi": ((2, 3, 3, 4),),
    "...ij->...ji": ((2, 3, 4, 5),),
    "i...->...": ((3, 2, 4),),
    "...->": ((2, 3),),
    # two vectors, matrices and batches
    "i,i->": ((6,), (6,)),
    "i,j->ij": ((3,), (4,)),
    "i,j->ji": ((3,), (4,)),
    "i,j->": ((3,), (4,)),
    "i,i->i": ((5,), (5,)),
    ",ij->ij": ((), (3, 4)),
    ",->": ((), ()),
    "ij,j->i": ((4, 5), (5,)),
    "ij,jk->ik": ((4, 5), (5, 6)),
    "ij,jk->ki": ((4, 5), (5, 6)),
    "ji,kj->ik": ((5, 4), (6, 5)),
    "ij,ij->ij": ((4, 5), (4, 5)),
    "ij,ji->": ((4, 5), (5, 4)),
    "ij,jk->k": ((4, 5), (5, 6)),
    "ij,kj->k": ((4, 5), (6, 5)),
    "bij,bjk->bik": ((3, 4, 5), (3, 5, 2)),
    "bij,bkj->kbi": ((3, 4, 5), (3, 2, 5)),
    "bij,jk->ibk": ((3, 4, 5), (5, 2)),
    "abc,bcd->ad": ((4, 3, 5), (3, 5, 6)),
    "abc,cbd->da": ((4, 3, 5), (5, 3, 6)),
    "bxi,bxj->bij": ((3, 4, 2), (3, 4, 5)),
    "pqrs,tuqvr->pstuv": ((2, 3, 4, 5), (2, 3, 3, 2, 4)),
    # diagonals beside others
    "ii,ij->j": ((4, 4), (4, 5)),
    "iij,jk->ik": ((3, 3, 4), (4, 5)),
    "ijj,jk->ki": ((3, 4, 4), (4, 5)),
    "ii,jj->ij": ((3, 3), (4, 4)),
    # what broadcasts
    "...ij,...jk->...ik": ((2, 1, 3, 4), (5, 4, 2)),
    "...ij,jk->...ik": ((2, 5, 3, 4), (4, 2)),
    "i...,i...->...": ((3, 2, 4), (3, 1, 4)),
    "...i,...i->i": ((2, 3, 4), (3, 4)),
    "ij,jk->ijk": ((1, 4), (4, 3)),
    "ij,ij->i": ((3, 1), (3, 5)),
    "...,...->...": ((2, 1), (3,)),
    # several operands
    "ij,jk,kl->il": ((2, 3), (3, 4), (4, 5)),
    "i,j,k->ikj": ((2,), (3,), (4,)),
    "i,ij,j->": ((3,), (3, 4), (4,)),
    "bn,anm,bm->ba": ((2, 4), (3, 4, 5), (2, 5)),
    "ijk,jl,kl,i->l": ((2, 3, 4), (3, 5), (4, 5), (2,)),
    "ab,bc,cd,de->ea": ((2, 3), (3, 2), (2, 4), (4, 3)),
    "ij,ij,ij->i": ((3, 4), (3, 4), (3, 4)),
    "...a,...ab,...b->...": ((2, 3), (2, 3, 4), (2, 4)),
    # dimensions without elements
    "ij,jk->ik ": ((0, 3), (3, 2)),
    " ij,jk->ik": ((2, 0), (0, 3)),
    "ij ,jk->ik": ((2, 3), (3, 0)),
    "i->  ": ((0,),),
}
