"""Operators whose kernels in Python are made of operators that autograd records, counts and views.

A library that gives torch no formula for an operator leaves it to autograd to look into its kernel.
So where a gradient is noted, or the operator writes or returns what it is given, that kernel runs
on the TensorRefs themselves. Else it runs on plain tensors, as others do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..base.interrupts import lets_program_run
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEY_NAME
from ..memory.ref import TensorRef, is_plain
from ..operators.plan import OpPlan
from ..operators.python_kernels import has_kernel, is_for_accelerators, recorded_inside
from ..operators.substitutes import itself
from .guards import records_gradient

_Sees = torch._C._SetExcludeDispatchKeyGuard
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_as_at_first: Any = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
_parse = torch._C._dispatch_key_parse
_OURS = _parse(KEY_NAME)
_forward_ad = torch.autograd.forward_ad
_AUTOCAST = {
    name: torch._C.DispatchKeySet(_parse(name))
    for name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS")
}
#: Where autograd, autocast and we are shut out, this is.
_SNAPSHOT = torch._C.DispatchKey.PythonTLSSnapshot


def key_of_kernel(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key of the kernel that is to run on a call's TensorRefs; None if none is.

    It is that of the device where the program takes them to be.
    """
    refs = [ref for ref in tree_leaves((args, kwargs)) if isinstance(ref, TensorRef)]
    op = itself(plan.op)
    is_noted = records_gradient(refs) or _forward_ad._current_level >= 0
    declares = any(argument.alias_info is not None for argument in op._schema.arguments)
    if not (is_noted or (declares and not is_for_accelerators(op))):
        return None
    types = {ref.device.type for ref in refs} - {"cpu"}
    return recorded_inside(op, types.pop() if types else "cpu") if len(types) < 2 else None


@lets_program_run
def run_kernel(op: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel on TensorRefs; what it makes beside us is adopted."""

    def wrapped(value: Any) -> Any:
        is_adopted = is_plain(value) and not value.requires_grad
        return tensorsManager.adopt(value) if is_adopted else value

    with as_it_was_called(op), _Sees(_OURS, False):
        return tree_map(wrapped, op._op_dk(key, *args, **kwargs))


@contextmanager
def below_autograd(op: Any) -> Iterator[None]:
    """Let a kernel on plain tensors find what the program has switched on, but for autograd."""
    with as_it_was_called(op), torch._C._AutoDispatchBelowADInplaceOrView():
        yield


@contextmanager
def as_it_was_called(op: Any) -> Iterator[None]:
    """Undo that torch shuts out autograd, autocast and us where it calls a subclass's Python.

    An operator that autocast knows has had its turn: its kernel runs without.
    """
    if core.library is not None or not _is_excluded(_SNAPSHOT) or not _was_first():
        yield
        return
    done = torch._C.DispatchKeySet.from_raw_repr(0)
    for name, keys in _AUTOCAST.items():
        done = done | keys if has_kernel(op, name) else done
    with _as_at_first(), torch._C._ExcludeDispatchKeyGuard(done):
        yield


def _was_first() -> bool:
    """Whether it is us that torch has called first, and saved the state for.

    Where a mode or another class has called us, it is their Python that all of it is shut out from,
    in plain torch, too. A mode is not on the stack meanwhile, and torch ends in an error of its own
    if the state from before comes back. Of a class nothing but the frames tell.
    """
    with _as_at_first():
        if _is_included(torch._C.DispatchKey.Python):
            return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True
