"""The device that a call names is a label; its plain tensors may lie on another device.

On a simulated device both are the host, and nothing here is used. On a real one the plain operands
lie on the accelerator, whatever their TensorRefs say: a device among the arguments is exchanged for
the one where the operator runs, and the results get the label. Plain tensors that the program has
made on the accelerator itself take part as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ..devices.base import Device
from ..memory.ref import TensorRef
from ..memory.sparse import SparseRef
from ..operators.plan import OpPlan

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")


def label_of(asked: Any) -> torch.device:
    """The device that a tensor says it is on if a call asks for one: the host has no index."""
    label = torch.device(asked)
    return _CPU if label.type == "cpu" else label


def is_device_operand(tensor: torch.Tensor, accelerator: Device) -> bool:
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
    label = label_of(asked)
    if label.type not in ("cpu", accelerator.torch_device.type) or label.type == "meta":
        return None  # torch makes it there, or refuses
    holder[key] = device.torch_device
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = None  # page-locking is the runtime's business
    return label


def run_on_meta(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call whose results are to be on the meta device, which reads no byte of its operands.

    Returns
    -------
    object
        What torch gives for operands without bytes; NotImplemented for any other call.
    """
    asked = plan.argument("device", args, kwargs)
    if asked is None or torch.device(asked).type != "meta":
        return NotImplemented

    def stand_in(value: Any) -> Any:
        if isinstance(value, SparseRef):
            return value._ttr_hollow
        if not isinstance(value, TensorRef):
            return value
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )

    return plan.op(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})


class DeviceOperands:
    """Plain tensors on the accelerator, made there by the program, among the operands of a call."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._on_host: dict[int, torch.Tensor] = {}

    def on(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        """Return what an operator on `device` can use: the tensor itself, or a copy on the host."""
        if not device.is_host:
            return tensor
        copy = self._on_host.get(id(tensor))
        if copy is None:
            copy = self._on_host[id(tensor)] = tensor.detach().cpu()
        return copy

    def copy_back(self, written: list[Any]) -> None:
        """Copy what an operator on the host has written back to the accelerator."""
        for tensor in self.tensors:
            copy = self._on_host.get(id(tensor))
            if copy is not None and any(tensor is one for one in written):
                tensor.detach().copy_(copy)
        self._on_host.clear()
