"""Names to devices. Nothing is opened before it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import forking
from ..base.device_names import no_such_device
from ..base.errors import ConfigError, did_you_mean, nearest
from ..base.options import settings
from .base import Device
from .host.device import HostDevice
from .sim.cards import DEFAULT_SPEC_NAME, SPECS
from .sim.device import SimDevice
from .sim.faults import FaultPlan
from .sim.host_costs import HostCosts, host_costs_of
from .sim.machine import Machine
from .sim.spec import DeviceSpec

if TYPE_CHECKING:
    import torch

__all__ = ["accelerators", "default_name", "known_devices", "reset", "resolve", "spec_of"]

#: Kinds that torch's device-generic interface serves. "hip" is what its users call it.
REAL_KINDS = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu", "mps": "mps"}

_lock = forking.RLock()
_devices: dict[str, Device] = {}
#: One virtual host for all simulated devices whose specs describe the same host.
_machines: dict[tuple[float, float, float | None], Machine] = {}
#: Specs that users gave, by the first part of their device's name.
_given: dict[str, DeviceSpec] = {}


def resolve(what: str | torch.device | DeviceSpec | Device) -> Device:
    """Find a device, or make it; the same name gives the same object.

    Parameters
    ----------
    what : str, torch.device, DeviceSpec or Device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``, ``"sim"``, ``"sim:1"``,
        ``"sim:rx6600xt"``, ``"sim:rx6600xt:1"``; a torch device; a spec of a device to be
        simulated (one device per spec); a device, which is given back.

    Returns
    -------
    Device
        The one device of that name.

    Raises
    ------
    ConfigError
        If there is no such device; the message names the nearest one, or says what this
        torch lacks and what to do.
    """
    if isinstance(what, Device):
        if isinstance(what, SimDevice) and what.knows_host:
            _plug_in(what)
        return what
    with _lock:
        if isinstance(what, DeviceSpec):
            return _simulated_from(what)
        name = str(what).strip().lower()
        found = _devices.get(name)
        if found is None:
            found = _devices[name] = _open(name)
        return found


def spec_of(what: str | DeviceSpec, host: str | Path | HostCosts | None = None) -> DeviceSpec:
    """Return the spec of a simulated device, by name or as it is.

    Parameters
    ----------
    what : str or DeviceSpec
        ``"rtx4060"``, ``"sim:h200"``, or a spec.
    host : str, Path or HostCosts, optional
        A processor that it is plugged into, whose time for management is counted (`HOST_COSTS`).

    Raises
    ------
    ConfigError
        There is none of that name; the nearest is named.
    """
    if isinstance(what, SimDevice):
        what = what.spec
    if not isinstance(what, DeviceSpec):
        if not isinstance(what, str) or not what.strip():
            raise ConfigError(
                f"{what!r} is no simulated device. Write a name such as 'rtx4060' or 'sim:h200', "
                "or give a DeviceSpec.",
                name=str(what),
            )
        name = what.strip()
        found = resolve(name if name.startswith("sim") else f"sim:{name}")
        assert isinstance(found, SimDevice)
        what = found.spec
    return what if host is None else what.scaled(host_costs=host_costs_of(host))


def accelerators(setting: Any) -> list[Device]:
    """Return the accelerators that a setting names: one or several of `resolve`, None the default.

    The host among them is left out: it is always there.

    Raises
    ------
    ConfigError
        There is no such device, none is named, or one is named twice.
    """
    if setting is None:
        setting = settings.device or default_name()
    names: Sequence[Any]
    if isinstance(setting, str):
        names = setting.split(",")
        if len(names) > 1 and not all(map(str.strip, names)):
            raise ConfigError(f"The devices {setting!r} have a comma too many.", name=setting)
    else:
        names = setting if isinstance(setting, (list, tuple)) else [setting]
    if not names:
        raise ConfigError("No device is named. Write 'cpu' to use no accelerator.")
    found = [resolve(name) for name in names]
    for device in found:
        if found.count(device) > 1:
            raise ConfigError(
                f"{device.name} is named twice among the devices. Name each once.", name=device.name
            )
    return [device for device in found if not device.is_host]


def default_name() -> str:
    """The name of the accelerator that torch finds, else ``"sim"``.

    Of several the one that torch is on, or a launcher has given to this process, else the one with
    the most memory free.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in REAL_KINDS:
        return "sim"
    from .accelerator.driver_memory import default_index

    module = torch.get_device_module(accelerator.type)
    if int(getattr(module, "device_count", lambda: 1)()) < 2:
        return accelerator.type
    current = torch.accelerator.current_device_index()
    return f"{accelerator.type}:{default_index(module, current)}"


def known_devices() -> list[Device]:
    """Every device that has been asked for, each once."""
    with _lock:
        return list({id(device): device for device in _devices.values()}.values())


def known_names() -> list[str]:
    """What a device may be called, but for numbers."""
    return ["cpu", *REAL_KINDS, "sim", *(f"sim:{spec}" for spec in (*SPECS, *_given))]


def reset() -> None:
    """Forget every device but the host, so that the next `resolve` makes new ones (for tests)."""
    with _lock:
        host = _devices.get("cpu")
        _devices.clear()
        if host is not None:  # the one that is in use
            _devices["cpu"] = host
        _machines.clear()
        _given.clear()


def _open(name: str) -> Device:
    kind, _, rest = name.partition(":")
    if kind == "cpu" and rest in ("", "0"):
        return _same_as("cpu", name) or HostDevice()
    if kind == "sim":
        return _open_simulated(name, rest)
    if kind in REAL_KINDS and (not rest or rest.isdecimal()):
        return _open_real(name, kind, int(rest or 0))
    raise no_such_device(name, known_names())


def _same_as(canonical: str, asked: str) -> Device | None:
    """The device that has the canonical name already."""
    return None if canonical == asked else resolve(canonical)


def _open_simulated(name: str, rest: str) -> Device:
    """Read ``[spec][:index]``; plain "sim" is the default spec's first device."""
    spec_name, colon, index = rest.rpartition(":") if ":" in rest else (rest, "", "")
    if not colon and rest.isdecimal():
        spec_name, index = "", rest
    if index and not index.isdecimal():
        raise ConfigError(f"{name!r} has no number after the last colon. Write 'sim:h200:1'.")
    specs = {**SPECS, **_given}
    spec = specs.get(spec_name or DEFAULT_SPEC_NAME)
    if spec is None:
        are_several = " Several devices are separated by commas." if {*name} & {*"; "} else ""
        raise ConfigError(
            f"There is no simulated device {spec_name!r}. {did_you_mean(spec_name, specs)} "
            f"Or give a DeviceSpec of your own.{are_several}",
            name=spec_name,
            known=tuple(specs),
            nearest=nearest(spec_name, specs),
        )
    prefix = f"sim:{spec_name}" if spec_name else "sim"
    canonical = f"{prefix}:{int(index or 0)}"
    return _same_as(canonical, name) or _simulate(spec, int(index or 0), canonical)


def _simulated_from(spec: DeviceSpec) -> Device:
    """The device of a spec that a user gave; equal specs are one device."""
    key = spec.name.lower()
    known = {**SPECS, **_given}.get(key)
    number = 2
    while known is not None and known != spec:
        key = f"{spec.name.lower()}-{number}"
        known, number = _given.get(key), number + 1
    if known is None:
        _given[key] = spec
    return resolve(f"sim:{key}")


def _plug_in(device: SimDevice) -> None:
    """Charge what runs at home to the host of a device that a user has made."""
    host = resolve("cpu")
    assert isinstance(host, HostDevice)
    host.plug_in(device.machine)


def _simulate(spec: DeviceSpec, index: int, name: str) -> Device:
    host_figures = (
        spec.host_memory_bytes_per_s,
        spec.host_flops_per_s,
        spec.host_kernel_bytes_per_s,
    )
    machine = _machines.get(host_figures)
    if machine is None:
        machine = _machines[host_figures] = Machine.of(spec)
        host = resolve("cpu")
        assert isinstance(host, HostDevice)
        host.machines.append(machine)
    return SimDevice(
        spec,
        index,
        machine=machine,
        name=name,
        poison=settings.poison,
        faults=FaultPlan.parse(settings.faults),
    )


def _open_real(name: str, called: str, index: int) -> Device:
    kind = REAL_KINDS[called]
    canonical = f"{kind}:{index}"
    if called != kind:
        from .accelerator.vendor import module_of

        module_of(kind, called)  # where there is none, that is said by its name
    same = _same_as(canonical, name)
    if same is not None:
        return same
    from .accelerator.device import AcceleratorDevice

    return AcceleratorDevice(kind, index)
