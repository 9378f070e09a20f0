"""Gradients of the best of sums: they go to the terms that were best, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .blocks import FAST_ON_HOST, Room, part_of, tiles
from .kernels import Job, wide


def at_best(job: Job, at: int, dtype: torch.dtype, g: Tensor, pointers: Tensor) -> Tensor:
    """Return the gradient for an operand: what the results take from each of its elements."""
    found: Tensor = Scattered.apply(job, at, wide(dtype), g, pointers)
    return found.to(dtype)


class Scattered(torch.autograd.Function):
    """Adds each element of a tensor to that of an operand that a pointer leads to."""

    @staticmethod
    def forward(ctx: Any, job: Job, at: int, dtype: torch.dtype, g: Tensor, where: Tensor) -> Any:
        """Go through the results."""
        ctx.job, ctx.at, ctx.dtype = job, at, g.dtype
        ctx.save_for_backward(where)
        shape = job.shape(job.inputs[at])
        found = g.new_zeros(shape, dtype=dtype)
        if found.numel() and where.numel() and 0 not in job.shape(job.reduced):
            flat = found.view(-1)
            for tile in _tiles(job):
                part = part_of(g, job.output, tile).to(dtype)
                flat.index_add_(0, _places(job, at, where, tile).flatten(), part.flatten())
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Go the other way."""
        (where,) = ctx.saved_tensors
        return None, None, None, Gathered.apply(ctx.job, ctx.at, ctx.dtype, g, where), None


class Gathered(torch.autograd.Function):
    """Takes for each result the element of an operand that its pointer leads to."""

    @staticmethod
    def forward(ctx: Any, job: Job, at: int, dtype: torch.dtype, g: Tensor, where: Tensor) -> Any:
        """Go through the results."""
        ctx.job, ctx.at, ctx.dtype = job, at, g.dtype
        ctx.save_for_backward(where)
        found = where.new_zeros(where.shape, dtype=dtype)
        if g.numel() and where.numel() and 0 not in job.shape(job.reduced):
            flat = g.reshape(-1)
            for tile in _tiles(job):
                taken = flat.take(_places(job, at, where, tile))
                part_of(found, job.output, tile).copy_(taken)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Go the other way."""
        (where,) = ctx.saved_tensors
        return None, None, None, Scattered.apply(ctx.job, ctx.at, ctx.dtype, g, where), None


def _tiles(job: Job) -> Any:
    """Cut what is pointed from: a place takes 8 bytes, and some of them are there at once."""
    room = Room(fast_elements=FAST_ON_HOST // 8)
    chunks = room.choose(job.output, (), job.sizes, lambda _: 0)
    return tiles(job.output, job.sizes, chunks)


def _places(job: Job, at: int, where: Tensor, tile: Any) -> Tensor:
    """Return the place in an operand, counted as of one dimension, of each result's best term."""
    labels = job.inputs[at]
    strides, stride = {}, 1
    for label in reversed(labels):
        strides[label] = stride
        stride *= job.sizes[label]
    pointers = part_of(where, job.output, tile)
    found = torch.zeros_like(pointers)
    inner = 1
    for label in reversed(job.reduced):
        if label in strides:
            found += ((pointers // inner) % job.sizes[label]) * strides[label]
        inner *= job.sizes[label]
    for dim, label in enumerate(job.output):
        if label in strides:
            start, length = tile.get(label, (0, job.sizes[label]))
            steps = torch.arange(start, start + length, device=where.device) * strides[label]
            found += steps.view([-1] + [1] * (len(job.output) - dim - 1))
    return found
