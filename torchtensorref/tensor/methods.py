"""Arithmetic as methods of a TensorRef, which runs without going through torch: a table.

On its way to `dispatch` an operator passes torch's argument parser, its dispatcher, autograd and
the call back into Python. Where none of them has anything to do (no gradient is recorded, and
`may_bypass` says that nobody else looks on), a method that Python finds on the class takes the
ready path at once: half of the time. Everything else is left to torch's own method.

Only methods that make fresh results are here: views are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch._ops import OpOverload

from ..interception.guards import may_bypass
from ..interception.ready_path import SLOW, WAYS, can_look, charge, fresh
from ..interception.tracebacks import hides, shorten
from ..memory.budget import SHORTAGES
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan, plan_of

aten = torch.ops.aten

__tracebackhide__ = hides

Method = Callable[..., Any]

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled

#: Exactly these: what is derived from them may answer to an operator by itself.
_NUMBERS = (int, float)


def _run_two(plan: OpPlan, first: Any, second: Any) -> Any:
    """Run an operator on a TensorRef and another, or a number; `SLOW` if one is not ready.

    What `ready_path.run_one` does, without a list of operands: half of what programs write is this.
    The ready path writes one attribute of a block, `last_use`, without asking the residency: a
    single store, for which no lock is taken.
    """
    if not isinstance(first, TensorRef):
        return SLOW
    block = first._ttr_block
    device = block.ready
    residency: Any = tensorsManager._residency
    if device is not residency.books.ready_device and device is not residency.books.ready_host:
        return SLOW
    ident, operands = get_ident(), (first, second)
    hazards = residency.holds.announced
    outer = hazards.get(ident)
    hazards[ident] = operands if outer is None else outer + operands  # first, as there
    try:
        # Again: it may have been seized before it was announced.
        if block.ready is not device or (
            first._ttr_device is not device and not can_look(first, device)
        ):
            return SLOW
        tick = residency.books.tick + 1
        block.last_use = tick
        value = second
        if isinstance(second, TensorRef):
            other = second._ttr_block
            if other.ready is not device or (
                second._ttr_device is not device and not can_look(second, device)
            ):
                return SLOW
            other.last_use = tick
            value = second._ttr_plain
        residency.books.tick = tick
        out = plan.binding(first._ttr_plain, value)
        if device.has_virtual_clock:
            charge(plan, operands, [first._ttr_plain, value], {}, out, device)
        return fresh(plan, out, residency, device, first)
    except SHORTAGES:
        return SLOW
    except RecursionError:
        raise  # ours, and perhaps after the kernel has written
    except (RuntimeError, IndexError, ValueError) as error:
        if device.torch_device.type == "cpu":
            shorten(error)
            raise  # as there: the program's own mistake
        return SLOW
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def _with_other(name: str, op: OpOverload) -> Method:
    """Make a method with one more operand: a TensorRef or a number."""
    plan, whole = plan_of(op), getattr(_Tensor, name)

    def method(self: Any, other: Any, *rest: Any, **options: Any) -> Any:
        kind = type(other)
        if (isinstance(other, TensorRef) or kind in _NUMBERS) and not (
            rest
            or options
            or not may_bypass(autocast=False)
            or (
                _is_grad_enabled()
                and (self.requires_grad or (kind not in _NUMBERS and other.requires_grad))
            )
        ):
            try:
                result = _run_two(plan, self, other)
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self, other, *rest, **options)

    return method


def _reflected(name: str, op: OpOverload) -> Method:
    """Make a method with a number on the left."""
    plan, whole = plan_of(op), getattr(_Tensor, name)

    def method(self: Any, other: Any, *rest: Any, **options: Any) -> Any:
        kind = type(other)
        if kind is _Tensor:
            # Python asks a derived class first, but the operands have an order.
            return NotImplemented
        if kind in _NUMBERS and not (
            rest
            or options
            or not may_bypass(autocast=False)
            or (_is_grad_enabled() and self.requires_grad)
        ):
            try:
                result = _run_two(plan, self, other)
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self, other, *rest, **options)

    return method


def _is_seen(ref: Any) -> bool:
    """Whether torch has to see an operator on a TensorRef that autocast may know."""
    return not may_bypass() or (_is_grad_enabled() and ref.requires_grad)


def _with_number(name: str, op: OpOverload) -> Method:
    """Make a method with a number."""
    plan, whole = plan_of(op), getattr(_Tensor, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and type(args[0]) in _NUMBERS and not options and not _is_seen(self):
            try:
                result = _run_two(plan, self, args[0])
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self, *args, **options)

    return method


def _with_matrices(name: str, op: OpOverload) -> Method:
    """Make a method with a TensorRef, which has another operator for two matrices."""
    plan, of_two, whole = plan_of(op), plan_of(aten.mm.default), getattr(_Tensor, name)
    way = WAYS[plan.ready_way]

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, TensorRef) and not (
            _is_seen(self) or (_is_grad_enabled() and other.requires_grad)
        ):
            try:
                if self.dim() == 2 == other.dim():
                    result = _run_two(of_two, self, other)
                else:
                    result = way(plan, (self, other), None)
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self, other)

    return method


def _alone(name: str, op: OpOverload) -> Method:
    """Make a method without arguments."""
    plan, whole = plan_of(op), getattr(_Tensor, name)
    way = WAYS[plan.ready_way]

    def method(self: Any) -> Any:
        if not _is_seen(self):
            try:
                result = way(plan, (self,), None)
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self)

    return method


def _along(name: str, op: OpOverload) -> Method:
    """Make a method that reduces along a dimension."""
    plan, whole = plan_of(op), getattr(_Tensor, name)
    way = WAYS[plan.ready_way]

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if (
            len(args) == 1
            and type(args[0]) is int
            and (not options or (len(options) == 1 and type(options.get("keepdim")) is bool))
            and not _is_seen(self)
        ):
            try:
                result = way(plan, (self, *args), options)
            except BaseException:
                tensorsManager.doubt()  # it may have come at any line
                raise
            if result is not SLOW:
                return result
        return whole(self, *args, **options)

    return method


#: Method, operator, and how it is called. Autocast knows none of the first six operators.
TABLE: tuple[tuple[str, OpOverload, Callable[[str, OpOverload], Method]], ...] = (
    ("__add__", aten.add.Tensor, _with_other),
    ("__sub__", aten.sub.Tensor, _with_other),
    ("__mul__", aten.mul.Tensor, _with_other),
    ("__truediv__", aten.div.Tensor, _with_other),
    ("__radd__", aten.add.Tensor, _reflected),
    ("__rmul__", aten.mul.Tensor, _reflected),
    ("pow", aten.pow.Tensor_Scalar, _with_number),
    ("__pow__", aten.pow.Tensor_Scalar, _with_number),
    ("__matmul__", aten.matmul.default, _with_matrices),
    ("matmul", aten.matmul.default, _with_matrices),
    ("__neg__", aten.neg.default, _alone),
    ("cos", aten.cos.default, _alone),
    ("sin", aten.sin.default, _alone),
    ("exp", aten.exp.default, _alone),
    ("sqrt", aten.sqrt.default, _alone),
    ("rsqrt", aten.rsqrt.default, _alone),
    ("tanh", aten.tanh.default, _alone),
    ("sigmoid", aten.sigmoid.default, _alone),
    ("mean", aten.mean.dim, _along),
    ("sum", aten.sum.dim_IntList, _along),
)


def attach() -> None:
    """Put the methods of the table on the class of TensorRefs."""
    for name, op, make in TABLE:
        method = functools.wraps(getattr(_Tensor, name))(make(name, op))
        setattr(TensorRef, name, method)
