"""Tensors that come under management and leave it again, without a copy."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.storages import bytes_of
from .block import Block, Exposure, Replica
from .ref import as_parameter, is_plain
from .residency import Residency
from .states import CLEAN
from .storage_index import Table

#: Users of a storage when only the tensor at hand and our own look at it remain.
SOLE_USERS = 2
#: Users of a storage that a twin was made of: the twin's own hold on it, and the exposure's.
TWIN_USERS = 2


def is_adoptable(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor can be a TensorRef: strided bytes on the host, no other subclass."""
    return is_plain(tensor) and has_bytes_at_home(tensor)


def has_bytes_at_home(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided bytes on the host, which an operator may read as a block.

    So are tensors of a library's own class that leaves operators to torch; they stay what they are.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_mkldnn
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch._C._has_storage(tensor)
        and not tensor._is_zerotensor()
    )


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches, from the first to behind the last."""
    item = tensor.element_size()
    start: Any = tensor.storage_offset() * item  # torch types it for symbolic sizes too
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * item


def block_for(
    tensor: torch.Tensor, table: Table, residency: Residency, *, sole: bool
) -> tuple[Block, int] | None:
    """Find or make the block that stands for a plain tensor's storage.

    Parameters
    ----------
    tensor : torch.Tensor
        Plain and adoptable.
    sole : bool
        The caller gives the tensor up, and knows that memory which came from outside torch (a
        mapped file, an array) is read by nobody else.

    Returns
    -------
    (Block, int) or None
        The block, and the byte of the tensor's storage where it begins; None where part of the
        range belongs to a block already: the tensor must stay plain.
    """
    storage = tensor.untyped_storage()
    start, stop = 0, storage.nbytes()
    if not storage.resizable():
        # A mapped file is one storage under many tensors: each is a block of its own.
        start, stop = extent_of(tensor)
    found = table.find(storage, start, stop)
    if found is not None:
        return found
    if table.overlaps(storage, start, stop):
        return None
    block = Block(stop - start)
    whole = start == 0 and stop == storage.nbytes()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    base = bytes_of(tensor)
    if block.nbytes and not (sole and whole and users <= SOLE_USERS and storage.resizable()):
        base = twin_of(storage, start, stop)
        if storage.resizable():
            block.exposure = Exposure(
                residency.books.host, storage, "plain tensors share it", own_count=TWIN_USERS
            )
        elif whole and not sole:
            block.exposure = Exposure(
                residency.books.host, None, "memory from outside", forever=True
            )
    block.replicas[residency.books.host] = Replica(block, residency.books.host, base, CLEAN)
    table.add(storage, start, stop, block)
    residency.readiness.settle_at_home(block)
    return block, start


def twin_of(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """Make plain bytes with a storage object of their own over part of another's memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        # Not a slice: a view would keep a second hold on the storage through its base.
        part = torch._C._VariableFunctions.empty((0,), dtype=torch.uint8, device=storage.device)
        part.set_(storage, start, (stop - start,), (1,))
        return torch.from_dlpack(part)  # type: ignore[attr-defined]


def replace_in_place(tensor: torch.Tensor, ref: Any) -> Any:
    """Make the object `tensor` itself the TensorRef, so that whoever holds it sees the change.

    Returns
    -------
    TensorRef
        `tensor` where its object could be exchanged; `ref` where somebody in C++ holds it (an
        autograd graph, a weak reference). Then `tensor` remembers it under `_ttr_ref`.
    """
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(ref, torch.nn.Parameter):
        ref = as_parameter(ref)
    known = getattr(tensor, "_ttr_ref", None)
    if known is not None:
        return known
    if try_replace_in_place(tensor, ref):
        return tensor
    tensor._ttr_ref = ref  # type: ignore[attr-defined]
    return ref


def try_replace_in_place(tensor: torch.Tensor, ref: Any) -> bool:
    """Make the object `tensor` itself the TensorRef, if nobody in C++ holds it.

    It keeps what the program has noted on it (transformers marks what it has loaded so), its
    gradient and its hooks.
    """
    if noted := vars(tensor):
        ref.__dict__ = noted | vars(ref)
    ref.grad = tensor.grad
    try:
        torch.utils.swap_tensors(tensor, ref)
    except RuntimeError:
        return False
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks:
            setattr(tensor, name, hooks)  # they were torch's note on what it has been
    return True
