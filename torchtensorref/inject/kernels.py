"""What happens when a program gives an operator a kernel: what was known of it is asked anew."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .hooks import PACKAGE
from .patches import Patch


def on_kernel(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take a kernel."""
    result = wrapped(*args, **kwargs)
    op = args[0] if args else kwargs["op_name"]
    name = op if isinstance(op, str) else op.name()
    forget(instance.ns, name.rpartition("::")[2])
    return result


def on_removal(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove the kernels of a library."""
    kernels = list(args[1] if instance is None else instance._op_impls)
    result = wrapped(*args, **kwargs)
    for kernel in kernels:
        space, name, _ = kernel.split("/")
        forget(space, name)
    return result


def forget(space: str, name: str) -> None:
    """Forget what is known of an operator, if it has been asked."""
    base, _, overload = name.partition(".")
    # Torch makes what it is asked for.
    packet = vars(vars(torch.ops).get(space, torch.ops)).get(base)
    op = None if packet is None else vars(packet).get(overload or "default")
    if op is not None:
        vars(op).pop("_ttr_plan", None)
    cpp = sys.modules.get(f"{PACKAGE}.interception.cpp_path")
    if cpp is not None:
        cpp.forget(f"{space}::{base}", overload)


_NEW = "an operator that has run may be another one now"
OF_KERNELS = (
    Patch("torch.library", "Library.impl", on_kernel, _NEW),
    Patch("torch.library", "Library._destroy", on_removal, _NEW),
    Patch("torch.library", "_del_library", on_removal, _NEW),
)
