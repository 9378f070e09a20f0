"""What torch calls for every operator that meets a TensorRef, and the fast path through it.

Where every operand is ready on the accelerator nothing has to be decided, so nobody is asked: no
lock but the one that counts a result, no manager, no flattening, no event. What is not plain enough
for that goes through the six phases of `op_call.py`, which can do everything.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .budget import SHORTAGES
from .costs import operator_cost
from .devices.base import Device
from .manager import tensorsManager
from .op_call import OpCall
from .schema import OpPlan, plan_of
from .views import KEYS, make_ref
from .world import watch

#: Returned by the fast path where the operator has to take the long way. Nothing has happened then.
SLOW = object()

_NO_KWARGS: dict[str, Any] = {}
_Tensor = torch.Tensor
_strided = torch.strided
_is_inference_mode = torch.is_inference_mode_enabled
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_make_wrapper = torch.Tensor._make_wrapper_subclass


def dispatch(
    ref_type: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run one operator in which at least one operand is a TensorRef."""
    try:
        plan = op._ref_plan
    except AttributeError:
        if not isinstance(op, OpOverload):
            return _run_higher_order(ref_type, op, args, kwargs or {})
        # On the operator itself: the dictionary would hash it, in Python, at every call.
        plan = op._ref_plan = plan_of(op)  # type: ignore[attr-defined]
    if _dispatch_modes():
        # They have seen the call and left it to us. Plain tensors over bytes that move, and what
        # the runtime does to storages, are not for them.
        tracer = _get_mode(_PROXY)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if tracer is None:
                return dispatch(ref_type, op, types, args, kwargs)
            args, kwargs = _with_constants(ref_type, tracer.tracer, (args, kwargs or {}))
        return op(*args, **kwargs)
    if (
        plan.is_fast
        and not watch.on
        # A result may be asked for on another device, the meta device for one.
        and (not kwargs or not (plan.has_kwarg_tensors or "device" in kwargs))
    ):
        first = args[0]
        if plan.is_list_first and first:
            first = first[0]
        residency: Any = tensorsManager._residency  # open: there is a TensorRef
        if (
            type(first) is ref_type
            and first._d is first._b.ready
            and (first._d is residency.fast_device or first._d is residency.fast_host)
        ):
            run = _view if plan.is_true_view else _run_ready
            result = run(ref_type, plan, args, kwargs or _NO_KWARGS, residency, first)
            if result is not SLOW:
                return result
    if plan.op.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        # Also there, a view of a normal tensor is a normal tensor: autograd counts its versions.
        with torch.inference_mode(False):
            return OpCall(ref_type, plan, args, kwargs or {}, tensorsManager).run()
    if _function_modes():
        # They have seen the call; what the runtime does for it, to storages, is not for them.
        with torch._C.DisableTorchFunction():
            return OpCall(ref_type, plan, args, kwargs or {}, tensorsManager).run()
    return OpCall(ref_type, plan, args, kwargs or {}, tensorsManager).run()


def _run_ready(
    ref_type: Any, plan: OpPlan, args: tuple[Any, ...], kwargs: Any, residency: Any, first: Any
) -> Any:
    """Run an operator whose operands are all ready on the accelerator; `SLOW` if one is not."""
    device = first._d
    if plan.is_list_first:
        list_length = len(args[0])
        args = (*args[0], *args[1:])
    if first._b.nbytes >= plan.fast_below_nbytes:
        return SLOW
    ident = get_ident()
    hazards = residency.hazards
    outer = hazards.get(ident)
    # Announce first, look second: an evictor closes first and looks second (Movement._seize), so
    # that one of the two sees the other.
    hazards[ident] = args if outer is None else outer + args
    try:
        plain_args = []
        tick = residency.tick
        for arg in args:
            if type(arg) is ref_type:
                block = arg._b
                if block.ready is not device or arg._d is not device:
                    return SLOW
                block.last_use = tick
                plain_args.append(arg._t)
            elif isinstance(arg, _Tensor) and (arg.dim() or type(arg) is not _Tensor):
                return SLOW
            else:
                plain_args.append(arg)
        writes = plan.writes
        if writes and not first._b.owned:
            return SLOW
        if plan.is_list_first:
            plain_args[:list_length] = [plain_args[:list_length]]
        residency.tick = tick + 1
        out = (plan.op if _function_modes() else plan.binding)(*plain_args, **kwargs)
        if device.is_simulated:
            _charge(ref_type, plan, args, plain_args, kwargs, out, device)
        if writes:
            return first
        if plan.is_number:
            device.record().synchronize()  # the host waits for what it reads
            return out
        if out.layout is not _strided or out.is_quantized or out.is_nested:
            return out  # no bytes of its own to move: it stays plain
        return _wrap(ref_type, out, residency.born(out, device), device, first)
    except SHORTAGES:
        return SLOW
    except (RuntimeError, IndexError, ValueError):
        if device.torch_device.type == "cpu":
            raise  # the host has the same kernels: it is the program's own mistake
        return SLOW  # the host may have a kernel for it
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def _view(
    ref_type: Any, plan: OpPlan, args: tuple[Any, ...], kwargs: Any, residency: Any, first: Any
) -> Any:
    """Address arithmetic on a ready operand. No announcement: no kernel reads its bytes.

    An evictor may empty the storage meanwhile; then torch refuses the view, or the view is of a
    storage that is filled again before anybody reads it.
    """
    if _is_inference_mode() and not first.is_inference():
        return SLOW
    try:
        out = (plan.op if _function_modes() else plan.binding)(first._t, *args[1:], **kwargs)
    except RuntimeError:
        return SLOW  # the program's own mistake is raised again on the long way
    if type(out) is not _Tensor:
        if type(out) is not list and type(out) is not tuple:
            return SLOW  # a view that is another subclass
        block, device = first._b, first._d
        return type(out)([_wrap(ref_type, part, block, device, first) for part in out])
    if ref_type.labels_vary or not out.is_contiguous() or out.storage_offset():
        return make_ref(ref_type, out, first._b, first._d, first.device)
    ref = _make_wrapper(ref_type, out.size(), dtype=out.dtype, _extra_dispatch_keys=KEYS)
    if (1 in out.size() or 0 in out.size()) and out.stride() != ref.stride():
        # Contiguous, but what it strides over dimensions of size 1, or nothing, can be anything.
        return make_ref(ref_type, out, first._b, first._d, first.device)
    ref._b = first._b
    ref._t = out
    ref._d = first._d
    return ref


def _wrap(ref_type: Any, out: torch.Tensor, block: Any, device: Device, like: Any) -> Any:
    """Make the TensorRef of a result: with few arguments, so in half the time, where they do."""
    # Some solvers give results that are still to be conjugated.
    if (
        ref_type.labels_vary
        or not out.is_contiguous()
        or out.storage_offset()
        or (out.is_complex() and out.is_conj())
    ):
        return make_ref(ref_type, out, block, device, like.device)
    ref = _make_wrapper(ref_type, out.size(), dtype=out.dtype, _extra_dispatch_keys=KEYS)
    if (1 in out.size() or 0 in out.size()) and out.stride() != ref.stride():
        return make_ref(ref_type, out, block, device, like.device)
    ref._b = block
    ref._t = out
    ref._d = device
    return ref


def _charge(
    ref_type: Any,
    plan: OpPlan,
    args: tuple[Any, ...],
    plain_args: list[Any],
    kwargs: Any,
    out: Any,
    device: Device,
) -> None:
    """Let a simulated device spend the time that the operator takes."""
    flops, nbytes, dtype_name = operator_cost(plan, plain_args, kwargs, out)
    bases = [arg._b.base_on(device) for arg in args if type(arg) is ref_type]
    writes = bases[:1] if plan.writes else ()
    device.after_operator(bases, writes, flops=flops, nbytes=nbytes, dtype_name=dtype_name)


def _with_constants(ref_type: Any, tracer: Any, arguments: Any) -> Any:
    """Put plain tensors, which a tracer keeps as constants, in the place of what it has not made.

    It takes no subclass for a constant, and would leave the call out of what it writes down.
    """
    from torch.fx.experimental.proxy_tensor import has_proxy_slot

    def constant(value: Any) -> Any:
        if type(value) is not ref_type or has_proxy_slot(value, tracer):
            return value
        return value.exposed_plain("a constant of a traced graph")

    return tree_map(constant, arguments)


def _run_higher_order(ref_type: type, op: Any, args: Any, kwargs: Any) -> Any:
    """Run what is no plain operator (control flow, flex attention) on plain tensors at home."""

    def plain(value: Any) -> Any:
        return tensorsManager.plain_at_home(value) if type(value) is ref_type else value

    def wrapped(value: Any) -> Any:
        return tensorsManager.adopt(value) if type(value) is torch.Tensor else value

    return tree_map(wrapped, op(*tree_map(plain, args), **tree_map(plain, kwargs)))
