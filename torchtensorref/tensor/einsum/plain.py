"""Numbers in plain tensors where nothing is to be bounded: torch's own einsum does that best.

It is called at once, before an equation is parsed: a product of small matrices takes less time than
that. What it refuses is looked at by ours, which says why in its own words.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ...memory.ref import is_plain
from .equation import Equation, compiled
from .paths import pairs

_einsum: Any = torch._C._VariableFunctions.einsum  # type: ignore[attr-defined]


def torchs(equation: Any, operands: Any) -> Tensor | None:
    """Return what torch's einsum makes of numbers; None where it is not for torch's.

    Parameters
    ----------
    equation : str or Equation
        Anything else, and integers for letters, is not for torch's.
    operands : tuple
        Of these only plain tensors of floating point or complex numbers of one dtype are.
    """
    if type(equation) is Equation:
        text = equation.text
    elif type(equation) is str:
        text = equation
    else:
        return None
    dtype = None
    for operand in operands:
        if not is_plain(operand) or operand.dtype is not (dtype or operand.dtype):
            return None
        dtype = operand.dtype
    # Of integers torch's sums are int64 in some equations, and of their own dtype in others.
    if dtype is None or not text or not (dtype.is_floating_point or dtype.is_complex):
        return None
    try:
        if len(operands) <= 2:
            found: Tensor = _einsum(text, operands)
            return found
        path = _path(text, tuple(operand.shape for operand in operands))
        return None if path is None else _einsum(text, operands, path=path)
    except (RuntimeError, ValueError):
        return None


@functools.lru_cache(maxsize=1024)
def _path(text: str, shapes: tuple[torch.Size, ...]) -> list[int] | None:
    """Return the order in which operands are multiplied, as torch has it: the places in a row."""
    bound = compiled(text).bind(shapes)
    found = pairs(bound.inputs, bound.output, tuple(bound.sizes.items()), True)
    if any(len(places) != 2 for places in found):
        return None
    return list(itertools.chain.from_iterable(found))
