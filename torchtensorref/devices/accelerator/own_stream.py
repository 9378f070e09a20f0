"""Streams of our own: torch hands out 32 in turn, so a program's own could be one of ours."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from typing import Any

from ..background import ask_aside

__all__ = ["OnSideStream", "new_stream"]

#: Driver interfaces that can make a stream: their libraries, the call, and its flag for a stream
#: that does not wait for the default one.
DRIVERS = {
    "cuda": (("libcuda.so.1", "nvcuda.dll"), "cuStreamCreateWithPriority", 1),
    "hip": (("libamdhip64.so", "amdhip64.dll"), "hipStreamCreateWithPriority", 1),
}

#: Of a stream whose work is preferred, and of others; all vendors have these two.
URGENT_PRIORITY, USUAL_PRIORITY = -1, 0

_log = logging.getLogger("torchTensorRef")


def new_stream(module: Any, device: Any, kind: str, *, is_urgent: bool = False) -> Any:
    """Make a stream beside those of the program.

    Parameters
    ----------
    module : module
        ``torch.cuda``, ``torch.xpu``, or whatever has their names.
    device : torch.device
        Which one of its kind.
    kind : str
        ``"cuda"``, ``"hip"``, ``"xpu"``.
    is_urgent : bool
        Whether its work is to be preferred, where the vendor has priorities.

    Returns
    -------
    stream
        One that the driver has made for us where the module can wrap such, else one of its pool.
    """
    priority = URGENT_PRIORITY if is_urgent else USUAL_PRIORITY
    has_external = hasattr(module, "ExternalStream")
    handle = from_driver(module, device, kind, priority) if has_external else None
    if handle is not None:
        # Never destroyed: a device has four, and lives as long as the process.
        return module.ExternalStream(handle, device=device)
    if is_urgent:
        with contextlib.suppress(TypeError):  # a module whose streams have no priorities
            return module.Stream(device=device, priority=priority)
    try:
        return module.Stream(device=device)
    except TypeError:  # modules of one device (`torch.cpu`) take no device for it
        return module.Stream()


def from_driver(module: Any, device: Any, kind: str, priority: int = USUAL_PRIORITY) -> int | None:
    """Return the handle of a fresh stream; None where the driver is not found, or refuses."""
    names, call, non_blocking = DRIVERS.get(kind, ((), "", 0))
    for name in names:
        try:
            create = getattr(ctypes.CDLL(name), call)
        except (OSError, AttributeError):
            continue
        handle = ctypes.c_void_p()
        # A priority that the device does not have is taken as the nearest one.
        arguments = ctypes.byref(handle), ctypes.c_uint(non_blocking), ctypes.c_int(priority)
        status = ask_aside(functools.partial(_in_context, module, device, create, *arguments))
        if status == 0 and handle.value:
            return int(handle.value)
        _log.info("torchTensorRef: %s refuses a stream (%s); one of torch's is used.", name, status)
    return None


def _in_context(module: Any, device: Any, create: Any, *arguments: Any) -> Any:
    """Call the driver in the context that torch has made, which its first use opens."""
    with module.device(device):
        module.synchronize(device)
        return create(*arguments)


class OnSideStream:
    """The time in which a thread issues its work on a stream of ours (`Vendor.on`)."""

    __slots__ = ("_device", "_here", "_module", "_on_stream", "_stream", "_was")

    def __init__(self, module: Any, index: int, stream: Any, here: threading.local) -> None:
        device = getattr(module, "device", None)
        self._device = None if device is None else device(index)
        self._module, self._stream, self._here = module, stream, here

    def __enter__(self) -> None:
        self._was = getattr(self._here, "is_on_side", False)
        self._here.is_on_side = True
        try:
            if self._device is not None:
                self._device.__enter__()
            try:
                self._on_stream = self._module.stream(self._stream)  # it asks for the device
                self._on_stream.__enter__()
            except BaseException:
                self._leave_device()
                raise
        except BaseException:
            self._here.is_on_side = self._was
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._on_stream.__exit__(*error)
        finally:
            self._leave_device()
            self._here.is_on_side = self._was

    def _leave_device(self) -> None:
        if self._device is not None:
            self._device.__exit__(None, None, None)
