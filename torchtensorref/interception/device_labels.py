"""What a call says of devices is a label; where its plain tensors lie is another matter.

On a simulated device both are the host's, and nothing here has anything to do. On a real one the
plain operands lie on the accelerator, whatever their TensorRefs say, so a device among the
arguments has to be exchanged for the one that the operator runs on, and the results get the label.
"""

from __future__ import annotations

from typing import Any

import torch

from ..devices.base import Device
from ..operators.plan import OpPlan

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_guest(tensor: torch.Tensor, accelerator: Device) -> bool:
    """Whether a plain operand lies on the accelerator itself: made there by the program."""
    here = accelerator.torch_device
    return here.type not in ("cpu", "meta") and tensor.device == here and type(tensor) in _PLAIN


def exchange_device(
    plan: OpPlan, device: Device, accelerator: Device, args: list[Any], kwargs: dict[str, Any]
) -> torch.device | None:
    """Let a call make its results where it runs; return the label that it asked for, if any."""
    if "device" in kwargs:
        holder: Any = kwargs
        key: Any = "device"
    else:
        key = plan.argument_names.index("device")
        holder = args
        if key >= len(args):
            return None
    asked = holder[key]
    if asked is None:
        return None
    label = torch.device(asked)
    if label.type not in ("cpu", accelerator.torch_device.type) or label.type == "meta":
        return None  # made there, or refused, by torch
    holder[key] = device.torch_device
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = None  # page-locking is the runtime's business
    return label


class Guests:
    """Plain tensors on the accelerator among the operands of one call."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._at_home: dict[int, torch.Tensor] = {}

    def on(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        """Return the guest as an operator on `device` can use it: itself, or a copy at home."""
        if not device.is_host:
            return tensor
        copied = self._at_home.get(id(tensor))
        if copied is None:
            copied = self._at_home[id(tensor)] = tensor.detach().cpu()
        return copied

    def send_back(self, written: list[Any]) -> None:
        """Give guests that an operator on the host has written their new values."""
        for tensor in self.tensors:
            copied = self._at_home.get(id(tensor))
            if copied is not None and any(tensor is one for one in written):
                tensor.detach().copy_(copied)
        self._at_home.clear()
