"""Gradients in semirings of the user's own: torch's, of blocks that are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import Room, Tile, aligned, part_of, tiles
from .kernels import Folding, Job


def gradients_by_replay(
    job: Job,
    kernel: Folding,
    room: Room,
    needs: Sequence[bool],
    g: Tensor,
    operands: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradient for each operand that needs one.

    Notes
    -----
    Sums of blocks are added one after the other, and addition may be any function. So for each part
    of the result the sums up to each block are computed and kept, which are of that part's size;
    then the blocks are gone through from the last one back, and each is computed once more, with a
    graph of its own.
    """
    found = [torch.zeros_like(x) if need else None for x, need in zip(operands, needs, strict=True)]
    if any(size == 0 for size in job.sizes.values()):
        return found
    dtypes = [x.dtype for x in operands]
    chunks = room.choose(
        job.output,
        job.reduced,
        job.sizes,
        # A graph keeps what it has computed, and makes as much of gradients.
        lambda chunks: 3 * kernel.nbytes(job, chunks, dtypes),
    )
    for tile in tiles(job.output, job.sizes, chunks):
        inners = list(tiles(job.reduced, job.sizes, chunks))
        states: list[Any] = [None]
        with torch.no_grad():
            for inner in inners[:-1]:
                factors = _factors(job, kernel, operands, tile, inner)
                states.append(kernel.absorb(states[-1], factors, job, inner))
        share = part_of(g, job.output, tile)
        for inner in reversed(inners):
            state = states.pop()
            share = _back_through(job, kernel, operands, found, tile, inner, state, share)
    return found


def _factors(job: Job, kernel: Folding, blocks: Sequence[Tensor], *tile: Tile) -> list[Tensor]:
    return [
        aligned(kernel.start(part_of(x, labels, *tile)), labels, job.order)
        for x, labels in zip(blocks, job.inputs, strict=True)
    ]


def _back_through(
    job: Job,
    kernel: Folding,
    operands: Sequence[Tensor],
    found: Sequence[Tensor | None],
    tile: Tile,
    inner: Tile,
    state: Tensor | None,
    share: Tensor,
) -> Any:
    """Add the gradients of one block; return that of what was added up before it."""
    with torch.enable_grad():
        leaves = [
            part_of(x, labels, tile, inner).detach().requires_grad_(gradient is not None)
            for x, labels, gradient in zip(operands, job.inputs, found, strict=True)
        ]
        before = None if state is None else state.detach().requires_grad_()
        after = kernel.absorb(before, _factors(job, kernel, leaves), job, inner)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if before is not None:
        wanted.append(before)
    gradients = list(torch.autograd.grad(after, wanted, share, allow_unused=True))
    rest = gradients.pop() if before is not None else None
    if before is not None and rest is None:
        rest = torch.zeros_like(share)
    parts = iter(gradients)
    for whole, labels in zip(found, job.inputs, strict=True):
        gradient = next(parts) if whole is not None else None
        if whole is not None and gradient is not None:
            part_of(whole, labels, tile, inner).add_(gradient)
    return rest
