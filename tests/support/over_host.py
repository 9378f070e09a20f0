"""The adapter for real accelerators, over the host: ready operators run in C++ without Python."""

from __future__ import annotations

import torch

from torchTensorRef.devices.accelerator.device import AcceleratorDevice


def adapters(count: int, capacity_nbytes: int) -> list[AcceleratorDevice]:
    """Make so many, named as are accelerators of one kind, that have this much memory each."""
    made = [AcceleratorDevice("cpu", module=torch.cpu) for _ in range(count)]  # type: ignore[arg-type]
    for number, device in enumerate(made):
        device.name, device.capacity_nbytes = f"adapter:{number}", capacity_nbytes
        device.torch_device = torch.device("cpu")  # as tensors on it say, without a number
        device.has_host_kernels = True  # it is the host: blocks keep its bits
    return made
