"""What our patches do around functions that read a tensor's memory in C++, without an operator.

A TensorRef has no memory there, so they get a plain tensor over the same bytes.
"""

from __future__ import annotations

from typing import Any

from ..base.interrupts import lets_program_run
from .hooks import load


def on_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with plain tensors, which share the memory, in the place of TensorRefs."""
    TensorRef = load(".memory.ref").TensorRef

    def plain(value: Any) -> Any:
        return value.exposed_plain(wrapped.__name__) if type(value) is TensorRef else value

    return wrapped(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


@lets_program_run
def in_python(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run control flow on TensorRefs as Python would, where torch compiles it as a whole."""
    from torch.utils._pytree import tree_leaves

    function, operands, *_ = args
    run = _CONTROL.get(function.__name__)
    TensorRef = load(".memory.ref").TensorRef
    if run is None or all(type(leaf) is not TensorRef for leaf in tree_leaves(operands)):
        return wrapped(*args, **kwargs)
    return run(*operands)


@lets_program_run
def _cond(condition: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return true_fn(*operands) if condition else false_fn(*operands)


@lets_program_run
def _while_loop(cond_fn: Any, body_fn: Any, carried: Any, additional: Any) -> Any:
    while cond_fn(*carried, *additional):
        carried = body_fn(*carried, *additional)
    return carried


_CONTROL = {"_cond_op_wrapper": _cond, "_while_loop_op_wrapper": _while_loop}


def legacy_instance(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Say whether a tensor is a `torch.FloatTensor` or the like: of that dtype, on that device."""
    asked = args[0]
    if type(asked) is load(".memory.ref").TensorRef:
        # The class looks at keys of dispatch, of which a TensorRef has more.
        return wrapped(load(".tensor.protocols").empty_like(asked))
    return wrapped(*args, **kwargs)
