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
from torch.utils._pytree import tree_iter, tree_map

from ..base.activation import watch
from ..base.listeners import listeners
from ..devices.base import Device
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEY_NAME
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan, plan_of
from .by_value import run_with_numbers
from .guards import below_function_modes
from .higher_order import run_higher_order
from .onlookers.passing import deliver, note_written, pass_onlookers
from .ready_path import SLOW, WAYS, known_peak
from .recorded_inside import as_it_was_called, below_autograd, key_of_kernel, run_kernel
from .slow_path import SlowPath
from .tracebacks import shorten
from .watched_path import run_watched

_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_mode = torch._C._get_dispatch_mode
_is_inference_mode = torch.is_inference_mode_enabled
#: A view of what wants gradients says so, too, where its making is noted.
_Sees = torch._C._SetExcludeDispatchKeyGuard
#: What kernels raise, before they write: mistakes of the program's own.
_OF_KERNELS = (RuntimeError, IndexError, ValueError, TypeError)
#: Of these, what comes at any line, and what composite operators find in what they have written.
_AFTER_WRITING = (RecursionError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
#: What parts of a composite operator lead to: versions, views, and what is caught above autograd.
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_OURS = torch._C._dispatch_key_parse(KEY_NAME)


def dispatch(
    op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None, *, as_one: bool = False
) -> Any:
    """Run one operator in which at least one operand is a TensorRef; a composite one `as_one`."""
    try:
        with below_function_modes():
            try:
                plan = op._ttr_plan
            except AttributeError:
                if not isinstance(op, OpOverload):
                    return run_higher_order(op, args, kwargs or {})
                plan = plan_of(op)
            if _dispatch_modes():
                return _below_dispatch_modes(op, types, args, kwargs)
            if plan.reading is not None:
                plan = plan.of_call(args, kwargs or {})
            if plan.is_recorded_inside:
                key = key_of_kernel(plan, args, kwargs or {})
                if key is not None:
                    return run_kernel(op, key, args, kwargs or {})
                with below_autograd(op):  # in C++ nothing is shut out yet
                    return _run(plan, args, kwargs)
            in_parts = (
                plan.comes_in_parts
                and _is_inference_mode()
                and not as_one
                and _is_for_parts(plan, args, kwargs)
            )
            if in_parts:
                with as_it_was_called(op), _Sees(_VIEWS, False), _Sees(_OURS, False):
                    # Not `decompose`: some operators have another in Python, preferred there.
                    return op._op_dk(_COMPOSITE, *args, **(kwargs or {}))
            if plan.has_kernel_in_python and core.library is None:
                with below_autograd(op):
                    return _run(plan, args, kwargs)
            return _run(plan, args, kwargs)
    except BaseException as error:
        _left_halfway(op, args, kwargs or {}, error)
        shorten(error)
        raise


def _run(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    if watch.on:
        return pass_onlookers(plan, args, kwargs or {}, take_usual_path)
    result = _run_short(plan, args, kwargs)
    return _take_slow_path(plan, args, kwargs or {}) if result is SLOW else result


def _is_for_parts(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a composite operator is taken apart that comes whole, as they do in inference mode.

    Torch's composite asks which operand wants gradients, also where none are noted (a matrix that
    does is multiplied with rows laid out anew, another in batches), and plain tensors do not say:
    it has to be taken apart, as autograd does elsewhere. Nor is it one view that it makes of normal
    tensors, nor one write: it is its parts that count their versions, and whose views are views.
    And its parts are ready where it is not, since its result may be an operand, or a view. Where a
    rule knows its peak, it is made of the same either way (`operators/peaks.py`); nested tensors
    have another one.
    """
    tensors = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return not any(x.is_nested for x in tensors) and known_peak(plan, args, kwargs or {}) is None


def _left_halfway(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Any) -> None:
    """Note an error that may have come at any line of ours, also after a kernel has written."""
    tensorsManager.doubt()
    listeners.deliver_beside(error)
    plan = getattr(op, "_ttr_plan", None)
    if plan is not None and not plan.is_recorded_inside and may_have_written(error):
        note_written(plan.of_call(args, kwargs), args, kwargs)


def may_have_written(error: BaseException) -> bool:
    """Whether an operator that ends in an error may have written: kernels refuse before they do."""
    return not isinstance(error, _OF_KERNELS) or isinstance(error, _AFTER_WRITING)


def take_usual_path(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Device | None
) -> Any:
    """Run an operator that is looked on at as if it were not, or where it was placed."""
    if placed is None and not watch.is_slow:
        result = _run_short(plan, args, kwargs)
        if result is not SLOW:
            return result
    return _take_slow_path(plan, args, kwargs, placed)


def _run_short(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a ready operator, or one that lacks only numbers, or that is to be told; else `SLOW`."""
    way = WAYS[plan.ready_way]
    if way is None or (plan.minds_labels and tensorsManager.residency.books.labels_differ):
        return SLOW
    result = way(plan, args, kwargs)
    if result is SLOW:
        result = run_with_numbers(plan, args, kwargs)
    return run_watched(plan, args, kwargs) if result is SLOW else result


def _take_slow_path(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Device | None = None
) -> Any:
    """Run an operator in six phases; tell what it has done."""
    result = _kept_from_modes(SlowPath(plan, args, kwargs, tensorsManager, placed))
    if listeners.waiting:
        deliver(plan, args, kwargs)
    return result


def _kept_from_modes(call: SlowPath) -> Any:
    is_view = call.plan.op.is_view and torch.is_inference_mode_enabled()
    if is_view and not call.args[0].is_inference():
        # Also in inference mode a view of a normal tensor is normal: autograd counts its versions.
        with torch.inference_mode(False):
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
        if not isinstance(value, TensorRef) or has_proxy_slot(value, tracer):
            return value
        return tensorsManager.ownership.exposed_plain(value, "a constant of a traced graph")

    return tree_map(constant, arguments)
