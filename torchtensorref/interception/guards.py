"""May torch be bypassed here? Who would miss an operator that we run without torch.

Between a call and our `dispatch` torch asks several layers in turn, any of which may record the
operator, replace it, or change its operands. Whoever runs an operator earlier, or by other means,
asks `may_bypass` whether one of them is active in this thread. The parameters say which of them
matter at the place that asks:

===================  ==============  ========  =========  ========================================
who asks             function modes  autocast  observers  why
===================  ==============  ========  =========  ========================================
a method of the ref  yes             yes [1]_  yes        nobody was asked yet
an override [2]_     no              yes       yes        torch asks function modes before it
another formula      no              no        no         the operator runs through torch all the
                                                          same: only what transforms it matters
a region             yes             no        [3]_       it casts inside as outside
`dispatch`           --              --        `watch`    below all of them
===================  ==============  ========  =========  ========================================

.. [1] Not for arithmetic: autocast knows none of those operators.
.. [2] `autograd/overrides.py`: above autograd, below function modes.
.. [3] It looks for itself: for more than observers of operators.

Whether autograd would record the call is another question (`records_gradient`), since the answers
go different ways: a method steps aside for autograd, a formula is there for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
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

_NOTHING = nullcontext()


def may_bypass(function_modes: bool = True, autocast: bool = True, observers: bool = True) -> bool:
    """Whether an operator may run now, in this thread, without torch's layers seeing it.

    Parameters
    ----------
    function_modes : bool, optional
        Function modes have not been asked yet.
    autocast : bool, optional
        Autocast may know the operator.
    observers : bool, optional
        Those who only look on matter: `torch.jit.trace`, and our own checks and traces.

    Notes
    -----
    Dispatch modes, transforms of functorch and forward gradients always matter. A transform does
    not transform a TensorRef, but wraps what kernels return meanwhile. Every operator asks: written
    flat, and to be called by keyword although Python is not told so, which takes it 60 ns longer.
    """
    return not (
        _dispatch_modes()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
        or (observers and (watch.on or _is_tracing()))
        or (function_modes and _function_modes())
        or (autocast and _is_autocast())
    )


def below_function_modes() -> AbstractContextManager[Any]:
    """Keep what is done from the function modes of this thread: they have seen what it is for.

    Torch takes the mode that it asks off their stack meanwhile, but one can put itself back there
    (`torch.overrides.redispatch_function`).
    """
    return torch._C.DisableTorchFunction() if _function_modes() else _NOTHING


def records_gradient(tensors: Iterable[Any]) -> bool:
    """Whether autograd would record a call with these operands."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def may_exchange_formula(tensors: Iterable[Any]) -> bool:
    """Whether the operator may take another formula for its gradient than torch's own.

    It may not where something transforms the operator, or an operand is of a class of its own.
    """
    return may_bypass(function_modes=False, autocast=False, observers=False) and all(
        type(tensor) in _plain_or_ref() for tensor in tensors
    )


@functools.cache
def _plain_or_ref() -> tuple[type, ...]:
    return (torch.Tensor, torch.nn.Parameter, TensorRef)
