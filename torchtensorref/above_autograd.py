"""Operators that torch's C++ treats otherwise for a wrapper, caught above autograd: a table.

Dispatch sees an operator below autograd, so it cannot change which formula autograd takes for the
gradient, nor an operator that C++ takes apart before it arrives. Autograd's C++ asks whether a
tensor is a subclass, and if it is, takes another formula: as good, but other bits. A TensorRef
therefore carries one dispatch key more than other tensors have, above autograd. For the operators
in the table it leads here; for all others it falls through inside torch and costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from .dispatch import dispatch
from .manager import tensorsManager
from .views import KEY_NAME, KEYS

aten = torch.ops.aten

_functorch_level = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack

Treatment = Callable[..., Any]


def _is_watched(tensors: Any) -> bool:
    """Whether something beside autograd has to see the operators: a transform, a mode."""
    return (
        _dispatch_modes() > 0
        or _functorch_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or any(type(tensor) not in _plain_or_ref() for tensor in tensors)
    )


def _would_be_noted(tensors: Any) -> bool:
    """Whether autograd would note a call with these operands."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _plain_or_ref() -> tuple[type, ...]:
    return (torch.Tensor, torch.nn.Parameter, tensorsManager.ref_type)


# -- gradients by plain torch's formula ---------------------------------------------------------


def gradient_of_plain(op: Callable[..., Any], node_name: str, *, picks: bool = False) -> Treatment:
    """Treat an operator so that plain torch computes its gradient, on plain tensors at home.

    The operator itself runs as ever. For the gradient it is run again, inside plain torch.

    Parameters
    ----------
    op : callable
        An operator all of whose floating point results have a gradient.
    node_name : str
        The name that torch gives its nodes in the graph; it is seen where a tensor is printed.
    picks : bool, optional
        It picks elements, so its gradient depends on no operand that could have one itself.
    """
    node = _node_named(node_name, PlainGradient)

    def treat(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        tensors = [values[place] for place in places]
        if not _would_be_noted(tensors) or _is_watched(tensors):
            return op(*args, **kwargs)
        # The node keeps the function, so this must not keep the tensors: autograd does.
        rest = [None if place in places else value for place, value in enumerate(values)]

        def function(*chosen: Any) -> Any:
            whole = list(rest)
            for place, tensor in zip(places, chosen, strict=True):
                whole[place] = tensor
            named = dict(zip(kwargs, whole[len(args) :], strict=True))
            return op(*whole[: len(args)], **named)

        return node.apply(function, picks, *tensors)

    return treat


class PlainGradient(torch.autograd.Function):
    """A function of tensors whose gradient plain torch computes; differentiable again and again."""

    @staticmethod
    def forward(ctx: Any, function: Any, picks: bool, *tensors: Any) -> Any:
        """Run the function itself, managed as any operator."""
        ctx.function = function
        ctx.picks = picks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        results = function(*tensors)
        several = [r for r in _several(results) if isinstance(r, torch.Tensor)]
        fixed = [r for r in several if not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Take the gradient; it is a function of the same kind."""
        tensors = ctx.saved_tensors
        if ctx.picks:
            tensors = [tensor.detach() for tensor in tensors]
        given = [place for place, grad in enumerate(cotangents) if grad is not None]
        gradient = Gradient(ctx.function, ctx.needs_input_grad[2:], given)
        found = PlainGradient.apply(
            gradient, False, *tensors, *(cotangents[place] for place in given)
        )
        return (None, None, *found)


class Gradient:
    """The gradient of a function of tensors, as a function of its tensors and the cotangents."""

    def __init__(self, function: Any, needs: Any, given: list[int]) -> None:
        self.function = function
        self.needs = needs
        self.given = given
        self.keeps_graph = torch.is_grad_enabled()

    def __call__(self, *values: Any) -> Any:
        """Compute it: on plain tensors, unless something transforms the tensors it is given."""
        if torch.is_grad_enabled() or _functorch_level() is not None or _any_is_batched(values):
            return self._of(values)
        plain = [tensorsManager.plain_at_home(value) for value in values]
        return tensorsManager.adopt(self._of(plain), sole=True)

    def _of(self, values: Any) -> Any:
        count = len(self.needs)
        leaves, cotangents = list(values[:count]), values[count:]
        inside = torch.is_grad_enabled()
        # Below our key: tensors that are not plain here would come to this very place again.
        with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(KEYS):
            # A derivative of this derivative may be wanted: then what has a graph keeps it.
            leaves = [
                leaf if inside and leaf.requires_grad else leaf.detach().requires_grad_(need)
                for leaf, need in zip(leaves, self.needs, strict=True)
            ]
            several = _several(self.function(*leaves))
        heads, wanted = [several[place] for place in self.given], []
        if any(head is not None and head.requires_grad for head in heads):
            wanted = [leaf for leaf, need in zip(leaves, self.needs, strict=True) if need]
        found = iter(self._grads(heads, wanted, cotangents, inside))
        parts = tuple(next(found, None) if need else None for need in self.needs)
        return parts if inside else tuple(_without_graph(part) for part in parts)

    def _grads(self, heads: Any, wanted: Any, cotangents: Any, inside: bool) -> Any:
        if not wanted:
            return ()
        pairs = [
            (head, cotangent)
            for head, cotangent in zip(heads, cotangents, strict=True)
            if head is not None and head.requires_grad
        ]
        with torch.set_grad_enabled(inside):
            return torch.autograd.grad(
                [head for head, _ in pairs],
                wanted,
                [cotangent for _, cotangent in pairs],
                create_graph=inside or self.keeps_graph,
                allow_unused=True,
            )


def _any_is_batched(values: Any) -> bool:
    """Whether a gradient is taken of several cotangents at once (`is_grads_batched`)."""
    return any(torch._C._functorch.is_legacy_batchedtensor(value) for value in values)


def _without_graph(part: Any) -> Any:
    return part.detach() if part is not None and part.requires_grad else part


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _node_named(name: str, base: type) -> Any:
    kind = type(name, (base,), {})
    kind._backward_cls.__name__ = name  # type: ignore[attr-defined]
    return kind


class MaskedFill(torch.autograd.Function):
    """`masked_fill` by a tensor, with the gradient of that tensor as plain torch sums it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, mask: Any, value: Any) -> Any:
        """Fill."""
        ctx.save_for_backward(mask)
        return aten.masked_fill.Tensor(tensor, mask, value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sum what was selected: torch takes a `where` for subclasses, and sums more zeros."""
        (mask,), (grad,) = ctx.saved_tensors, grads
        return grad.masked_fill(mask, 0), None, grad.masked_select(mask).sum()


_MaskedFill = _node_named("MaskedFillBackward1", MaskedFill)


def _masked_fill(tensor: Any, mask: Any, value: Any) -> Any:
    if not _would_be_noted((value,)) or _is_watched((tensor, mask, value)):
        return aten.masked_fill.Tensor(tensor, mask, value)
    return _MaskedFill.apply(tensor, mask, value)


def _masked_fill_in_place(tensor: Any, mask: Any, value: Any) -> Any:
    if not _would_be_noted((value,)) or _is_watched((tensor, mask, value)):
        return aten.masked_fill_.Tensor(tensor, mask, value)
    return tensor.copy_(_MaskedFill.apply(tensor, mask, value))


def _then_copied(op: OpOverload, treatment: Treatment) -> Treatment:
    """Treat an in-place operator: its out-of-place one, whose gradient is treated, and a copy."""

    def treat(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not _would_be_noted((tensor,)) or _is_watched((tensor,)):
            return op(tensor, *args, **kwargs)
        # Of a clone, as in torch: the gradient needs what is about to be overwritten.
        return tensor.copy_(treatment(tensor.clone(), *args, **kwargs))

    return treat


# -- operators that C++ takes apart -------------------------------------------------------------


def plain_argument(op: OpOverload, position: int) -> Treatment:
    """Treat an operator so that one argument, which C++ reads by its address, is a plain tensor."""
    name = op._schema.arguments[position].name

    def treat(*args: Any, **kwargs: Any) -> Any:
        if position < len(args):
            return op(*args[:position], _readable(args[position]), *args[position + 1 :], **kwargs)
        return op(*args, **{**kwargs, name: _readable(kwargs[name])})

    return treat


def _readable(value: Any) -> Any:
    return tensorsManager.peek(value) if type(value) is tensorsManager.ref_type else value


def whole(name: str) -> Treatment:
    """Treat a composite operator as one: what it writes it may resize and fill behind dispatch."""

    def treat(*args: Any, **kwargs: Any) -> Any:
        op = _overload(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _would_be_noted(tensors) or _is_watched(tensors):
            return op(*args, **kwargs)
        result = dispatch(tensorsManager.ref_type, op, (), args, kwargs)
        for written in _several(result):
            torch.autograd.graph.increment_version(written)
        return result

    return treat


def _as_one(op: OpOverload) -> Treatment:
    """Call a composite operator as one, so that its formula is that for plain tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if _is_watched(tensors) or all(type(t) is not tensorsManager.ref_type for t in tensors):
            return op(*args, **kwargs)
        return dispatch(tensorsManager.ref_type, op, (), args, kwargs)

    return call


#: What torch names the last node of a loss with smoothed labels.
_smoothed_loss = gradient_of_plain(_as_one(aten.cross_entropy_loss.default), "AddBackward0")


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


# -- the table ----------------------------------------------------------------------------------

_SUBCLASS = "takes another formula for the gradient of a subclass"
_POINTER = "reads the numbers from memory in C++"
_cumprod = gradient_of_plain(aten.cumprod.default, "CumprodBackward0")


def _by_plain(
    op: OpOverload, node_name: str, *, picks: bool = False
) -> tuple[OpOverload, Treatment, str]:
    return op, gradient_of_plain(op, node_name, picks=picks), _SUBCLASS


#: Operator, treatment, reason. Beside these, every composite operator with `out=` runs whole.
TABLE: tuple[tuple[OpOverload, Treatment, str], ...] = (
    _by_plain(aten.prod.default, "ProdBackward0"),
    _by_plain(aten.prod.dim_int, "ProdBackward1"),
    _by_plain(aten.median.default, "MedianBackward0", picks=True),
    _by_plain(aten.nanmedian.default, "NanmedianBackward0", picks=True),
    _by_plain(aten.min.default, "MinBackward1", picks=True),
    _by_plain(aten.max.default, "MaxBackward1", picks=True),
    (aten.cumprod.default, _cumprod, _SUBCLASS),
    (aten.cumprod_.default, _then_copied(aten.cumprod_.default, _cumprod), _SUBCLASS),
    (aten.cross_entropy_loss.default, _cross_entropy, "takes another formula for a subclass"),
    (aten.masked_fill.Tensor, _masked_fill, _SUBCLASS),
    (aten.masked_fill_.Tensor, _masked_fill_in_place, _SUBCLASS),
    (
        aten.tensor_split.tensor_indices_or_sections,
        plain_argument(aten.tensor_split.tensor_indices_or_sections, 1),
        _POINTER,
    ),
    # Packed sequences: how many rows are left at each step.
    *(
        (op, plain_argument(op, place), _POINTER)
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

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register the table with torch, for tensors that carry our key."""
    if _libraries:
        return
    everything = torch.library.Library("_", "IMPL", KEY_NAME)
    everything.fallback(torch.library.fallthrough_kernel)
    ours = torch.library.Library("aten", "IMPL", KEY_NAME)
    for op, treatment, _ in TABLE:
        ours.impl(op, functools.partial(_below_our_key, treatment))
    for name in composites_with_out():
        ours.impl(name, functools.partial(_below_our_key, whole(name)))
    _libraries.extend((everything, ours))


def _below_our_key(treatment: Treatment, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(KEYS):
        return treatment(*args, **kwargs)
