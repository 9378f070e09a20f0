"""Views of a TensorRef that run without autograd's part of torch: two tables.

As `methods.py` for arithmetic: where no gradient is noted and nobody else looks on, a view is made
at once, and linked to its base only when somebody can tell (`late_links.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .bindings import BINDINGS
from .late_links import late_view
from .manager import tensorsManager
from .onlookers import is_method_seen
from .views import labelled

aten = torch.ops.aten

Method = Callable[..., Any]

_Tensor = torch.Tensor
_dtype = torch.dtype
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode = torch.is_inference_mode_enabled
_is_forward_noted = torch._C._is_fwd_grad_enabled


def _look(ref_type: Any, run: Method, otherwise: Method) -> Method:
    """Make what makes a view: `run` on the plain tensor, or `otherwise` the whole way.

    Written out flat, like `fast_path.run_one`.
    """

    def look(self: Any, *args: Any, **options: Any) -> Any:
        is_inference = _is_inference_mode()
        if not (
            options
            or _is_grad_enabled()
            or is_method_seen()
            or labelled.otherwise
            or is_inference is not self.is_inference()
            # Off inside a function of autograd, which hangs a node on what that returns.
            or not (is_inference or _is_forward_noted())
            or (args and type(args[0]) is _dtype)
            or type(self) is not ref_type
        ):
            block, device = self._b, self._d
            residency: Any = tensorsManager._residency
            # No announcement, as in `fast_path._view`: no kernel reads its bytes.
            if block.ready is device and (
                device is residency.fast_device or device is residency.fast_host
            ):
                try:
                    out = run(self._t, *args)
                except (RuntimeError, IndexError, TypeError, ValueError):
                    return otherwise(self, *args)  # which says so of itself
                return late_view(ref_type, self, out, block, device, is_inference)
        return otherwise(self, *args, **options)

    return look


# -- as methods -----------------------------------------------------------------------------------


def _method(name: str, ref_type: Any) -> Method:
    whole = getattr(_Tensor, name)
    return _look(ref_type, whole, whole)


def _if_dense(name: str, ref_type: Any) -> Method:
    """Make `reshape`, which copies what it cannot look at; it can where elements lie in order."""
    look, whole = _method(name, ref_type), getattr(_Tensor, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return (look if self.is_contiguous() else whole)(self, *args, **options)

    return method


#: Method and how it is made. Not `__getitem__`: a class that has one in Python is a sequence to C,
#: and torch would look for the elements of a number.
METHODS: tuple[tuple[str, Callable[[str, Any], Method]], ...] = (
    ("view", _method),
    ("reshape", _if_dense),
    ("transpose", _method),
    ("permute", _method),
    ("unsqueeze", _method),
    ("squeeze", _method),
    ("expand", _method),
)


# -- as operators, which torch's own C++ calls with a late view (`x[1:]`, `torch.t`) ---------------


def _view(plain: torch.Tensor, sizes: Any) -> torch.Tensor:
    """Call `view` with sizes one by one: given a list, it tries another overload first."""
    return plain.view(*sizes) if sizes else plain.view(sizes)


def _slice(
    plain: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """Slice by `narrow`, which is quicker, and wants bounds that are positions."""
    if step != 1:
        sliced: torch.Tensor = aten.slice.Tensor(plain, dim, start, end, step)
        return sliced
    size = plain.size(dim)
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    end = size if end is None else min(max(end + size if end < 0 else end, start), size)
    return plain.narrow(dim, start, end - start)


#: Operator, and what runs it on a plain tensor.
OPERATORS: dict[OpOverload, Method] = {
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    **{
        op: BINDINGS[op]
        for op in (
            aten.select.int,
            aten.unsqueeze.default,
            aten.transpose.int,
            aten.permute.default,
            aten.t.default,
        )
    },
}


def looks(ref_type: Any) -> dict[str, Callable[[Method], Method]]:
    """Return, by operator, what makes of its long way a way that makes views of late views."""
    return {op.name(): functools.partial(_look, ref_type, run) for op, run in OPERATORS.items()}


def install(ref_type: Any) -> None:
    """Put the methods of the table on the class of TensorRefs."""
    for name, make in METHODS:
        method = functools.wraps(getattr(_Tensor, name))(make(name, ref_type))
        setattr(ref_type, name, method)
