"""What our patches do where a call names a device that this torch cannot name.

Whatever takes part asks for the accelerator so, and gets ours; what is left out of injection gets a
plain tensor labelled cpu. Factories do the same by themselves (`factories.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch

from ..devices.accelerator.streams import note_streams
from ..interception.tracebacks import hides
from ..operators.layouts import SPARSE
from ..tensor.device_names import (
    canonical,
    is_foreign,
    note_asked,
    of_legacy_type,
    stand_in,
    take_out,
)
from .factories import _core, is_plain_world, takes_part, with_known_device
from .hooks import PACKAGE, is_disabled, is_ref, state

__tracebackhide__ = hides


def then_note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Have devices see the stream that this thread's operators go to from now on."""
    result = wrapped(*args, **kwargs)
    note_streams()
    return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_MODULES = "torch.nn.modules.module"


def _is_ours(device: Any) -> bool:
    return is_foreign(device) and state.active and not is_disabled.get()


def _caller() -> Any:
    """Name the module that calls the method around whose call this is asked."""
    frame: Any = _getframe(2)
    if frame.f_globals.get("__name__") == f"{PACKAGE}.tensor.attributes":
        frame = frame.f_back  # what it does there for a plain tensor is to call torch's
    return frame.f_globals.get("__name__")


def _known(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": "cpu"} if _is_ours(kwargs.get("device")) else kwargs


# -- tensors ---------------------------------------------------------------------------------------


def to_wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `Tensor.to`; a plain tensor whose program asks for the accelerator is adopted."""
    device, rest = take_out(args, kwargs)
    if not device or not (state.active and not is_disabled.get()):
        return wrapped(*args, **kwargs)
    return _labelled(wrapped, device, rest, instance, _caller())


def accelerator_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `Tensor.cuda` or `Tensor.xpu`: `Tensor.to` with a device that may be left out."""
    kind = wrapped.__name__
    given = dict(zip(("device", "non_blocking"), args, strict=False)) | kwargs
    device = given.pop("device", None)
    if device is None or isinstance(device, int):
        device = torch.device(kind, device or 0)
    if not _is_ours(device):
        return wrapped(*args, **kwargs)
    caller = _caller()
    return _labelled(instance.to, canonical(device), given, instance, caller)


def type_wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `Tensor.type`, whose argument may be `torch.cuda.FloatTensor`, or its name."""
    kind = args[0] if args else kwargs.get("dtype")
    if isinstance(kind, (str, type)) and state.active and not is_disabled.get():
        found = of_legacy_type(kind)
        if found is not None:
            caller = _caller()
            return _labelled(
                instance.to, canonical(found[0]), {"dtype": found[1]}, instance, caller
            )
    return wrapped(*args, **kwargs)


def _labelled(to: Any, device: str, rest: dict[str, Any], tensor: Any, caller: Any) -> Any:
    """Do what `tensor.to(device, **rest)` asks for; `to` is torch's own, bound to the tensor."""
    if is_ref(tensor):
        return tensor.to(device, **rest)
    if type(tensor) not in _PLAIN or not is_plain_world():
        return to("cpu", **rest)
    if caller == _OF_MODULES and takes_part(caller) and _became_ref(tensor):
        return tensor.to(device, **rest)
    copy = to("cpu", **{**rest, "copy": True})
    if not takes_part(caller):
        return copy
    ref = _core().manager.ownership.adopt_tensor(copy, sole=True)
    if ref is not copy:
        note_asked(ref, device)
    return ref


def _became_ref(tensor: Any) -> bool:
    """Whether a module's plain parameter could be adopted, as the same object.

    `module.to` puts what `.to` gives into the parameter's object if both are of one kind.
    """
    return type(tensor) is torch.nn.Parameter and bool(
        _core().manager.ownership.try_adopt_in_place(tensor)
    )


def likeness_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `Tensor.new_zeros` and its like; what is asked of the accelerator is adopted."""
    known = _known(kwargs)
    made = wrapped(*args, **known)
    if known is kwargs or not takes_part(_caller()):
        return made
    if not is_plain_world():
        return made
    ref = _core().manager.ownership.adopt_tensor(made, sole=True)
    if is_ref(ref):
        note_asked(ref, canonical(kwargs["device"]))
    return ref


# -- everything else -------------------------------------------------------------------------------


def on_known_device(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function whose result is sparse, or stays plain, with a label that it can have."""
    if state.active and not is_disabled.get():
        kwargs = with_known_device(kwargs)
    if wrapped.__name__ == "sparse_coo_tensor":
        with torch._C.DisableTorchFunction():  # a mode of the program's is not to see it
            kwargs = _with_size(args, kwargs)
    made = wrapped(*args, **kwargs)
    if not is_plain_world() or not takes_part(_getframe(1).f_globals.get("__name__")):
        return made
    return made if made.layout not in SPARSE else _core().manager.ownership.adopt_tensor(made)


def _with_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give a sparse tensor its size, which torch reads from the memory of its indices."""
    known: dict[str, Any] = dict(zip(("indices", "values", "size"), args, strict=False)) | kwargs
    indices: Any = known.get("indices")
    if "size" in known or not getattr(indices, "_ttr_block", None) or indices.dim() != 2:
        return kwargs
    sizes = (indices.amax(1).long() + 1).tolist() if indices.numel() else [0] * indices.size(0)
    return {**kwargs, "size": (*sizes, *getattr(known.get("values"), "shape", (0,))[1:])}


def generator_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a `torch.Generator`: what the accelerator draws, the host's generator draws for it."""
    if args and _is_ours(args[0]):
        args = ("cpu", *args[1:])
    return wrapped(*args, **_known(kwargs))


def on_readable_name(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that hands a device on (`Module.to`), with a name that torch can read."""
    if args and _is_ours(args[0]):
        args = (stand_in(args[0]), *args[1:])
    if _is_ours(kwargs.get("device")):
        kwargs = {**kwargs, "device": stand_in(kwargs["device"])}
    return wrapped(*args, **kwargs)


def storage_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `UntypedStorage.to`: `torch.load` is given functions that say `storage.cuda()`."""
    device = args[0] if args else kwargs.get("device")
    return instance.clone() if _is_ours(device) else wrapped(*args, **kwargs)


def keep_at_home(serialization: Any) -> Callable[[], None]:
    """Have `torch.load` leave at home what a file, or `map_location`, puts on the accelerator."""

    def restore(storage: Any, location: str) -> Any:
        return storage if _is_ours(location) else None

    registry = serialization._package_registry
    before = list(registry)
    # Lower comes first: torch's own rule for cuda (20) would refuse.
    serialization.register_package(5, lambda storage: None, restore)
    (ours,) = (row for row in registry if row not in before)

    def undo() -> None:
        registry.remove(ours)

    return undo
