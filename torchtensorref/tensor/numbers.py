"""Values that C++ reads without an operator: `tolist`, and numbers in a list that becomes a tensor.

A TensorRef has no memory there, so it is read by a plain look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from ..interception.tracebacks import hides
from ..memory.manager import tensorsManager
from ..memory.ref import is_ref
from .attributes import asks_its_class
from .patched_function import PatchedFunction

__tracebackhide__ = hides

#: Left out where C++ fills a tensor from a list, together with all keys of ours.
_LEFT_OUT = torch._C.DispatchKey.Python
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def _values_of(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that reads values; `torch.func` may have wrapped what it is called on."""
    inner = instance
    while _functorch.is_gradtrackingtensor(inner):
        inner = _functorch.get_unwrapped(inner)
    if not is_ref(inner) or asks_its_class(inner):
        return wrapped(*args, **kwargs)
    with torch._C._DisableFuncTorch():
        plain = tensorsManager.ownership.peek(inner, edge=0)
        return getattr(plain, wrapped.__name__)(*args, **kwargs)


def _number_of(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `Tensor.__float__` or the like; an operator reads the number where it comes to us."""
    if _is_excluded(_LEFT_OUT):
        return _values_of(wrapped, instance, args, kwargs)
    return wrapped(*args, **kwargs)


_READERS = {
    "tolist": _values_of,
    "__bool__": _number_of,
    "__complex__": _number_of,
    "__float__": _number_of,
    "__index__": _number_of,
    "__int__": _number_of,
}


def attach() -> Callable[[], None]:
    """Have every tensor read so, since `torch.func` wraps TensorRefs in others; return the undo."""
    for name, read in _READERS.items():
        setattr(Tensor, name, PatchedFunction(getattr_static(Tensor, name), read))

    def undo() -> None:
        for name in _READERS:
            delattr(Tensor, name)

    return undo
