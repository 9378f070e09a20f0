"""Gradients by the formulas of plain torch, where its C++ takes others for a subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from ..interception.guards import may_exchange_formula, records_gradient
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEYS

aten = torch.ops.aten

_functorch_level = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack

Treatment = Callable[..., Any]


# -- gradients by plain torch's formula ---------------------------------------------------------


def gradient_of_plain(
    op: Callable[..., Any], node_name: str, *, picks: bool = False, guards_result: bool = True
) -> Treatment:
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
    guards_result : bool, optional
        Torch's formula reads the result, so that nobody may have written it.
    """
    node = node_named(node_name, PlainGradient)
    node.guards_result = guards_result

    def treat(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        tensors = [values[place] for place in places]
        if not (records_gradient(tensors) and may_exchange_formula(tensors)):
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

    guards_result = False

    @staticmethod
    def forward(ctx: Any, function: Any, picks: bool, *tensors: Any) -> Any:
        """Run the function itself, managed as any operator."""
        ctx.function = function
        ctx.picks = picks
        ctx.set_materialize_grads(False)
        results = function(*tensors)
        several = [r for r in several_of(results) if isinstance(r, torch.Tensor)]
        ctx.save_for_backward(*tensors, *(several if ctx._forward_cls.guards_result else ()))
        fixed = [r for r in several if not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Take the gradient; it is a function of the same kind."""
        tensors = ctx.saved_tensors[: len(ctx.needs_input_grad) - 2]
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
        if (
            torch.is_grad_enabled()
            or _functorch_level() is not None
            or any(map(is_batched, values))
        ):
            return self._of(values)
        plain = [tensorsManager.ownership.plain_at_home(value) for value in values]
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
            several = several_of(self.function(*leaves))
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


#: Whether a tensor stands for several gradients that are taken at once (`is_grads_batched`).
is_batched = torch._C._functorch.is_legacy_batchedtensor


def _without_graph(part: Any) -> Any:
    return part.detach() if part is not None and part.requires_grad else part


def several_of(results: Any) -> tuple[Any, ...]:
    """Return the results of an operator that has one or several."""
    return results if isinstance(results, tuple) else (results,)


def node_named(name: str, base: type) -> Any:
    """Return a kind of node that the program sees under the name of torch's own."""
    kind = type(name, (base,), {})
    kind._backward_cls.__name__ = name  # type: ignore[attr-defined]
    return kind


class Product(torch.autograd.Function):
    """`prod`, whose gradient divides by the elements where none of them is zero."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, tensor: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
        """Multiply: all elements, or along `dim`."""
        ctx.dim, ctx.keepdim = dim, keepdim
        result = op(tensor, dtype=dtype) if dim is None else op(tensor, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compose the gradient of operators, so that it has gradients itself."""
        (tensor, result), (grad,) = ctx.saved_tensors, grads
        tensor = tensor.to(grad.dtype)
        if tensor.dim() > 0:
            if ctx.dim is not None and not ctx.keepdim:
                grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
            grad = _gradient_of_product(grad, tensor, result, ctx.dim)
        return None, grad, None, None, None


def _gradient_of_product(grad: Any, tensor: Any, result: Any, dim: Any) -> Any:
    # A mode that watches operators counts as a subclass, too.
    zero_count = int((tensor == 0).sum()) if _dispatch_modes() == 0 else 1
    if zero_count == 0:
        return grad * (result / tensor).conj()
    if dim is not None:
        return _product_of_others(grad, tensor, dim)
    if zero_count > 1 and not torch.is_grad_enabled():
        return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return _product_of_others(grad, tensor.contiguous().view(-1), 0).view_as(tensor)


def _product_of_others(grad: Any, tensor: Any, dim: int) -> Any:
    """Multiply, for each element, those before it by those behind it: right for zeros, too."""
    if tensor.numel() == 0:
        return grad.expand_as(tensor)
    count = tensor.size(dim)
    if count == 1:
        return grad
    ones = grad.new_ones([1 if d == dim % tensor.dim() else n for d, n in enumerate(tensor.size())])
    before = torch.cat([ones, tensor.narrow(dim, 0, count - 1)], dim).cumprod(dim)
    behind = torch.cat([ones, tensor.narrow(dim, 1, count - 1).flip(dim)], dim).cumprod(dim)
    return grad * (before * behind.flip(dim)).conj()


def product(op: OpOverload, node_name: str) -> Treatment:
    """Treat `prod`, of all elements or along a dimension."""
    node = node_named(node_name, Product)

    def treat(tensor: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        is_number = dtype is None or dtype.is_floating_point or dtype.is_complex
        if is_number and records_gradient((tensor,)) and may_exchange_formula((tensor,)):
            return node.apply(op, tensor, dim, keepdim, dtype)
        return op(tensor, dtype=dtype) if dim is None else op(tensor, dim, keepdim, dtype=dtype)

    return treat


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
        selected = torch.where(mask, grad, 0) if is_batched(grad) else grad.masked_select(mask)
        return grad.masked_fill(mask, 0), None, selected.sum()


_MaskedFill = node_named("MaskedFillBackward1", MaskedFill)


def masked_fill(tensor: Any, mask: Any, value: Any) -> Any:
    """Treat `masked_fill` by a tensor."""
    if not (records_gradient((value,)) and may_exchange_formula((tensor, mask, value))):
        return aten.masked_fill.Tensor(tensor, mask, value)
    return _MaskedFill.apply(tensor, mask, value)


def masked_fill_in_place(tensor: Any, mask: Any, value: Any) -> Any:
    """Treat `masked_fill_` by a tensor."""
    if not (records_gradient((value,)) and may_exchange_formula((tensor, mask, value))):
        return aten.masked_fill_.Tensor(tensor, mask, value)
    return tensor.copy_(_MaskedFill.apply(tensor, mask, value))


def then_copied(op: OpOverload, treatment: Treatment) -> Treatment:
    """Treat an in-place operator: its out-of-place one, whose gradient is treated, and a copy."""

    def treat(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not (records_gradient((tensor,)) and may_exchange_formula((tensor,))):
            return op(tensor, *args, **kwargs)
        # Of a clone, as in torch: the gradient needs what is about to be overwritten.
        return tensor.copy_(treatment(tensor.clone(), *args, **kwargs))

    return treat
