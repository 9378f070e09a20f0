"""Cuts of elementwise operators: along all that their results are.

A vectorised kernel computes the last few elements of a run one by one, and some functions are
computed otherwise there (`tanh`, `exp`): which elements these are depends on where it was cut. So
it is asked, once per operator and dtype, whether that makes a difference to the bits. Where it
does, only such cuts keep them that leave the same elements over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .cut import Axis, Call, Cut, Place, broadcast_along, is_dense

#: Elements of a vector, of several vectors that a loop does at once: cuts at multiples of it leave
#: nothing over.
LINE = 256
#: Elements that are tried, and how many at a time: fewer than a vector has.
TRIED, AT_ONCE = 1155, 3
#: Kernels give less than this to a thread of its own only where there are no more.
GRAIN = 32768

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
    is_even = has_even_bits(call.op, call.arguments)
    numel = torch.Size(sizes).numel()
    if _are_alike(tensors):
        leaves_same = call.thread_count == 1 or numel % (LINE * call.thread_count) == 0
        return Cut(
            axes=(Axis(numel, LINE * call.thread_count),),
            operands={place: (0,) for place, tensor in tensors if tensor.dim()},
            results=((0,),) * results,
            is_flat=True,
            keeps_bits=is_even or leaves_same or numel <= GRAIN,
        )
    return Cut(
        axes=tuple(Axis(size) for size in sizes),
        operands={place: broadcast_along(tensor, sizes) for place, tensor in tensors},
        results=(tuple(range(len(sizes))),) * results,
        keeps_bits=is_even,
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
    """Whether all but single numbers are the same run of memory, element by element."""
    large = [tensor for _, tensor in tensors if tensor.dim()]
    first = large[0]
    return is_dense(first) and all(
        tensor.size() == first.size() and _same_order(tensor, first) for tensor in large
    )


def _same_order(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    triples = zip(tensor.size(), tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in triples)


def has_even_bits(op: Any, arguments: dict[str, Any]) -> bool:
    """Whether an elementwise operator gives an element the same bits wherever it stands."""
    kinds = tuple(
        (name, value.dtype if isinstance(value, torch.Tensor) else repr(value))
        for name, value in arguments.items()
        if not isinstance(value, (list, tuple, torch.Generator))
    )
    key = (op, kinds)
    if key not in _even:
        _even[key] = _try(op, arguments)
    return _even[key]


def _try(op: Any, arguments: dict[str, Any]) -> bool:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        samples = {
            name: _sample(value.dtype, i) if isinstance(value, torch.Tensor) else value
            for i, (name, value) in enumerate(arguments.items())
        }
        try:
            whole = _run(op, samples, 0, TRIED)
            parts = [_run(op, samples, i, i + AT_ONCE) for i in range(0, TRIED, AT_ONCE)]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
    return all(
        bytes_equal(result, torch._C._VariableFunctions.cat([part[i] for part in parts]))
        for i, result in enumerate(whole)
    )


def bytes_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors are equal in every bit."""
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def _sample(dtype: torch.dtype, number: int) -> torch.Tensor:
    """Values of all sizes, the same every time, without a look at anybody's generator."""
    position = torch._C._VariableFunctions.arange(TRIED, dtype=torch.float64)
    value = ((position + 1.0) * (12.9898 + number)).sin_().mul_(43758.5453)
    value = value.sub_(value.floor()).sub_(0.5).mul_(20.0)
    if dtype.is_complex:
        return torch._C._VariableFunctions.complex(value, value.flip(0)).to(dtype)
    return value.gt(0) if dtype is torch.bool else value.to(dtype)


def _run(op: Any, samples: dict[str, Any], start: int, end: int) -> list[torch.Tensor]:
    schema = op._schema
    args, kwargs = [], {}
    for argument in schema.arguments:
        value = samples[argument.name]
        if isinstance(value, torch.Tensor):
            value = value[start:end].clone()
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    out = op(*args, **kwargs)
    return list(out) if isinstance(out, (list, tuple)) else [out]
