"""Operators that take functions: control flow (`torch.cond`), attention with a function (flex).

Torch asks a class of tensors for a rule for each of them. Ours is to run it on plain tensors at
home, where its functions meet nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map

from ..memory.manager import tensorsManager


def run_higher_order(ref_type: type, op: Any, args: Any, kwargs: Any) -> Any:
    """Run what is no plain operator on plain tensors at home."""

    def plain(value: Any) -> Any:
        return tensorsManager.plain_at_home(value) if type(value) is ref_type else value

    def wrapped(value: Any) -> Any:
        return tensorsManager.adopt(value) if type(value) is torch.Tensor else value

    return tree_map(wrapped, op(*tree_map(plain, args), **tree_map(plain, kwargs)))


def install(ref_type: type, keys: tuple[str, ...]) -> None:
    """Give torch the rule for each such operator, which is not to look at keys of ours."""
    known: dict[str, HigherOrderOperator] = torch._ops._higher_order_ops
    ours = [torch._C._dispatch_key_parse(key) for key in keys]
    # Those that are made later start from this list.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.extend(ours)
    for op in known.values():
        for key in ours:
            op.fallthrough(key)
        if ref_type not in op.python_key_table:
            op.py_impl(ref_type)(functools.partial(_rule, ref_type, op))


def _rule(ref_type: type, op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    return run_higher_order(ref_type, op, args, kwargs)
