"""The bytes under plain tensors: all of a storage, whatever the tensor over it is.

Kernels and programs have no part in these: they are called without the patches that serve
TensorRefs, and with them a look at a storage takes ten times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, UntypedStorage

__all__ = [
    "as_bytes",
    "bytes_of",
    "empty_bytes",
    "exchange_storage",
    "fill_bytes",
    "give_bytes",
    "move_bytes",
    "over_same_memory",
    "part_of",
    "storage_nbytes",
    "storage_of",
]


def storage_of(plain: Tensor) -> UntypedStorage:
    """The storage under a plain tensor."""
    import torch

    return torch._C.TensorBase.untyped_storage(plain)


def storage_nbytes(base: Tensor) -> int:
    """The bytes under a base now (0 when it was emptied)."""
    return storage_of(base).nbytes()


def empty_bytes(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Uninitialised bytes as a plain tensor, whatever has been patched or set as a default."""
    import torch

    # Not `torch.empty`: injection replaces that name, and we need a plain tensor.
    with torch._C.DisableTorchFunction():
        plain: Tensor = torch._C._VariableFunctions.empty(
            (nbytes,), dtype=torch.uint8, device=device
        )
    return plain


def give_bytes(base: Tensor, nbytes: int) -> None:
    """Give bytes to a base whose storage has none; it keeps its shape, as it may be a result."""
    storage_of(base).resize_(nbytes)


def bytes_of(base: Tensor) -> Tensor:
    """All bytes of the storage under a base, as a plain uint8 tensor that shares them."""
    storage = storage_of(base)
    return _alias(storage, 0, storage.nbytes())


def part_of(base: Tensor, start: int, nbytes: int) -> Tensor:
    """Some bytes of the storage under a base, as `bytes_of` gives all; fewer where it ends."""
    storage = storage_of(base)
    return _alias(storage, start, max(0, min(nbytes, storage.nbytes() - start)))


def over_same_memory(plain: Tensor) -> Tensor:
    """The same tensor with a storage object of its own over the same memory.

    By the capsule itself: `torch.from_dlpack` asks in Python for devices, streams and versions, of
    which there are no two here, and takes fifteen times as long.
    """
    import torch

    made: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(plain))
    return made


def as_bytes(base: Tensor) -> Tensor:
    """`bytes_of` for who does not mind to hold the base itself, where it is such a tensor.

    Most bases are, as `empty_bytes` makes them, and an alias takes some time.
    """
    import torch

    nbytes = storage_nbytes(base)
    if base.shape == (nbytes,) and base.dtype is torch.uint8 and base.is_contiguous():
        return bytes_of(base) if base.is_inference() else base
    return bytes_of(base)


def _alias(storage: UntypedStorage, offset_nbytes: int, nbytes: int) -> Tensor:
    """Some bytes of a storage under a fresh tensor.

    A fresh one, because a tensor that was made in inference mode refuses in-place writes
    outside of it, and one that is a leaf of autograd refuses them always.
    """
    import torch

    with torch._C.DisableTorchFunction():
        fresh = torch._C._VariableFunctions.empty((0,), dtype=torch.uint8, device=storage.device)
        plain: Tensor = fresh.set_(storage, offset_nbytes, (nbytes,), (1,))
    return plain


def _bytes_in(tensor: Tensor) -> Tensor:
    """The bytes that a dense tensor covers: itself where it is them, else under a fresh tensor."""
    import torch

    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and not tensor.is_inference():
        return tensor
    width, start = tensor.element_size(), int(tensor.storage_offset())
    return _alias(storage_of(tensor), start * width, tensor.numel() * width)


def move_bytes(source: Tensor, destination: Tensor, *, non_blocking: bool = False) -> None:
    """Copy the bytes of one dense tensor over those of another, equally large one."""
    import torch

    target, origin = storage_of(destination), storage_of(source)
    if target.nbytes() == source.nbytes == origin.nbytes():
        target.copy_(origin, non_blocking)
        return
    with torch._C.DisableTorchFunction():
        _bytes_in(destination).copy_(_bytes_in(source), non_blocking=non_blocking)


def exchange_storage(base: Tensor, nbytes: int) -> None:
    """Give a base a storage of its own with other bytes; the old one goes with its last view."""
    import torch

    # What was made in inference mode may be changed there only.
    with torch._C.DisableTorchFunction(), torch.inference_mode(base.is_inference()):
        storage = storage_of(empty_bytes(nbytes, base.device))
        with torch.no_grad():
            base.set_(storage, 0, (0,), (1,))


def fill_bytes(tensor: Tensor, value: int) -> None:
    """Set each byte of a dense tensor."""
    import torch

    with torch._C.DisableTorchFunction():
        _bytes_in(tensor).fill_(value)
