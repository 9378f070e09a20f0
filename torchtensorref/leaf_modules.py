"""Modules that are one operator: called with a TensorRef, they take the fast path at once.

Most of what a transformer calls is `nn.Linear`. On the way to its operator a call passes the
module's `forward`, two lookups of parameters, torch's argument parser, its dispatcher and the call
back into Python. Where none of them has anything to do, because nobody listens to the module, no
gradient is noted and nobody else looks on, the operator runs at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from .composites import of_linear
from .fast_path import SLOW, attach_plan, run_one
from .leaf_calls import leaves
from .onlookers import is_method_seen

aten = torch.ops.aten

_linear = attach_plan(aten.linear.default)
_Linear = nn.Linear


def _if_torchs_own(function: Any, module: Any) -> Any:
    """Return a function that torch's module wrote; None for what somebody has put in its place."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == module.__file__ else None


#: What a call of the module comes to, unless somebody has put his own there, before us or since.
_forward = _if_torchs_own(nn.Linear.forward, nn.modules.linear)
_call_impl = _if_torchs_own(nn.Linear._call_impl, module_hooks)
_get_attribute = _if_torchs_own(nn.Linear.__getattr__, module_hooks)
_function = torch._C._nn.linear
_own, _inherited = vars(nn.Linear), vars(nn.Module)  # as they are at any time
_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch._C._is_any_autocast_enabled


def run_linear(module: Any, x: Any) -> Any:
    """Run an `nn.Linear`, if nothing speaks against it.

    Returns
    -------
    TensorRef or NotImplemented
        `x @ weight.T + bias`, of shape (..., out_features). Where it has to go torch's way,
        `NotImplemented`: nothing has happened then.
    """
    attributes = module.__dict__
    try:
        if _is_heard_or_changed(module, attributes):
            return NotImplemented
        parameters = attributes["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
    except KeyError:  # torch has words for a module that is not whole
        return NotImplemented
    ref_type = type(x)
    if type(weight) is not ref_type or (bias is not None and type(bias) is not ref_type):
        return NotImplemented
    if is_method_seen() or _is_autocast():
        return NotImplemented
    operands = (x, weight) if bias is None else (x, weight, bias)
    if _is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return NotImplemented
    run = run_one if of_linear(x, weight, bias) == 0 else _linear.way
    result = run(ref_type, _linear, operands, None)
    return NotImplemented if result is SLOW else result


def _is_heard_or_changed(module: Any, attributes: dict[str, Any]) -> bool:
    """Whether somebody listens to a module, or has put something in the place of a part of it."""
    return bool(
        type(module) is not _Linear
        or _Linear.forward is not _forward
        or _Linear._call_impl is not _call_impl
        or functional.linear is not _function
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_forward_hooks
        or module_hooks._global_backward_pre_hooks
        or module_hooks._global_backward_hooks
        # These come before the method and the parameters.
        or "forward" in attributes
        or "weight" in attributes
        or "bias" in attributes
        # And these are asked for the parameters.
        or _Linear.__getattr__ is not _get_attribute
        or "weight" in _own
        or "bias" in _own
        or "weight" in _inherited
        or "bias" in _inherited
    )


def install(ref_type: Any) -> None:
    """Have modules that are one operator come here."""
    leaves.run_linear = run_linear
    leaves.ref_type = ref_type
