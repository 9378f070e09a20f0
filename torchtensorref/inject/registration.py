"""What happens when a module takes a parameter or a buffer: it becomes a TensorRef."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..memory.names import names
from .factories import _core, is_plain_world
from .hooks import is_disabled, state
from .inject_to import injectTo


def on_registration(module: Any, name: str, tensor: Any) -> Any:
    """Return the TensorRef that a module keeps for a tensor; None keeps what was given.

    Called by torch for every parameter and buffer of every module, so also for those of models
    that were made on the meta device and get their weights afterwards.
    """
    if not isinstance(tensor, Tensor):
        return None
    if not state.active or is_disabled.get() or not is_plain_world():
        return None
    with torch._C.DisableTorchFunction():  # a look of ours is not for the tensor's class
        if tensor.device.type == "meta":
            return None
    names.note_module(module)
    core = _core()
    if isinstance(tensor, core.TensorRef):
        core.manager.ownership.note_registered(tensor)
        return None
    if not injectTo.decisions[module_behind(sys._getframe(1))]:
        return None
    return core.manager.ownership.adopt_registered(tensor)


def module_behind(frame: FrameType | None) -> str:
    """The name of the module whose code had torch register something: the first outside torch."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != "torch" and not name.startswith("torch."):
            return name
        frame = frame.f_back
    return "__main__"
