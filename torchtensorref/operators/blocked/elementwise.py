"""Cuts of elementwise operators: along all that their results are.

A vectorised kernel computes the last few elements of a run one by one, and some functions are
computed otherwise there (`tanh`, `exp`): which elements these are depends on where it was cut. Only
for arithmetic that rounds each result once it makes no difference, and whether a compiler has made
one of a product and a sum is tried, once per operator and dtype. What is not so is cut only where
that leaves the same elements over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence
from typing import Any

import torch

from .cut import Axis, Call, Cut, Place, broadcast_along

#: Elements of a vector, of several vectors that a loop does at once: cuts at multiples of it leave
#: nothing over.
LINE = 256
#: Elements that are tried, and how many at a time: fewer than a vector has. Three of an expanded
#: operand are computed as by vectors, five are not.
TRIED, AT_ONCE = 1155, (3, 5)
#: What an expanded operand is tried with, by its place in a sample: numbers, zeros of both signs.
EXPANDED = (1, 2, 4, 0, 5, 10, 15)
#: Kernels give less than this to a thread of its own only where there are no more.
GRAIN = 32768

_ARITHMETIC = """
    abs add add_ addcdiv addcdiv_ addcmul addcmul_ bitwise_and bitwise_not bitwise_or bitwise_xor
    ceil clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone copy_ div div_ eq fill_ floor
    fmax fmin ge gt hardtanh hardtanh_ isinf isnan le lerp lerp_ logical_and logical_not logical_or
    logical_xor lt masked_fill masked_fill_ maximum minimum mul mul_ nan_to_num
    native_dropout_backward ne neg neg_ reciprocal relu relu_ round rsub sgn sign sqrt sqrt_ square
    sub sub_ threshold threshold_backward trunc where zero_ _to_copy
"""
#: Operators each of whose results is rounded once, or is one of the operands.
ROUNDS_ONCE = frozenset(_ARITHMETIC.split())
#: Runs as long as this are cut no further for the sake of threads.
MOST_STEP = 1 << 22

#: So many answers are kept.
MOST_KNOWN = 4096

_even: dict[Any, bool] = {}


def elementwise(call: Call) -> Cut | None:
    """Every dimension of the result is an axis; where all are dense alike, memory is."""
    tensors = call.tensors()
    if not tensors or any(_is_odd(tensor) for _, tensor in tensors):
        return None
    sizes = torch.broadcast_shapes(*(tensor.size() for _, tensor in tensors))
    if not sizes:
        return None
    results = _results_of(call.op)
    if results is None or (_writes_first(call.op) and tensors[0][1].size() != sizes):
        return None
    is_even = has_even_bits(call.op, call.arguments, sizes)
    numel = torch.Size(sizes).numel()
    if _are_alike(tensors):
        # However many threads share a tile, or the whole, each is to get whole vectors.
        step = LINE if is_even else LINE * math.lcm(*range(1, call.thread_count + 1))
        leaves_same = call.thread_count == 1 or (step <= MOST_STEP and numel % step == 0)
        keeps_bits = is_even or leaves_same or numel <= GRAIN
        return Cut(
            axes=(Axis(numel, min(step, MOST_STEP), keeps_bits),),
            operands={place: (0,) for place, tensor in tensors if tensor.dim()},
            results=((0,),) * results,
            is_flat=True,
        )
    return Cut(
        axes=tuple(Axis(size, keeps_bits=is_even) for size in sizes),
        operands={place: broadcast_along(tensor, sizes) for place, tensor in tensors},
        results=(tuple(range(len(sizes))),) * results,
    )


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()


def _writes_first(op: Any) -> bool:
    return bool(op._schema.is_mutable)


def _results_of(op: Any) -> int | None:
    """How many tensors it returns; None where it writes something else than its first argument."""
    schema = op._schema
    written = [
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written not in ([], [0]) or any(str(result.type) != "Tensor" for result in schema.returns):
        return None
    return len(schema.returns)


def _are_alike(tensors: Sequence[tuple[Place, torch.Tensor]]) -> bool:
    """Whether all but single numbers are the same run of memory, element by element.

    In another order than that of their dimensions some kernels go another way.
    """
    large = [tensor for _, tensor in tensors if tensor.dim()]
    first = large[0]
    return all(tensor.size() == first.size() and tensor.is_contiguous() for tensor in large)


def has_even_bits(op: Any, arguments: dict[str, Any], sizes: Sequence[int]) -> bool:
    """Whether an elementwise operator gives an element the same bits wherever it stands.

    Parameters
    ----------
    sizes : sequence of int
        Of the result. What is expanded to them, kernels read by loops of their own.

    Notes
    -----
    What a compiler has made of a loop holds for every number, but for those that kernels branch on,
    so it is asked of one in the place of many (`_standing_for`): of Adam's, which is another in
    each step. It would not show by any: a product with a power of two is not rounded, and beside
    one that is tiny the sum is what it was.
    """
    has_mode = any(isinstance(value, str) for value in arguments.values())  # a division by loops
    if op.overloadpacket.__name__ in ROUNDS_ONCE and not has_mode:
        arguments = {name: _standing_for(value) for name, value in arguments.items()}
    is_float = any(
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        for value in arguments.values()
    )
    if is_float and op.overloadpacket.__name__ not in ROUNDS_ONCE:
        return False
    if op.overloadpacket.__name__.startswith("addcmul") and any(
        isinstance(value, torch.Tensor) and value.is_complex() for value in arguments.values()
    ):
        return False  # two products and sums, rounded otherwise where operands have gaps
    kinds = tuple(
        (name, value.dtype if isinstance(value, torch.Tensor) else repr(value))
        for name, value in arguments.items()
        if not isinstance(value, (list, tuple, torch.Generator))
    )
    # A loop runs along one dimension: what is one value along it need not be so along others.
    loops = frozenset(
        frozenset(
            name
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and _is_expanded(value, dim)
        )
        for dim in range(-len(sizes), 0)
        if sizes[dim] > 1
    )
    key = (op, kinds, loops)
    answer = _even.get(key)
    if answer is None:
        if len(_even) >= MOST_KNOWN:
            _even.clear()
        answer = _even[key] = all(_try(op, arguments, expanded) for expanded in loops)
    return answer


def _standing_for(value: Any) -> Any:
    """Return what is tried in the place of a number: one that makes products inexact.

    It is of the same type and sign, and on the same side of a half, where `lerp` has its branch.
    Zeros and ones stand for themselves, and so does what a dtype may round to one of these, to a
    half or to infinity.
    """
    if type(value) not in (int, float) or not 2.0**-126 < abs(value) < 2.0**127:
        return value
    if any(abs(abs(value) - at) <= 2.0**-8 for at in (0.5, 1.0)):
        return value
    if type(value) is int:
        return 3 if value > 0 else -3
    return math.copysign(0.3 if abs(value) < 0.5 else 0.7, value)


def _is_expanded(tensor: torch.Tensor, dim: int) -> bool:
    return -dim > tensor.dim() or tensor.size(dim) == 1 or not tensor.stride(dim)


def _try(op: Any, arguments: dict[str, Any], expanded: Collection[str]) -> bool:
    return all(
        _is_even_with(op, arguments, expanded, at)
        for at in (EXPANDED if expanded else EXPANDED[:1])
    )


def _is_even_with(op: Any, arguments: dict[str, Any], expanded: Container[str], place: int) -> bool:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        samples = {
            name: _sample(value.dtype, i, place if name in expanded else None)
            if isinstance(value, torch.Tensor)
            else value
            for i, (name, value) in enumerate(arguments.items())
        }
        try:
            whole = _run(op, samples, 0, TRIED)
            in_parts = [
                [_run(op, samples, i, i + count) for i in range(0, TRIED, count)]
                for count in AT_ONCE
            ]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
    return all(
        bytes_equal(result, torch._C._VariableFunctions.cat([part[i] for part in parts]))
        for parts in in_parts
        for i, result in enumerate(whole)
    )


def bytes_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors are equal in every bit, but for what NaNs carry."""
    if a.is_floating_point() or a.is_complex():
        a, b = (x.masked_fill(x != x, math.nan) for x in (a, b))
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def _sample(dtype: torch.dtype, number: int, expanded: int | None) -> torch.Tensor:
    """Values of all sizes, the same every time, without a look at anybody's generator.

    Among them are zeros of both signs, beside all that other operands may have: of two that are
    equal, a maximum is either.

    Parameters
    ----------
    number : int
        That of the operand.
    expanded : int or None
        The place of the only value there is to be, if so.
    """
    position = torch._C._VariableFunctions.arange(TRIED, dtype=torch.float64)
    value = ((position + 1.0) * (12.9898 + number)).sin_().mul_(43758.5453)
    value = value.sub_(value.floor()).sub_(0.5).mul_(20.0)
    other = value.flip(0)
    for part, every in ((value, 5), (other, 3)):
        is_positive = position[: len(part[::every])].div(2.0**number).floor_().remainder_(2.0)
        part[::every] = is_positive.sub_(0.5).mul_(0.0)
    if dtype.is_complex:
        value = torch._C._VariableFunctions.complex(value, other).to(dtype)
    else:
        value = value.gt(0) if dtype is torch.bool else value.to(dtype)
    return value if expanded is None else value[expanded : expanded + 1].expand(TRIED)


def _run(op: Any, samples: dict[str, Any], start: int, end: int) -> list[torch.Tensor]:
    schema = op._schema
    args, kwargs = [], {}
    for argument in schema.arguments:
        value = samples[argument.name]
        if isinstance(value, torch.Tensor):
            value = value[start:end]
            value = value.clone() if value.stride(0) else value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    out = op(*args, **kwargs)
    return list(out) if isinstance(out, (list, tuple)) else [out]
