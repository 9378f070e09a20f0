"""How many bytes a device may hold, and how many it holds."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..base.errors import ConfigError, TensorRefError, TransferError, did_you_mean, nearest
from ..base.units import parse_nbytes, parse_share
from ..devices.base import Device

#: What a user may write for a budget: a number of bytes, a text, both by device, or nothing.
BudgetText = int | str | None
BudgetSetting = BudgetText | Mapping[str, BudgetText]

#: Failures after which an operator is tried elsewhere: memory is short, or a link fails.
SHORTAGES = (torch.OutOfMemoryError, TransferError)

_weakly = weakref.ref

#: Left to others of what is free, when no budget is given.
HEADROOM_SHARE = 0.10


class OutOfBudgetError(TensorRefError, torch.OutOfMemoryError):
    """Bytes do not fit on a device, even after every legal eviction.

    Cause: one operator needs more than the budget, or what fills the budget is held by running
    operators or by raw memory that was given away.

    Cure: raise `tensorsManager.budget`, or look at `tensorsManager.report()` to see what is held.
    Inside an operator it never reaches the program: the operator runs on the host instead.
    """

    def __init__(self, device: str, need_nbytes: int, limit_nbytes: int, held_nbytes: int) -> None:
        super().__init__(
            f"{device} out of memory. {need_nbytes:,} bytes are needed; {held_nbytes:,} of the "
            f"{limit_nbytes:,} budgeted are held and cannot be evicted. "
            "Raise TTR_BUDGET, or print tensorsManager.report() to see what holds them.",
            device=device,
            need_nbytes=need_nbytes,
            limit_nbytes=limit_nbytes,
            held_nbytes=held_nbytes,
        )


@dataclass(frozen=True)
class Budget:
    """The most bytes a device may hold, and where eviction starts and stops.

    Eviction starts when what is resident would pass the high watermark, and stops at the low one.
    Both are 1 unless asked otherwise: the budget is there to be filled.
    """

    limit_nbytes: int
    high_watermark: float = 1.0
    low_watermark: float = 1.0

    @functools.cached_property
    def high_nbytes(self) -> int:
        """Resident bytes up to which nothing is evicted."""
        return int(self.limit_nbytes * self.high_watermark)

    def excess_nbytes(self, resident_nbytes: int, incoming_nbytes: int = 0) -> int:
        """Bytes to evict before `incoming_nbytes` may enter; 0 below the high watermark."""
        after_nbytes = resident_nbytes + incoming_nbytes
        if after_nbytes <= self.limit_nbytes * self.high_watermark:
            return 0
        return max(after_nbytes - int(self.limit_nbytes * self.low_watermark), 0)


def resolve_budget(setting: BudgetSetting, device: Device) -> Budget:
    """Turn what the user wrote into the budget of one device.

    Parameters
    ----------
    setting : int, str, mapping or None
        Bytes; a size (`"6GiB"`) or a share of what the device can hold (`"25%"`); one of these by
        device name; None for what is free now less 10 percent.
    device : Device
        The device in question.

    Raises
    ------
    ConfigError
        The text is no size and no share, or the number is negative. Nothing has changed.
    """
    setting = setting_for(setting, device)
    if setting is None:
        free_nbytes = device.free_nbytes() + device.resident_nbytes
        return Budget(int(min(free_nbytes, device.capacity_nbytes) * (1 - HEADROOM_SHARE)))
    if isinstance(setting, str) and setting.strip().endswith("%"):
        return Budget(int(device.capacity_nbytes * parse_share(setting)))
    limit_nbytes = parse_nbytes(setting)
    if limit_nbytes < 0:
        raise ConfigError(f"A budget of {limit_nbytes} bytes is negative. Use a size like '6GiB'.")
    return Budget(min(limit_nbytes, device.capacity_nbytes))


def setting_for(setting: BudgetSetting, device: Device) -> BudgetText:
    """Return what a budget says of one device: by its name, by its kind, or of all of them."""
    if not isinstance(setting, Mapping):
        return setting
    for name in setting:
        kind = str(name).partition(":")[0]
        if kind not in ("cpu", "sim", "cuda", "hip", "xpu", "mps", "disk"):
            known = (device.name, device.kind, "cpu")
            raise ConfigError(
                f"The budget names a device {name!r} that does not exist. "
                + did_you_mean(str(name), known),
                name=str(name),
                known=known,
                nearest=nearest(str(name), known),
            )
    if device.name in setting:
        return setting[device.name]
    return setting.get(device.kind)
