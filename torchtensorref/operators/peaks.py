"""The bytes that a composite operator takes at its peak, where it runs as one.

Torch takes a composite operator apart above us into several, each of which would come to us by
itself. Where no gradient is noted and every operand is ready, torch's own composite is called on
the plain tensors instead: it decides by itself what it is made of, as it does without us, and its
result is one fresh tensor. What it takes beside that has to fit the budget, so a rule says how much
the two are at most, 0 for no more than the result; where that is not known, or does not fit, the
operator goes its slow path in parts.
"""

from __future__ import annotations

from typing import Any

import torch


def linear(x: Any, weight: Any, bias: Any = None) -> int | None:
    """A product over rows; rows that are not in a row are copied first."""
    # The plain tensor has the same sizes and strides, and tells them in less time.
    # A promise has none, and what stands for one while it is recorded is plain itself.
    if not weight.dim():
        return None  # torch refuses it
    plain: Any = getattr(x, "_ttr_plain", None)
    plain = x if plain is None else plain
    if plain.is_contiguous():
        if bias is not None:
            return 0
        # Without one torch asks each stride whether it fits the next, also of dimensions of size 1.
        sizes, strides = plain.size(), plain.stride()
        for i in range(1, len(sizes)):
            if strides[i - 1] != strides[i] * sizes[i]:
                break
        else:
            return 0
    # Torch copies them for a weight that wants gradients, also where none are noted, and multiplies
    # in batches for another: plain tensors do not say which it is.
    if (x.dim() > 2 and (x.requires_grad or weight.requires_grad)) or not x.size(-1):
        return None
    rows: int = x.nbytes // x.size(-1)
    return int(plain.nbytes) + rows * int(weight.size(0))


def matmul(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Batches of equal shape are at most laid out anew; others are repeated, too."""
    if a.dim() == 2 and b.dim() == 2:
        return 0
    if a.dim() < 3 or a.size()[:-2] != b.size()[:-2] or not a.size(-1):
        return None
    return a.nbytes + b.nbytes + a.nbytes // a.size(-1) * b.size(-1)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any
) -> int | None:
    """The weights of each query for each key, before and after softmax, and the operands again.

    That is in 32 bits at least, for every batch and head that one of the operands has. Where torch
    takes no fused kernel, the operands are copied as they are converted, repeated and scaled, and
    the mask and what dropout leaves out are made, too.
    """
    # Torch takes no fused kernel for a mask that wants gradients.
    for x in (*rest, *more.values()):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            return None
    if any(len(x.size()) != 4 for x in (query, key, value)) or 0 in key.size():
        return None
    batches, heads, _, width = map(max, query.size(), key.size(), value.size())
    rows, held_rows = query.size(2), key.size(2)
    weights = rows * held_rows
    operands = (rows + 2 * held_rows) * width
    result = rows * value.size(3)
    each = 3 * weights + operands + result
    dropout = more.get("dropout_p", rest[1] if len(rest) > 1 else 0.0)
    if dropout or not _is_fused(query, key, value, *rest[:1], *more.values()):
        each += 2 * weights + 2 * operands
    return batches * heads * each * max(query.element_size(), 4)


def _is_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> bool:
    """Whether torch takes a fused kernel for attention on these, a mask last, if there is one."""
    if not torch.backends.cuda.flash_sdp_enabled():  # it says so for the host, too
        return False
    wanted, held = query.size(), key.size()
    if held != value.size() or (wanted[0], wanted[3]) != (held[0], held[3]):
        return False
    # One head for several queries may be one that is repeated, which is no group.
    if not min(wanted[1], 2) <= held[1] <= wanted[1]:
        return False
    masks = [x for x in rest if isinstance(x, torch.Tensor)]
    strides = [x.stride() for x in (query, key, value, *masks)]
    return all(len(each) in (2, 4) and each[-1] == 1 for each in strides)


def norm(x: torch.Tensor, *rest: Any, **more: Any) -> int:
    """Statistics by row or group, and a contiguous copy of what is none, in 32 bits at least."""
    return 3 * x.numel() * max(x.element_size(), 4)
