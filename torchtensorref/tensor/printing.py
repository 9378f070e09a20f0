"""How a TensorRef prints: as torch prints a plain tensor of the same class."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef

_str_intern = torch._tensor_str._str_intern
_add_suffixes = torch._tensor_str._add_suffixes


def text_of(ref: Any, tensor_contents: str | None) -> str:
    """Return what `Tensor.__repr__` gives; no operator of the program, and nothing moves."""
    limits = _limits()
    kind = type(ref)
    is_plain = kind in (Tensor, nn.Parameter, TensorRef)
    name = "tensor" if is_plain else kind.__name__
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        if ref._ttr_block.promise is not None:
            text = f"{name}(promised, size={tuple(ref.size())}, dtype={ref.dtype})"
        else:
            printed = _printed(ref, tensor_contents)
            if not is_plain:
                printed = printed.as_subclass(_class_named(name))
            text = str(_str_intern(printed, tensor_contents=tensor_contents))
    if _limits() != limits:  # another thread has set others: what it prints may not be read
        return text_of(ref, tensor_contents)
    suffix = _suffix_of(ref)
    if suffix:
        text = str(_add_suffixes(text[:-1], [suffix], len(name) + 1, force_newline=False))
    if not is_plain and isinstance(ref, nn.Parameter):
        return f"Parameter({text})"
    return f"Parameter containing:\n{text}" if getattr(ref, "_is_param", False) else text


def _printed(ref: Any, tensor_contents: str | None) -> Tensor:
    """Return a plain tensor that prints as a TensorRef, but for its class and its gradient."""
    if tensor_contents is None and ref.device.type == "meta":
        return torch.empty_strided(ref.size(), ref.stride(), device="meta")
    threshold, edge = _limits()
    is_long = tensor_contents is None and ref.numel() > threshold
    # Torch reads the ends of each dimension of what is long, and nothing else.
    return tensorsManager.ownership.peek(ref, edge=edge if is_long else 0)


def _limits() -> tuple[float, int]:
    """Return from how many elements on torch prints the ends only, and how many at each end."""
    options = torch._tensor_str.PRINT_OPTS
    return options.threshold, options.edgeitems


@functools.cache
def _class_named(name: str) -> type[Tensor]:
    """Return a class that torch prints by that name, and of which nothing else is the program's."""
    disabled = torch._C._disabled_torch_function_impl
    return type(name, (Tensor,), {"__torch_function__": disabled})


def _suffix_of(ref: Any) -> str:
    """Say of a gradient what torch says at the end."""
    try:
        node = ref.grad_fn
    except RuntimeError:  # a view that gradients must not go through, since its memory was written
        return "grad_fn=<Invalid>"
    if node is None:
        return "requires_grad=True" if ref.requires_grad else ""
    name = node.name().rsplit("::", 1)[-1] if type(node).__name__ == "CppFunction" else ""
    return f"grad_fn=<{name or type(node).__name__}>"
