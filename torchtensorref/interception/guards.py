"""Who has to see an operator beside us: autograd, modes, transforms, traces, callbacks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base.activation import watch
from ..memory.ref import TensorRef

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_is_autocast = torch._C._is_any_autocast_enabled
_is_tracing = torch._C._is_tracing
_forward_ad = torch.autograd.forward_ad


def somebody_looks() -> bool:
    """Whether anybody but autograd has to see an operator that runs now in this thread.

    Function modes are not among them: torch asks those before an operator comes to us.
    """
    return (
        watch.on
        or _dispatch_modes() > 0
        or _is_tracing()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
        or _is_autocast()
    )


def is_method_seen() -> bool:
    """Whether anybody but autograd has to see the method of a TensorRef that is called now.

    Autocast is not among them: it knows few operators. A transform of functorch transforms no
    TensorRef, but wraps what kernels return meanwhile. Written out: every operator asks.
    """
    return (
        watch.on
        or _dispatch_modes() > 0
        or _is_tracing()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
        or _function_modes() > 0
    )


def is_watched(tensors: Any) -> bool:
    """Whether a formula of plain torch cannot stand for an operator's: a transform, a mode.

    What looks on without another formula of its own (a trace, autocast, callbacks) is no reason.
    """
    return (
        _dispatch_modes() > 0
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
        or any(type(tensor) not in _plain_or_ref() for tensor in tensors)
    )


def would_be_noted(tensors: Any) -> bool:
    """Whether autograd would note a call with these operands."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _plain_or_ref() -> tuple[type, ...]:
    return (torch.Tensor, torch.nn.Parameter, TensorRef)
