"""The engine: runs a sum of products block by block, and writes what it finds into the result."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .blocks import Room, fast_elements, of_dtype, part_of, tiles
from .equation import Labels
from .gemm import MatrixProduct
from .kernels import Job, Kernel


def run(job: Job, kernel: Kernel, operands: Sequence[Tensor], room: Room) -> tuple[Tensor, ...]:
    """Compute a sum of products.

    Parameters
    ----------
    job : Job
        The dimensions.
    kernel : Kernel
        The semiring.
    operands : sequence of Tensor
        The factors.
    room : Room
        How large blocks may be.

    Returns
    -------
    tuple of Tensor
        The results of the kernel, with the dimensions of `job.output`.

    Raises
    ------
    InexactError
        The kernel says so.
    """
    shape = job.shape(job.output)
    if 0 in shape or 0 in job.shape(job.reduced):
        zeros = zip(kernel.of_nothing(), kernel.dtypes(), strict=True)
        return tuple(operands[0].new_full(shape, zero, dtype=dtype) for zero, dtype in zeros)
    is_gemm = isinstance(kernel, MatrixProduct)
    chunks = room.choose(
        job.output,
        job.reduced,
        job.sizes,
        lambda chunks: kernel.nbytes(job, chunks, operands),
        None if is_gemm or not job.reduced else fast_elements(tuple(operands)),
    )
    order = (*job.output, *job.reduced)
    is_cut = any(chunks[label] < job.sizes[label] for label in job.reduced)
    results: tuple[Tensor, ...] | None = None
    for tile in tiles(job.output, job.sizes, chunks):
        state = None
        for inner in tiles(job.reduced, job.sizes, chunks):
            blocks = [
                part_of(x, labels, tile, inner)
                for x, labels in zip(operands, job.inputs, strict=True)
            ]
            if isinstance(kernel, MatrixProduct):
                state = kernel.merge(state, job, blocks, is_cut)
            else:
                factors = [
                    aligned(kernel.start(block), labels, order)
                    for block, labels in zip(blocks, job.inputs, strict=True)
                ]
                state = kernel.absorb(state, factors, job, inner)
                del factors
            del blocks
        found = kernel.finish(state)
        del state
        if not tile:  # the only one
            dtypes = kernel.dtypes()
            return tuple(of_dtype(one, dtype) for one, dtype in zip(found, dtypes, strict=True))
        if results is None:
            results = tuple(operands[0].new_empty(shape, dtype=dtype) for dtype in kernel.dtypes())
        for whole, part in zip(results, found, strict=True):
            part_of(whole, job.output, tile).copy_(part)
        del found, part
    assert results is not None  # there is at least one block
    return results


def aligned(x: Tensor, labels: Labels, order: Labels) -> Tensor:
    """Return a view with the dimensions in an order, and 1 for those that it has not."""
    there = [labels.index(label) for label in order if label in labels]
    if there != sorted(there):
        x = x.permute(there)
    if len(there) == len(order):
        return x
    return x[tuple(slice(None) if label in labels else None for label in order)]
