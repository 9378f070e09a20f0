"""Pieces: parts of operands and results as blocks of their own, for operators that run in blocks.

A block larger than the budget is never on the accelerator as a whole. A piece of it is: a block of
its own, whose home is the very memory of the part at home where that is one run of bytes, and else
a packed copy of it. So pieces are fetched, counted, evicted and copied home like any block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..devices.base import Device
from ..devices.storages import empty_bytes
from ..memory.block import Block, Replica
from ..memory.plain_views import make_ref, view_with
from ..memory.residency import Residency
from ..memory.states import CLEAN, INVALID
from ..operators.blocked.cut import Along, Tile, is_dense


def flattened(plain: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def part_of(plain: torch.Tensor, along: Along, tile: Tile) -> torch.Tensor:
    """Return the view of a plain tensor that lies in a tile."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for dim, axis in enumerate(along):
            if axis is not None:
                start, end = tile[axis]
                plain = plain.narrow(dim, start, end - start)
    return plain


class Piece:
    """A part of an operand on its way through an operator, or of a result on its way home.

    Attributes
    ----------
    ref : TensorRef
        What the operator is called with.
    part : torch.Tensor or None
        The part at home that is to be written once the piece is at home; None where the piece's
        home is that memory itself.
    """

    __slots__ = ("block", "part", "ref")

    def __init__(self, ref: Any, part: torch.Tensor | None) -> None:
        self.ref = ref
        self.block: Block = ref._ttr_block
        self.part = part


def piece_of(part: torch.Tensor, label: torch.device, residency: Residency) -> Piece:
    """Make the piece that a part of an operand at home is."""
    host = residency.books.host
    if is_dense(part):
        base, plain, waits_for = *_over_the_same(part), None
    else:
        plain = _packed(part, host)
        base, waits_for = plain, part
    return _piece(base, plain, waits_for, label, residency)


def gathered_piece(made: torch.Tensor, label: torch.device, residency: Residency) -> Piece:
    """Make the piece that stands for an operand of which only a part is read."""
    residency.books.host.charge(0, 2 * made.nbytes, "uint8")
    return _piece(made, made, None, label, residency)


def _piece(
    base: torch.Tensor,
    plain: torch.Tensor,
    waits_for: torch.Tensor | None,
    label: torch.device,
    residency: Residency,
) -> Piece:
    host = residency.books.host
    block = Block(base.untyped_storage().nbytes(), residency.books.tick)
    block.replicas[host] = Replica(block, host, base, CLEAN)
    return Piece(make_ref(plain, block, host, label), waits_for)


def result_piece(ref: Any, part: torch.Tensor, device: Device, residency: Residency) -> Piece:
    """Make the piece that a tile's result is; its home is the part it is of, where that can be."""
    block: Block = ref._ttr_block
    host = residency.books.host
    if (
        block.readable_on(device) is None
        or not is_dense(part)
        or block.nbytes != part.numel() * part.element_size()
        or not _are_alike(ref, part)
    ):
        return Piece(ref, part)
    base, _ = _over_the_same(part)
    with residency.books.lock:
        if host in block.replicas:
            return Piece(ref, part)
        block.replicas[host] = Replica(block, host, base, INVALID)
    return Piece(ref, None)


def _are_alike(ref: torch.Tensor, part: torch.Tensor) -> bool:
    triples = zip(part.size(), ref.stride(), part.stride(), strict=True)
    return (
        ref.size() == part.size()
        and ref.storage_offset() == 0
        and all(size == 1 or mine == its for size, mine, its in triples)
    )


def _over_the_same(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a base over the bytes of a dense part, and the part over that."""
    width, offset = part.element_size(), int(part.storage_offset())
    start, nbytes = offset * width, part.numel() * width
    if part.is_meta:
        base = empty_bytes(nbytes, part.device)
        return base, view_with(part, base.untyped_storage(), 0)
    # It has the memory and keeps it alive, and is a storage object of its own.
    storage = part.untyped_storage()[start : start + nbytes]
    base = view_with(empty_bytes(0), storage, 0)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        base.set_(storage, 0, (nbytes,), (1,))
    return base, view_with(part, storage, 0)


def _packed(part: torch.Tensor, host: Device) -> torch.Tensor:
    """Copy a part, its dimensions in the order they had; what is repeated stays repeated."""
    sizes = part.size()
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for dim, stride in enumerate(part.stride()):
            if stride == 0 and part.size(dim) > 1:
                part = part.narrow(dim, 0, 1)
        packed = torch._C._VariableFunctions.empty_strided(
            part.size(), _dense_strides(part, part), dtype=part.dtype, device=part.device
        )
        packed.copy_(part)
    host.charge(0, 2 * packed.nbytes, "uint8")
    return packed.expand(sizes)


def strides_of_whole(like: torch.Tensor, made: torch.Tensor) -> Sequence[int]:
    """The strides of a result that `like` foretells, where a kernel has `made` a tile of it.

    Torch does not know all layouts beforehand: convolutions on the host follow their input's.
    """
    if like.dim() != made.dim() or not (is_dense(like) and is_dense(made)):
        return like.stride()
    several = [dim for dim, size in enumerate(made.size()) if size > 1]
    if _in_order(several, like) == _in_order(several, made):
        return like.stride()
    return _dense_strides(like, made)


def _in_order(dims: Iterable[int], of: torch.Tensor) -> list[int]:
    """Some of a tensor's dimensions, the innermost one first."""
    return sorted(dims, key=lambda dim: (of.stride(dim), -dim))


def _dense_strides(whole: torch.Tensor, of: torch.Tensor) -> list[int]:
    """The strides without gaps of one tensor, its dimensions in the order of another's."""
    strides, expected = [0] * whole.dim(), 1
    for dim in _in_order(range(whole.dim()), of):
        strides[dim] = expected
        expected *= max(whole.size(dim), 1)
    return strides
