"""Gradients of sums of products: by the same engine, in blocks, as often as one likes.

Saved for them are operands, and of logarithms the result; no product of a block is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .engine import Walk
from .equation import Labels
from .gemm import MatrixProduct
from .kernels import Best, Folding, InexactError, Job, Kernel, LogSum, SumOfProducts, wide
from .log_products import LogProduct, LogShares
from .log_shares import Shares
from .pointers import at_best
from .replay import gradients_by_replay


def apply(walk: Walk, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute a sum of products, and note how its gradient is computed."""
    job = walk.job
    if len(operands) == 1 and not job.reduced and _keeps_one(walk.kernel):
        (labels,) = job.inputs
        return (operands[0].permute([labels.index(label) for label in job.output]),)
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        found = Contraction.apply(walk, *operands)
        return found if isinstance(found, tuple) else (found,)
    return _exactly(walk, operands)[1]


def _exactly(walk: Walk, operands: Sequence[Tensor]) -> tuple[Walk, tuple[Tensor, ...]]:
    """Compute a sum of products by a kernel, or the one that stands in for it; say by which."""
    try:
        return walk, walk.run(operands)
    except InexactError:
        pass  # the error would keep what it was raised over
    return walk.instead, walk.instead.run(operands)


def _keeps_one(kernel: Kernel) -> bool:
    """Whether a sum of one product of one factor is that factor."""
    if isinstance(kernel, SumOfProducts):
        return kernel.roles == ("real",)
    return isinstance(kernel, (LogSum, Folding, MatrixProduct))


class Contraction(torch.autograd.Function):
    """A sum of products with gradients."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, *operands: Tensor) -> Any:
        """Compute it, and save operands."""
        walk, found = _exactly(walk, operands)
        ctx.walk = walk
        needed = found if isinstance(walk.kernel, (LogSum, LogProduct, Best)) else ()
        ctx.save_for_backward(*operands, *needed)
        if len(found) > 1:
            ctx.mark_non_differentiable(*found[1:])
        return found if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        """Compute the gradient of each operand that needs one, by sums of products."""
        saved, walk = ctx.saved_tensors, ctx.walk
        job, kernel = walk.job, walk.kernel
        operands, results = saved[: len(job.inputs)], saved[len(job.inputs) :]
        needs = ctx.needs_input_grad[1:]
        if isinstance(kernel, Folding):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "Gradients in a semiring of one's own can be taken once: its blocks are "
                    "computed again, and no graph of that is kept. Leave out create_graph=True."
                )
            found = gradients_by_replay(job, kernel, walk.room, needs, g, operands)
        elif isinstance(kernel, (LogSum, LogProduct)):
            found = _of_logarithms(walk, needs, g, operands, *results)
        elif isinstance(kernel, Best):
            found = [
                at_best(job, at, operands[at].dtype, g, results[1]) if need else None
                for at, need in enumerate(needs)
            ]
        else:
            found = [
                _of_product(walk, at, g, operands) if need else None
                for at, need in enumerate(needs)
            ]
        return (None, *found)


def _of_logarithms(
    walk: Walk, needs: Sequence[bool], g: Tensor, operands: Sequence[Tensor], total: Tensor
) -> list[Tensor | None]:
    """Return the gradients of a logarithm: as matrix products if it was one, and they are exact."""
    job, kernel = walk.job, walk.kernel
    is_last = not torch.is_grad_enabled()
    if isinstance(kernel, LogProduct) and is_last:
        try:
            return _of_matrices(walk, needs, g, operands, total)
        except InexactError:
            pass  # then one by one
    # Where nothing is possible no operand has a share; without this it would be 0 / 0.
    total = total.masked_fill(total == -math.inf, 0)
    if is_last and all(x.dtype == kernel.work for x in operands):
        shares = walk.kept(needs, lambda: Shares(job, kernel.work, walk.room, needs))
        return shares.run(g, operands, total)
    roles = ("real", *("log" for _ in operands), "minus")
    inputs = (job.output, *job.inputs, job.output)
    factors = (g, *operands, total)
    return [
        _sum(walk, labels, inputs, roles, factors, x.dtype) if need else None
        for x, labels, need in zip(operands, job.inputs, needs, strict=True)
    ]


def _of_matrices(
    walk: Walk, needs: Sequence[bool], g: Tensor, operands: Sequence[Tensor], total: Tensor
) -> list[Tensor | None]:
    """Return the gradients of a logarithm that was a matrix product; see `LogShares`."""
    found: list[Tensor | None] = [None, None]
    for at in [at for at, need in enumerate(needs) if need]:
        factors = (g, operands[at], operands[1 - at], total)
        shares = walk.kept(at, functools.partial(_of_factor, walk, at, factors))
        (found[at],) = shares.run(factors)
    return found


def _of_factor(walk: Walk, at: int, factors: Sequence[Tensor]) -> Walk:
    job = walk.job
    inputs = (job.output, job.inputs[at], job.inputs[1 - at], job.output)
    kernel = LogShares(factors[1].dtype, walk.kernel.work)
    dtypes = [factor.dtype for factor in factors]
    return Walk(Job(inputs, job.inputs[at], job.sizes), kernel, walk.room, dtypes)


def _of_product(walk: Walk, at: int, g: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the gradient of a sum of products for one of its factors."""
    job, kernel = walk.job, walk.kernel
    roles = kernel.roles if isinstance(kernel, SumOfProducts) else ("real",) * len(operands)
    kept = [place for place in range(len(operands)) if place != at or roles[at] != "real"]
    factors = [g]
    for place in kept:
        x = operands[place]
        factors.append(x.conj() if x.is_complex() else x)
    inputs = (job.output, *(job.inputs[place] for place in kept))
    of_factors = ("real", *(roles[place] for place in kept))
    found = _sum(walk, job.inputs[at], inputs, of_factors, factors, operands[at].dtype)
    return -found if roles[at] == "minus" else found


def _sum(
    walk: Walk,
    labels: Labels,
    inputs: tuple[Labels, ...],
    roles: tuple[str, ...],
    factors: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Compute a sum of products; dimensions that no factor has are expanded, not copied."""
    every = {label for one in inputs for label in one}
    there = tuple(label for label in labels if label in every)
    sizes = walk.job.sizes

    def make() -> Walk:
        job = Job(inputs, there, sizes)
        return Walk(job, kernel_of_products(job, roles, dtypes, dtype), walk.room, dtypes)

    dtypes = tuple(factor.dtype for factor in factors)
    (found,) = apply(walk.kept((labels, inputs, roles, dtypes, dtype), make), factors)
    if there == labels:
        return found
    index = tuple(slice(None) if label in every else None for label in labels)
    return found[index].expand([sizes[label] for label in labels])


def kernel_of_products(
    job: Job, roles: tuple[str, ...], dtypes: Sequence[torch.dtype], dtype: torch.dtype
) -> Kernel:
    """Return what computes a sum of products best: matrix products, where it is one."""
    work = dtypes[0]
    for other in dtypes[1:]:
        work = torch.promote_types(work, other)
    is_number = work.is_floating_point or work.is_complex
    alike = all(other == work for other in dtypes)
    if roles == ("real", "real") and job.reduced and is_number and alike:
        return MatrixProduct(dtype, work)
    return SumOfProducts(dtype, wide(work), roles)
