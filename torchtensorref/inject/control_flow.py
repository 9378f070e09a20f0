"""What our patches do around `torch.cond` and `while_loop`, which torch compiles as a whole.

Every torch does so with a function of its own by which they are known here; where that is done has
another name in each of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..base.interrupts import lets_program_run
from . import hooks


@lets_program_run
def _cond(condition: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return true_fn(*operands) if condition else false_fn(*operands)


@lets_program_run
def _while_loop(cond_fn: Any, body_fn: Any, carried: Any, additional: Any) -> Any:
    while cond_fn(*carried, *additional):
        carried = body_fn(*carried, *additional)
    return carried


_IN_PYTHON: dict[str, Callable[..., Any]] = {
    "_cond_op_wrapper": _cond,
    "_while_loop_op_wrapper": _while_loop,
}


def in_python(function: Any) -> Callable[..., Any] | None:
    """Return what does in Python what torch would compile here; None for all other functions."""
    if not str(getattr(function, "__module__", "")).startswith("torch._higher_order_ops."):
        return None
    return _IN_PYTHON.get(getattr(function, "__name__", ""))


def around(compiled: Any, run: Callable[..., Any]) -> Any:
    """Return a function that runs control flow on TensorRefs in Python, all other compiled."""

    @functools.wraps(compiled)
    @lets_program_run
    def call(*operands: Any) -> Any:
        from torch.utils._pytree import tree_leaves

        core = sys.modules.get(f"{hooks.PACKAGE}.memory.ref")
        if core is None or all(
            not isinstance(leaf, core.TensorRef) for leaf in tree_leaves(operands)
        ):
            return compiled(*operands)
        return run(*operands)

    return call
