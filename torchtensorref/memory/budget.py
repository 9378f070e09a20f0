"""How many bytes a device may hold, and how many it holds."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..base.device_names import kind_of
from ..base.errors import ConfigError, TensorRefError, TransferError, did_you_mean, nearest
from ..base.option_parsers import AUTO, amount, budget_by_device, parse_budget
from ..base.options import settings
from ..base.units import format_nbytes, parse_limit, parse_share
from ..devices.base import Device
from ..devices.host.limits import ram_limit_nbytes

#: What a user may write for a budget: a number of bytes, a text, both by device, or nothing.
BudgetText = int | str | None
BudgetSetting = BudgetText | Mapping[str, BudgetText]

#: Failures after which an operator is tried elsewhere: memory is short, or a link fails.
SHORTAGES = (torch.OutOfMemoryError, TransferError)

_weakly = weakref.ref

#: Left to others of what is free, when no budget is given.
HEADROOM_SHARE = 0.10

#: A budget that is so many times smaller than its device was hardly meant.
TINY = 1_000_000


class OutOfBudgetError(TensorRefError, torch.OutOfMemoryError):
    """Bytes do not fit on a device, even after every legal eviction.

    Cause: one operator needs more than the budget, or what fills the budget is held by running
    operators or by raw memory that was given away.

    Cure: raise `tensorsManager.budget`, or look at `tensorsManager.report()` to see what is held.
    Inside an operator it never reaches the program: the operator runs on the host instead.
    """

    def __init__(self, device: str, need_nbytes: int, limit_nbytes: int, held_nbytes: int) -> None:
        cure = "Raise the budget (tensorsManager.budget, or TTR_BUDGET)"
        if need_nbytes > limit_nbytes:
            why = f"the budget is {limit_nbytes:,}, so they can never fit. {cure}."
        else:
            why = (
                f"{held_nbytes:,} of the {limit_nbytes:,} budgeted are held and cannot be evicted. "
                f"{cure}, or print tensorsManager.report() to see what holds them."
            )
        super().__init__(
            f"{device} out of memory. {need_nbytes:,} bytes are needed; {why}",
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
        device name; None or `"auto"` for what is free now less 10 percent.
    device : Device
        The device in question.

    Raises
    ------
    ConfigError
        The text is no size and no share, or the number is negative. Nothing has changed.
    """
    setting = setting_for(setting, device)
    if setting is None:
        # Ours is what the ledger counts: plain tensors of this program stay where they are.
        ours_nbytes = device.resident_nbytes
        if device.shares_memory and device.kernels_allocate:
            ledger = device.ledger
            counted_nbytes = 0 if ledger is None else ledger.resident_nbytes
            ours_nbytes = min(ours_nbytes, counted_nbytes)
        free_nbytes = device.free_nbytes() + ours_nbytes
        return Budget(int(min(free_nbytes, device.capacity_nbytes) * (1 - HEADROOM_SHARE)))
    if isinstance(setting, str) and setting.strip().endswith("%"):
        return Budget(int(device.capacity_nbytes * parse_share(setting)))
    return Budget(min(parse_limit(setting), device.capacity_nbytes))


def budgets_of(devices: Iterable[Device], setting: BudgetSetting) -> list[tuple[Device, Budget]]:
    """Return each device with its budget by `resolve_budget`; None means the environment's."""
    setting = settings.budget if setting is None else setting
    return [(device, resolve_budget(setting, device)) for device in devices]


def read_budget(setting: BudgetSetting, in_use: Callable[[], Iterable[Device]]) -> BudgetSetting:
    """Take a budget apart that is a text for several devices; named ones need not be there yet.

    Parameters
    ----------
    setting : int, str, mapping or None
        What the user wrote.
    in_use : Callable
        Gives the accelerators, for amounts without names, which are in their order.

    Raises
    ------
    ConfigError
        An amount is no size and no share, a device has a name that none has, or there are not as
        many amounts as devices.
    """
    if isinstance(setting, str):
        if "," in setting and "=" not in setting:
            setting = budget_by_device(setting, ",".join(device.name for device in in_use()))
        return parse_budget(setting)
    if isinstance(setting, Mapping):
        seen: dict[str, object] = {}
        for name in setting:
            kind_of(str(name), where=", which the budget names")
            other = seen.setdefault(_canonical(name), name)
            if other is not name:
                raise ConfigError(
                    f"The budget names one device twice: {other!r} and {name!r}. Name each device "
                    "once.",
                    name=str(name),
                )
    for most in setting.values() if isinstance(setting, Mapping) else [setting]:
        if isinstance(most, str):
            amount(most)
        elif most is not None:
            parse_limit(most)
    return setting


def setting_for(setting: BudgetSetting, device: Device) -> BudgetText:
    """Return what a budget says of one device: by its name, by its kind, or of all of them.

    None is what is free there, less a margin.
    """
    if isinstance(setting, Mapping):
        setting = _said_of(setting, device)
    is_auto = isinstance(setting, str) and setting.strip().lower() == AUTO
    return None if is_auto else setting


def _said_of(setting: Mapping[str, BudgetText], device: Device) -> BudgetText:
    by_name = {_canonical(name): most for name, most in setting.items()}
    return next((by_name[name] for name in _names_of(device) if name in by_name), None)


def _canonical(name: object) -> str:
    kind, colon, rest = str(name).strip().lower().partition(":")
    return f"{'cuda' if kind == 'hip' else kind}{colon}{rest}"


def _names_of(device: Device) -> tuple[str, ...]:
    """What a budget may call a device, the most exact name first."""
    return device.name, device.name.removesuffix(":0"), device.kind


def unused_names(setting: BudgetSetting, devices: Iterable[Device]) -> list[str]:
    """Return the names in a budget that none of the devices in use has."""
    if not isinstance(setting, Mapping):
        return []
    in_use = {name for device in devices for name in _names_of(device)}
    return [str(name) for name in setting if _canonical(name) not in {*in_use, "cpu", "cpu:0"}]


def refuse_unused_names(setting: BudgetSetting, devices: Sequence[Device]) -> None:
    """Raise a ConfigError for a budget that names a device which is not in use."""
    for name in unused_names(setting, devices):
        known = tuple(device.name for device in devices)
        raise ConfigError(
            f"The budget names {name!r}, which is not in use. {did_you_mean(name, known)} "
            "Set tensorsManager.device first.",
            name=name,
            known=known,
            nearest=nearest(name, known),
        )


def warn_of_doubts(setting: BudgetSetting, devices: Sequence[Device], stacklevel: int) -> None:
    """Warn of each of `doubts_of`, as from a caller so far up."""
    for doubt in doubts_of(setting, devices):
        warnings.warn(doubt, RuntimeWarning, stacklevel=stacklevel + 1)


def doubts_of(setting: BudgetSetting, devices: Sequence[Device]) -> list[str]:
    """Say of a budget what in it has no effect, or hardly the one that was meant.

    Parameters
    ----------
    setting : int, str, mapping or None
        What the user wrote.
    devices : sequence of Device
        The accelerators in use.

    Returns
    -------
    list of str
        Sentences.
    """
    found = []
    in_use = ", ".join(device.name for device in devices) or "no accelerator"
    unused = unused_names(setting, devices)
    for name in unused:
        found.append(f"The budget of {name} has no effect: in use is {in_use}.")
    if unused and isinstance(setting, Mapping):
        found += [_without_one(d) for d in devices if _said_of(setting, d) is None]
    names = {_canonical(name) for name in setting} if isinstance(setting, Mapping) else set()
    if not names.isdisjoint({"cpu", "cpu:0"}):
        found.append(
            "The budget of cpu has no effect: what does not fit the accelerator stays in the "
            "host's memory, of which nothing is given back."
        )
    if setting not in (None, AUTO) and not isinstance(setting, Mapping) and not devices:
        found.append("The budget has no effect: no accelerator is in use.")
    for device in devices:
        found += _doubts_of_one(setting_for(setting, device), device)
    return found


def _without_one(device: Device) -> str:
    limit = format_nbytes(resolve_budget(None, device).limit_nbytes)
    return f"{device.name} has no budget, and may hold {limit}: set tensorsManager.budget."


def _doubts_of_one(setting: BudgetText, device: Device) -> Iterable[str]:
    limit_nbytes = resolve_budget(setting, device).limit_nbytes
    size, capacity = format_nbytes(limit_nbytes), format_nbytes(device.capacity_nbytes)
    is_share = isinstance(setting, str) and setting.strip().endswith("%")
    if 0 < limit_nbytes < device.capacity_nbytes / TINY:
        meant = f" Did you mean '{setting}GiB'?" if isinstance(setting, int) else ""
        yield f"The budget of {size} is next to nothing of {device.name}'s {capacity}.{meant}"
    if setting is not None and not is_share and parse_limit(setting) > device.capacity_nbytes:
        yield f"The budget of {device.name} is cut to the {capacity} that it has."
    if device.has_virtual_clock and limit_nbytes > ram_limit_nbytes():
        yield (
            f"{device.name} may hold {size}. It is simulated, so that is memory of this host, "
            f"which has {format_nbytes(ram_limit_nbytes())}: set a smaller budget."
        )
