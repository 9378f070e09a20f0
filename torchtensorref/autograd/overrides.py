"""Operators that torch's C++ treats otherwise for a wrapper, caught above autograd: a table.

Dispatch sees an operator below autograd, so it cannot change which formula autograd takes for the
gradient, nor an operator that C++ takes apart before it arrives. Autograd's C++ asks whether a
tensor is a subclass, and if it is, takes another formula: as good, but other bits. A TensorRef
therefore carries one dispatch key more than other tensors have, above autograd. For the operators
in the table it leads here; for all others it falls through inside torch and costs nothing.

The table is not part of `operators.table`: what it says is how torch's C++ treats a subclass, not
what an operator does, and each treatment acts through autograd.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..base.activation import watch
from ..interception.entry import dispatch
from ..interception.guards import (
    below_function_modes,
    may_bypass,
    may_exchange_formula,
    records_gradient,
)
from ..interception.onlookers.passing import pass_onlookers
from ..interception.ready_path import SLOW, WAYS
from ..interception.tracebacks import hides, shorten
from ..interception.watched_path import run_promised, run_ready_or_watched
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEY_NAME, KEYS
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan, plan_of
from ..operators.table import ROWS
from .formulas import (
    Treatment,
    gradient_of_plain,
    masked_fill,
    masked_fill_in_place,
    product,
    several_of,
    then_copied,
)

aten = torch.ops.aten

__tracebackhide__ = hides

# -- operators that C++ takes apart -------------------------------------------------------------


def plain_arguments(op: OpOverload, *positions: int) -> Treatment:
    """Treat an operator so that arguments, which C++ reads by their address, are plain tensors."""
    names = {op._schema.arguments[position].name for position in positions}

    def treat(*args: Any, **kwargs: Any) -> Any:
        return op(
            *(_readable(arg) if at in positions else arg for at, arg in enumerate(args)),
            **{key: _readable(arg) if key in names else arg for key, arg in kwargs.items()},
        )

    return treat


def _max_pool1d(*args: Any, **kwargs: Any) -> Any:
    """Have it pick as with gradients, where it reads nothing itself: the same numbers."""
    return aten.max_pool1d_with_indices.default(*args, **kwargs)[0]


def _set_to_part(tensor: Any, source: Any, offset: Any, size: Any, stride: Any = ()) -> Any:
    """`set_` to a part of a tensor: C++ would ask it for a storage, and a TensorRef has none."""
    with torch.no_grad():
        part = source.as_strided(size, stride or torch.empty(size, device="meta").stride(), offset)
        return aten.set_.source_Tensor(tensor, part)


def _readable(value: Any) -> Any:
    return tensorsManager.ownership.peek(value) if isinstance(value, TensorRef) else value


def _can_replace(tensor: Any, other: Any) -> bool:
    """Refuse `tensor.data = other` where what stays plain would have the memory of a TensorRef."""
    if isinstance(other, TensorRef) and not isinstance(tensor, TensorRef):
        return False
    return bool(aten._has_compatible_shallow_copy_type.default(tensor, other))


def _observe(
    tensor: Any,
    observer_on: Any,
    fake_quant_on: Any,
    running_min: Any,
    running_max: Any,
    scale: Any,
    zero_point: Any,
    *how: Any,
    **named: Any,
) -> Any:
    """Give the statistics of quantization-aware training their size: the kernel would do it.

    What it resizes is memory of ours.
    """
    channels, is_by_channel = how[3], how[4] if len(how) > 4 else named.get("per_row_fake_quant")
    if is_by_channel and not running_min.numel():
        count = tensor.size(channels)
        for statistic, start in ((running_min, math.inf), (running_max, -math.inf)):
            statistic.resize_(count).fill_(start)
        scale.resize_(count)
        zero_point.resize_(count)
    found = (running_min, running_max, scale, zero_point)
    op = aten.fused_moving_avg_obs_fake_quant.default
    return op(tensor, observer_on, fake_quant_on, *found, *how, **named)


def whole(name: str) -> Treatment:
    """Treat a composite operator as one: what it writes it may resize and fill behind dispatch."""

    def treat(*args: Any, **kwargs: Any) -> Any:
        op = _overload(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if records_gradient(tensors) or not may_exchange_formula(tensors):
            return op(*args, **kwargs)
        result = dispatch(op, (), args, kwargs, as_one=True)
        torch.autograd.graph.increment_version(several_of(result))
        return result

    return treat


def _as_one(op: OpOverload) -> Treatment:
    """Call a composite operator as one, so that its formula is that for plain tensors.

    Where autograd notes the call it has to see the parts.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        are_plain = all(not isinstance(t, TensorRef) for t in tensors)
        if are_plain or records_gradient(tensors) or not may_exchange_formula(tensors):
            return op(*args, **kwargs)
        return dispatch(op, (), args, kwargs, as_one=True)

    return call


def _values_alone(op: OpOverload) -> Treatment:
    """Treat an operator that finds the vectors, too, for a subclass: by another algorithm."""
    one = _as_one(op)

    def treat(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        return (op if records_gradient(tensors) else one)(*args, **kwargs)

    return treat


#: What torch names the last node of a loss with smoothed labels.
_smoothed_loss = gradient_of_plain(
    _as_one(aten.cross_entropy_loss.default), "AddBackward0", guards_result=False
)


def _cross_entropy(
    tensor: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Sum the weights of smoothed labels as for plain tensors: without those that are ignored."""
    is_other = weight is not None and label_smoothing > 0
    loss = _smoothed_loss if is_other else aten.cross_entropy_loss.default
    return loss(tensor, target, weight, reduction, ignore_index, label_smoothing)


def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """Refuse classes that there are none of, as for plain tensors; promises cannot be looked at."""
    promises = tensorsManager.promises
    is_promised = promises is not None and promises.take_part(tensor)
    op = aten.one_hot.default
    return (op if is_promised else _as_one(op))(tensor, num_classes)


@functools.cache
def _overload(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(aten, base), overload)
    return found


def composites_with_out() -> list[str]:
    """Return the names of the operators with `out=` that torch composes of others in C++."""
    found = []
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        library, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if library == "aten" and overload:
            schema = torch._C._get_schema(f"aten::{base}", overload)
            if any(argument.is_out for argument in schema.arguments):
                found.append(name)
    return found


def ahead(op: OpOverload) -> Treatment:
    """Make the kernel of a composite operator: as one where autograd has nothing to note."""
    any_plan = plan_of(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        plan = any_plan if any_plan.reading is None else any_plan.of_call(args, kwargs)
        is_noted = WAYS[plan.ready_way] is None or _is_noted(args)
        result = SLOW
        if not is_noted and may_bypass(function_modes=False):
            result = run_ready_or_watched(plan, args, kwargs)
        elif not is_noted and _is_only_looked_on_at():
            result = pass_onlookers(plan, args, kwargs, _ready_or_slow)
        if result is not SLOW:
            return result
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            return op(*args, **kwargs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            with below_function_modes():
                return run(*args, **kwargs)
        except BaseException as error:
            tensorsManager.doubt()  # it may have come at any line
            shorten(error)
            raise

    return kernel


def _is_only_looked_on_at() -> bool:
    """Whether the operator may run here but for somebody who wants to be told of it."""
    return (
        watch.on
        and not (watch.takes_apart or torch._C._is_tracing())
        and may_bypass(function_modes=False, observers=False)
    )


def _ready_or_slow(plan: OpPlan, args: Any, kwargs: Any, _: Any) -> Any:
    if watch.is_slow:  # perhaps it is only to be promised
        return run_promised(plan, args, kwargs)
    return run_ready_or_watched(plan, args, kwargs)


def _whole_batches(multiply: Treatment) -> Treatment:
    """Treat `matmul`: a batch of one on the right is repeated, as for plain tensors.

    For a subclass torch makes one matrix of it and folds the batches of the left: another kernel,
    other last bits. Where the batch wants gradients, it does so for plain tensors, too.
    """

    def treat(tensor: Any, other: Any) -> Any:
        with below_function_modes():
            are_batches = tensor.dim() == 3 == other.dim()
            is_single = are_batches and other.size(0) == 1 != tensor.size(0)
            if is_single and not other.requires_grad and may_exchange_formula((tensor, other)):
                other = other.expand(tensor.size(0), -1, -1)
        return multiply(tensor, other)

    return treat


def _is_noted(values: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values)


# -- the table ----------------------------------------------------------------------------------

_SUBCLASS = "takes another formula for the gradient of a subclass"
_POINTER = "reads the numbers from memory in C++"
_RESIZES = "resizes what it writes in its kernel"
_cumprod = gradient_of_plain(aten.cumprod.default, "CumprodBackward0")


def _by_plain(
    op: OpOverload, node_name: str, *, picks: bool = False
) -> tuple[OpOverload, Treatment, str]:
    return op, gradient_of_plain(op, node_name, picks=picks), _SUBCLASS


#: Operator, treatment, reason. Beside these, every composite operator with `out=` runs whole.
TABLE: tuple[tuple[OpOverload, Treatment, str], ...] = (
    (aten.prod.default, product(aten.prod.default, "ProdBackward0"), _SUBCLASS),
    (aten.prod.dim_int, product(aten.prod.dim_int, "ProdBackward1"), _SUBCLASS),
    _by_plain(aten.median.default, "MedianBackward0", picks=True),
    _by_plain(aten.nanmedian.default, "NanmedianBackward0", picks=True),
    _by_plain(aten.min.default, "MinBackward1", picks=True),
    _by_plain(aten.max.default, "MaxBackward1", picks=True),
    _by_plain(aten.linalg_det.default, "LinalgDetBackward0"),
    (aten.cumprod.default, _cumprod, _SUBCLASS),
    (aten.cumprod_.default, then_copied(aten.cumprod_.default, _cumprod), _SUBCLASS),
    *(
        (op, _values_alone(op), "finds the vectors, too, for a subclass: other last bits")
        for op in (
            aten.linalg_svdvals.default,
            aten.linalg_eigvals.default,
            aten.linalg_eigvalsh.default,
        )
    ),
    (aten.cross_entropy_loss.default, _cross_entropy, "takes another formula for a subclass"),
    (aten.one_hot.default, _one_hot, "looks at no class of a subclass"),
    (aten.masked_fill.Tensor, masked_fill, _SUBCLASS),
    (aten.masked_fill_.Tensor, masked_fill_in_place, _SUBCLASS),
    (
        aten.tensor_split.tensor_indices_or_sections,
        plain_arguments(aten.tensor_split.tensor_indices_or_sections, 1),
        _POINTER,
    ),
    (
        aten._has_compatible_shallow_copy_type.default,
        _can_replace,
        "takes memory that is not there",
    ),
    (aten.max_pool1d.default, _max_pool1d, _POINTER),
    (aten.set_.source_Tensor_storage_offset, _set_to_part, _POINTER),
    (aten.fused_moving_avg_obs_fake_quant.default, _observe, _RESIZES),
    (aten.ctc_loss.Tensor, plain_arguments(aten.ctc_loss.Tensor, 2, 3), _POINTER),
    # It puts the lengths of a list into memory itself. By Python, what it makes for them is plain.
    (aten.ctc_loss.IntList, plain_arguments(aten.ctc_loss.IntList), _POINTER),
    # Packed sequences: how many rows are left at each step.
    *(
        (op, plain_arguments(op, place), _POINTER)
        for op, place in (
            (aten.lstm.data, 1),
            (aten.gru.data, 1),
            (aten.rnn_tanh.data, 1),
            (aten.rnn_relu.data, 1),
            (aten._pad_packed_sequence.default, 1),
            (aten._pack_padded_sequence_backward.default, 2),
        )
    ),
)

#: Composite operator, and what is done to its arguments before it runs here.
FIRST: dict[OpOverload, Callable[[Treatment], Treatment]] = {aten.matmul.default: _whole_batches}


def _traced_convolution(*args: Any) -> Any:
    """Have `torch.jit.trace` write down what a convolution is for it.

    It writes down nothing itself: its kernel for plain tensors calls this operator, below autograd,
    where a TensorRef has left torch already.
    """
    is_repeatable = torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()
    return aten._convolution.default(
        *args,
        torch._C._get_cudnn_benchmark(),
        is_repeatable,
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_allow_tf32(),
    )


def install() -> Callable[[], None]:
    """Register the table with torch, for tensors that carry our key; return what undoes it."""
    traced = torch.library.Library("aten", "IMPL", "Tracer")
    with warnings.catch_warnings():
        # That its own kernel, which does nothing there but go on, is replaced.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        traced.impl("convolution", _traced_convolution)
    ours = torch.library.Library("aten", "IMPL", KEY_NAME)
    for op, treatment, reason in TABLE:
        # In C++ a TensorRef is no subclass to torch: what is left is what kernels do to memory.
        if core.library is None or reason in (_POINTER, _RESIZES):
            ours.impl(op, functools.partial(_below_our_key, treatment))
    for name in composites_with_out():
        ours.impl(name, functools.partial(_below_our_key, whole(name)))
    libraries = [traced, ours]
    if core.library is not None:
        return functools.partial(_destroy, libraries)
    everything = torch.library.Library("_", "IMPL", KEY_NAME)
    everything.fallback(torch.library.fallthrough_kernel)
    for op in (row.op for row in ROWS if row.peak_nbytes is not None):
        kernel = ahead(op)
        ours.impl(op, FIRST[op](kernel) if op in FIRST else kernel)
    return functools.partial(_destroy, [*libraries, everything])


def _destroy(libraries: list[torch.library.Library]) -> None:
    for library in libraries:
        library._destroy()


def _below_our_key(treatment: Treatment, *args: Any, **kwargs: Any) -> Any:
    with below_function_modes(), torch._C._ExcludeDispatchKeyGuard(KEYS):
        return treatment(*args, **kwargs)
