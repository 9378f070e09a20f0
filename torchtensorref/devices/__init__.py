"""What a device can do; knows nothing of the meaning of tensors."""

from __future__ import annotations

from .base import DONE, Device, DoneEvent, Event
from .host import HostDevice
from .registry import default_name, known_devices, reset, resolve
from .sim import SimDevice
from .sim_spec import SPECS, DeviceSpec

__all__ = [
    "DONE",
    "SPECS",
    "Device",
    "DeviceSpec",
    "DoneEvent",
    "Event",
    "HostDevice",
    "SimDevice",
    "default_name",
    "known_devices",
    "reset",
    "resolve",
]
