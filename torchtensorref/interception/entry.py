"""What torch calls for every operator that meets a TensorRef: from here on, read top-down.

`dispatch` tries two paths. Where every operand is ready nothing has to be decided: the ready path
(`ready_path.py`) takes no lock but the one that counts a result, makes no event and asks nobody.
Everything else takes the slow path (`slow_path.py`), whose six phases can do all that there is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..base.activation import watch
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan, plan_of
from .by_value import run_with_numbers
from .higher_order import run_higher_order
from .ready_path import SLOW, WAYS
from .slow_path import SlowPath
from .tracebacks import shorten

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_mode = torch._C._get_dispatch_mode
#: What kernels raise, before they write: mistakes of the program's own.
_OF_KERNELS = (RuntimeError, IndexError, ValueError, TypeError)
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def dispatch(op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run one operator in which at least one operand is a TensorRef."""
    try:
        try:
            plan = op._ttr_plan
        except AttributeError:
            if not isinstance(op, OpOverload):
                return run_higher_order(op, args, kwargs or {})
            plan = plan_of(op)
        if _dispatch_modes():
            return _below_dispatch_modes(op, types, args, kwargs)
        way = WAYS[plan.ready_way]
        if (
            way is not None
            and not watch.on
            and not (plan.minds_labels and tensorsManager.residency.books.labels_differ)
        ):
            result = way(plan, args, kwargs)
            if result is SLOW and not _function_modes():
                result = run_with_numbers(plan, args, kwargs)
            if result is not SLOW:
                return result
        return _take_slow_path(plan, args, kwargs or {})
    except BaseException as error:
        _left_halfway(op, args, kwargs or {}, error)
        shorten(error)
        raise


def _left_halfway(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Any) -> None:
    """Note an error that may have come at any line of ours, also after a kernel has written.

    Torch counts the versions of what an operator writes once it has ended. If it has not, what
    autograd has saved would be taken for what it was.
    """
    tensorsManager.doubt()
    plan = getattr(op, "_ttr_plan", None)
    if plan is None or not plan.writes:
        return
    if isinstance(error, _OF_KERNELS) and not isinstance(error, RecursionError):
        return
    values = tree_leaves([plan.argument(name, args, kwargs) for name in plan.write_names])
    torch.autograd.graph.increment_version(
        [x for x in values if isinstance(x, torch.Tensor) and not x.is_inference()]
    )


def _take_slow_path(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator in six phases, kept from the modes of this thread."""
    call = SlowPath(plan, args, kwargs, tensorsManager)
    if plan.op.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        # Also in inference mode a view of a normal tensor is normal: autograd counts its versions.
        with torch.inference_mode(False):
            return call.run()
    if _function_modes():
        # They have seen the call already. What the runtime does to storages is not for them.
        with torch._C.DisableTorchFunction():
            return call.run()
    return call.run()


def _below_dispatch_modes(op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator that dispatch modes have seen and left to us, without them.

    Plain tensors over bytes that may be evicted, and what the runtime does to storages, are not for
    them.
    """
    tracer = _get_mode(_PROXY)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        if tracer is None:
            return dispatch(op, types, args, kwargs)
        args, kwargs = _with_constants(tracer.tracer, (args, kwargs or {}))
    return op(*args, **kwargs)


def _with_constants(tracer: Any, arguments: Any) -> Any:
    """Exchange TensorRefs that a tracer has not made for plain tensors, constants to it.

    A subclass is none: the call would be missing in the graph.
    """
    from torch.fx.experimental.proxy_tensor import has_proxy_slot

    def constant(value: Any) -> Any:
        if type(value) is not TensorRef or has_proxy_slot(value, tracer):
            return value
        return tensorsManager.ownership.exposed_plain(value, "a constant of a traced graph")

    return tree_map(constant, arguments)
