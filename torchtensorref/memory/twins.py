"""Storage objects of our own over memory that somebody else has, too."""

from __future__ import annotations

import torch

from ..devices.base import Device
from ..devices.storages import over_same_memory
from .block import Block


def follow_holder(block: Block, host: Device) -> None:
    """Take the memory that who holds a storage outside has given it since (lock held).

    Torch exchanges it inside of the storage: to share it with other processes, or for another size.
    Where it has become too small for the block, nobody has the bytes any more.
    """
    exposure = block.exposure
    if exposure is None or exposure.address is None or exposure.storage is None:
        return
    storage, home = exposure.storage, block.replicas[host]
    address = storage.data_ptr()
    if address == exposure.address:
        return
    if exposure.start is None:
        exposure.start = home.base.data_ptr() - exposure.address
    stop = exposure.start + block.nbytes
    block.ready = None
    block.is_rehoused = True
    if stop <= storage.nbytes():
        home.base = twin_of(storage, exposure.start, stop)
    else:
        home.base = torch._C._VariableFunctions.zeros((block.nbytes,), dtype=torch.uint8)
    exposure.address = address  # last: after an error in between it is followed again


def twin_of(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """Make plain bytes with a storage object of their own over part of another's memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        # Not a slice: a view would keep a second hold on the storage through its base.
        part = torch._C._VariableFunctions.empty((0,), dtype=torch.uint8, device=storage.device)
        part.set_(storage, start, (stop - start,), (1,))
        return over_same_memory(part)
