"""Plain tensors that a native run, or its backward pass, has made: blocks of their own."""

from __future__ import annotations

from typing import Any

import torch

from .blocks.block import Block
from .budget import SHORTAGES
from .devices.base import Device, bytes_of
from .errors import TransferError
from .views import view_over


def settled(
    residency: Any, plain: torch.Tensor, device: Device
) -> tuple[torch.Tensor, Block, Device]:
    """Make the block of what has been made natively; it goes home where it does not fit.

    Returns
    -------
    tuple of torch.Tensor, Block, Device
        The plain tensor over the block's bytes, and where these are.
    """
    storage = plain.untyped_storage()
    if not storage.resizable():
        plain = copied(plain)
    try:
        if device not in residency.ledgers:
            raise TransferError(f"{device.name} is not in use any more")
        return plain, residency.born(plain, device), device
    except SHORTAGES:
        at_home = bytes_of(plain).to("cpu", copy=True)
        plain = view_over(plain, at_home.untyped_storage())
        return plain, residency.born(plain, residency.host), residency.host


def copied(plain: torch.Tensor) -> torch.Tensor:
    """Return a copy that is laid out alike: kernels take another way for another layout."""
    with torch.no_grad():
        copy = plain.clone()
        if copy.stride() == plain.stride():
            return copy
        copy = bytes_of(plain).clone()
        return view_over(plain, copy.untyped_storage())


def is_sole(grad: torch.Tensor) -> bool:
    """Whether nobody but the caller, and the tensor that it is a view of, holds the bytes."""
    base: Any = grad._base
    if grad._use_count() > 1 or (base is not None and base._use_count() > 2):  # type: ignore[attr-defined]
        return False
    users: int = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    # The gradient itself, what it is a view of, and the storage object of this very look.
    return users <= (2 if base is None else 3)
