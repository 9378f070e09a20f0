"""What our patches do around functions that read a tensor's memory in C++, without an operator.

A TensorRef has no memory there, so they get a plain tensor over the same bytes.
"""

from __future__ import annotations

from typing import Any

from .hooks import load


def on_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with plain tensors, which share the memory, in the place of TensorRefs."""
    ref_type = load(".tensor").TensorRef

    def plain(value: Any) -> Any:
        return value.exposed_plain(wrapped.__name__) if type(value) is ref_type else value

    return wrapped(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
