"""Gradients of sums of products: by the same engine, in blocks, as often as one likes.

Saved for them are operands, and of logarithms the result; no product of a block is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import Room
from .engine import run
from .equation import Labels
from .gemm import MatrixProduct
from .kernels import Best, Folding, InexactError, Job, Kernel, LogSum, SumOfProducts, wide
from .log_products import LogProduct, LogShares
from .pointers import at_best
from .replay import gradients_by_replay


def apply(job: Job, kernel: Kernel, operands: Sequence[Tensor], room: Room) -> tuple[Tensor, ...]:
    """Compute a sum of products, and note how its gradient is computed."""
    if len(operands) == 1 and not job.reduced and _keeps_one(kernel):
        (labels,) = job.inputs
        return (operands[0].permute([labels.index(label) for label in job.output]),)
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        found = Contraction.apply(job, kernel, room, *operands)
        return found if isinstance(found, tuple) else (found,)
    return _exactly(job, kernel, operands, room)[1]


def _exactly(
    job: Job, kernel: Kernel, operands: Sequence[Tensor], room: Room
) -> tuple[Kernel, tuple[Tensor, ...]]:
    """Compute a sum of products by a kernel, or the one that stands in for it; say by which."""
    try:
        return kernel, run(job, kernel, operands, room)
    except InexactError:
        kernel = kernel.instead()
    return kernel, run(job, kernel, operands, room)


def _keeps_one(kernel: Kernel) -> bool:
    """Whether a sum of one product of one factor is that factor."""
    if isinstance(kernel, SumOfProducts):
        return kernel.roles == ("real",)
    return isinstance(kernel, (LogSum, Folding, MatrixProduct))


class Contraction(torch.autograd.Function):
    """A sum of products with gradients."""

    @staticmethod
    def forward(ctx: Any, job: Job, kernel: Kernel, room: Room, *operands: Tensor) -> Any:
        """Compute it, and save operands."""
        kernel, found = _exactly(job, kernel, operands, room)
        ctx.job, ctx.kernel, ctx.room = job, kernel, room
        needed = found if isinstance(kernel, (LogSum, LogProduct, Best)) else ()
        ctx.save_for_backward(*operands, *needed)
        if len(found) > 1:
            ctx.mark_non_differentiable(*found[1:])
        return found if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        """Compute the gradient of each operand that needs one, by sums of products."""
        saved = ctx.saved_tensors
        count = len(ctx.job.inputs)
        operands, results = saved[:count], saved[count:]
        needs = ctx.needs_input_grad[3:]
        if isinstance(ctx.kernel, Folding):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "Gradients in a semiring of one's own can be taken once: its blocks are "
                    "computed again, and no graph of that is kept. Leave out create_graph=True."
                )
            found = gradients_by_replay(ctx.job, ctx.kernel, ctx.room, needs, g, operands)
        elif isinstance(ctx.kernel, (LogSum, LogProduct)):
            found = _of_logarithms(ctx.job, ctx.kernel, ctx.room, needs, g, operands, *results)
        elif isinstance(ctx.kernel, Best):
            found = [
                at_best(ctx.job, at, operands[at].dtype, g, results[1]) if need else None
                for at, need in enumerate(needs)
            ]
        else:
            found = [
                _of_product(ctx.job, ctx.kernel, ctx.room, at, g, operands) if need else None
                for at, need in enumerate(needs)
            ]
        return (None, None, None, *found)


def _of_logarithms(
    job: Job,
    kernel: Kernel,
    room: Room,
    needs: Sequence[bool],
    g: Tensor,
    operands: Sequence[Tensor],
    total: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of a logarithm: as matrix products if it was one, and they are exact."""
    output = job.output
    if isinstance(kernel, LogProduct) and not torch.is_grad_enabled():
        (a, b), (la, lb) = operands, job.inputs
        try:
            return [
                run(
                    Job((output, mine, others, output), mine, job.sizes),
                    LogShares(x.dtype, kernel.work),
                    (g, x, y, total),
                    room,
                )[0]
                if need
                else None
                for need, mine, others, x, y in zip(
                    needs, (la, lb), (lb, la), (a, b), (b, a), strict=True
                )
            ]
        except InexactError:
            pass  # then one by one
    # Where nothing is possible no operand has a share; without this it would be 0 / 0.
    total = total.masked_fill(total == -math.inf, 0)
    roles = ("real", *("log" for _ in operands), "minus")
    inputs = (output, *job.inputs, output)
    shares = (g, *operands, total)
    return [
        _sum(job, labels, inputs, roles, shares, x.dtype, room) if need else None
        for x, labels, need in zip(operands, job.inputs, needs, strict=True)
    ]


def _of_product(
    job: Job, kernel: Kernel, room: Room, at: int, g: Tensor, operands: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of a sum of products for one of its factors."""
    roles = kernel.roles if isinstance(kernel, SumOfProducts) else ("real",) * len(operands)
    kept = [place for place in range(len(operands)) if place != at or roles[at] != "real"]
    inputs = (job.output, *(job.inputs[place] for place in kept))
    factors = [g]
    for place in kept:
        x = operands[place]
        factors.append(x.conj() if x.is_complex() else x)
    found = _sum(
        job,
        job.inputs[at],
        inputs,
        ("real", *(roles[place] for place in kept)),
        factors,
        operands[at].dtype,
        room,
    )
    return -found if roles[at] == "minus" else found


def _sum(
    job: Job,
    labels: Labels,
    inputs: tuple[Labels, ...],
    roles: tuple[str, ...],
    factors: Sequence[Tensor],
    dtype: torch.dtype,
    room: Room,
) -> Tensor:
    """Compute a sum of products; dimensions that no factor has are expanded, not copied."""
    every = {label for one in inputs for label in one}
    there = tuple(label for label in labels if label in every)
    inner = Job(inputs, there, job.sizes)
    (found,) = apply(inner, kernel_of_products(inner, roles, factors, dtype), factors, room)
    if there == labels:
        return found
    index = tuple(slice(None) if label in every else None for label in labels)
    return found[index].expand(job.shape(labels))


def kernel_of_products(
    job: Job, roles: tuple[str, ...], factors: Sequence[Tensor], dtype: torch.dtype
) -> Kernel:
    """Return what computes a sum of products best: matrix products, where it is one."""
    work = factors[0].dtype
    for factor in factors[1:]:
        work = torch.promote_types(work, factor.dtype)
    is_number = work.is_floating_point or work.is_complex
    alike = all(factor.dtype == work for factor in factors)
    if roles == ("real", "real") and job.reduced and is_number and alike:
        return MatrixProduct(dtype, work)
    return SumOfProducts(dtype, wide(work), roles)
