"""Operators that take functions: control flow (`torch.cond`), attention with a function (flex).

Torch asks a class of tensors for a rule for each of them. Ours is to run it on plain tensors at
home: its functions then see nothing but plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map

from ..base.interrupts import lets_program_run
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef, is_plain


@lets_program_run
def run_higher_order(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that takes functions, on plain tensors at home."""

    def plain(value: Any) -> Any:
        return (
            tensorsManager.ownership.plain_at_home(value) if isinstance(value, TensorRef) else value
        )

    def wrapped(value: Any) -> Any:
        return tensorsManager.adopt(value) if is_plain(value) else value

    return tree_map(wrapped, op(*tree_map(plain, args), **tree_map(plain, kwargs)))


def install(*key_names: str) -> Callable[[], None]:
    """Give torch the rule for each such operator; return what takes it back.

    Our dispatch keys (`autograd/overrides.py`, `csrc/entry.h`) are not for them: they fall through.
    In C++ a TensorRef is no subclass to torch, and the functions are run on TensorRefs.
    """
    known: list[HigherOrderOperator] = list(torch._ops._higher_order_ops.values())
    keys = [torch._C._dispatch_key_parse(name) for name in key_names]
    # Operators that are made later start from this list.
    later = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    later += keys
    for op in known:
        for key in keys:
            op.fallthrough(key)
        op.py_impl(TensorRef)(functools.partial(_rule, op))

    def undo() -> None:
        for key in keys:
            later.remove(key)
        for op in known:
            for key in keys:
                op.non_fallthrough_keys = op.non_fallthrough_keys.add(key)
            del op.python_key_table[TensorRef]

    return undo


def _rule(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    return run_higher_order(op, args, kwargs)
