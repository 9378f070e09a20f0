"""What a device can do: allocate, free, copy, wait. It knows nothing of the meaning of tensors.

torch is imported inside functions only, so that devices can be listed where there is none.

May import: base.
"""

from __future__ import annotations

from .base import DONE, Device, DoneEvent, Event
from .host.device import HostDevice
from .registry import default_name, known_devices, reset, resolve
from .sim.cards import SPECS
from .sim.device import SimDevice
from .sim.spec import DeviceSpec

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
