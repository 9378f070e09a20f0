"""What our patches do around functions that read a tensor's memory in C++, without an operator.

A TensorRef has no memory there, so they get a plain tensor over the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hooks import is_ref, load


def on_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with plain tensors, which share the memory, in the place of TensorRefs."""
    TensorRef = load(".memory.ref").TensorRef

    def plain(value: Any) -> Any:
        return value.exposed_plain(wrapped.__name__) if isinstance(value, TensorRef) else value

    return wrapped(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def legacy_instance(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Say whether a tensor is a `torch.FloatTensor` or the like: of that dtype, on that device."""
    asked = args[0]
    if is_ref(asked):
        # The class looks at keys of dispatch, of which a TensorRef has more.
        return wrapped(load(".tensor.protocols").empty_like(asked))
    return wrapped(*args, **kwargs)


def export_plain(exporter: Any) -> Callable[[], None]:
    """Give the exporter of traced graphs to ONNX plain parameters; return what undoes it."""
    by_name = exporter._get_named_param_dict

    def of_plain(graph: Any, parameters: Any) -> Any:
        ownership = load(".memory.manager").tensorsManager.ownership
        return by_name(graph, [ownership.peek(p) if is_ref(p) else p for p in parameters])

    def undo() -> None:
        exporter._get_named_param_dict = by_name

    exporter._get_named_param_dict = of_plain
    return undo
