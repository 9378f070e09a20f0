"""Devices that this torch cannot name: who says "cuda" on a build without it, or "sim", gets ours.

The label is then `cpu`. Here is what counts as such a name, and how it is taken out of a call; what
calls there are is in `protocols.py` for TensorRefs, and in `inject` for everything else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base.errors import ConfigError
from ..devices.registry import REAL_KINDS

#: What a program may name a device by.
_NAMES = (str, int, torch.device)

#: The arguments of `Tensor.to` that may be given by position, where the first is a device, and
#: where it is another tensor.
_OF_TO = ("device", "dtype", "non_blocking", "copy")
_OF_TO_OTHER = ("other", "non_blocking", "copy")


def can_carry(kind: str) -> bool:
    """Whether this torch can make tensors that say they are on such a device."""
    if kind in ("cpu", "meta"):
        return True
    module = getattr(torch, kind, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


@functools.cache
def _is_foreign(device: Any) -> bool:
    if isinstance(device, int):
        return not torch.accelerator.is_available()
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return str(device).partition(":")[0] == "sim"
    return not can_carry(kind)


def is_foreign(device: Any) -> bool:
    """Whether a device is an accelerator that this torch cannot make tensors on."""
    return isinstance(device, _NAMES) and not isinstance(device, bool) and _is_foreign(device)


def names_any_accelerator(device: Any) -> bool:
    """Whether a device is a foreign one that is no name of ours either: not "sim:1", nor 1."""
    is_ours = isinstance(device, int) or str(device).startswith("sim")
    return not is_ours and is_foreign(device)


def name_of_index(index: int, names: list[str]) -> str:
    """Return which of the accelerators in use has an index: in its name, or as its place.

    Raises
    ------
    ConfigError
        None has; those in use are named.
    """
    have_indices = any(name.rpartition(":")[2].isdecimal() for name in names)
    by_index = {name.rpartition(":")[2]: name for name in reversed(names)}
    if not have_indices:
        by_index = {str(place): name for place, name in enumerate(names)}
    if isinstance(index, bool) or str(index) not in by_index:
        raise ConfigError(
            f"No accelerator in use has the index {index!r}. Known: {', '.join(names)}. Name one "
            "of these, or set tensorsManager.device to a list that has it.",
            name=str(index),
            known=tuple(names),
        )
    return by_index[str(index)]


@functools.cache
def canonical(device: Any) -> str:
    """A foreign device by its full name: "cuda", "cuda:0" and 0 are the same."""
    name = f"{_a_kind()}:{device}" if isinstance(device, int) else str(device)
    return name if ":" in name else f"{name}:0"


def stand_in(device: Any) -> Any:
    """A device that torch can read, and that is foreign too: for "sim", which it cannot."""
    if names_any_accelerator(device):
        return device
    index = str(device).rpartition(":")[2]
    return torch.device(_a_kind(), int(index) if index.isdecimal() else 0)


def _a_kind() -> str:
    # No build of torch carries all of them.
    return next(kind for kind in REAL_KINDS.values() if not can_carry(kind))


def asked_of(tensor: Any) -> str | None:
    """Return the foreign device where the program takes a TensorRef to be: all of its memory is."""
    block = getattr(tensor, "_ttr_block", None)
    return None if block is None else block.asked


def note_asked(tensor: Any, device: str | None) -> None:
    """Note where the program takes a TensorRef to be that nothing else shares memory with."""
    block = getattr(tensor, "_ttr_block", None)
    if block is not None:
        block.asked = device


def says_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name the host in words.

    A device may be that of another tensor (`x.to(y.device)`), whose label says nothing.
    """
    device = args[0] if args else kwargs.get("device")
    return isinstance(device, str) and device.partition(":")[0] == "cpu"


def take_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Take a foreign device, or a tensor that is taken to be there, out of those of `Tensor.to`.

    Returns
    -------
    (str, dict)
        Its full name and the other arguments by their names; ("", {}) where there is none.
    """
    device = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(device, torch.Tensor) and (asked := asked_of(device)):
        rest = dict(zip(_OF_TO_OTHER, args, strict=False)) | kwargs
        return asked, {"dtype": rest.pop("other").dtype, **rest}
    if not is_foreign(device):
        return "", {}
    rest = dict(zip(_OF_TO, args, strict=False)) | kwargs
    del rest["device"]
    return canonical(device), rest


def of_legacy_type(kind: Any) -> tuple[str, torch.dtype] | None:
    """The foreign device and the dtype of `torch.cuda.FloatTensor`, or of its name."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    package, _, legacy = name.rpartition(".")
    device = package.removeprefix("torch.")
    if not package.startswith("torch.") or device not in REAL_KINDS or not is_foreign(device):
        return None
    like = getattr(torch, legacy, None)
    return None if like is None else (device, like.dtype)
