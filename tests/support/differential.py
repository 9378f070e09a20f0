"""Run the same operator on plain tensors and on TensorRefs, and compare all that can be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torchTensorRef import tensorsManager
from torchTensorRef.tensor.tensor_ref import TensorRef


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaNs compare by their bits."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bool or not tensor.dtype.is_floating_point:
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_values(plain: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, sparse tensors by their parts."""
    if plain.layout is not torch.strided:
        return plain.layout == other.layout and torch.equal(
            bits(plain.to_dense()), bits(other.to_dense())
        )
    if plain.is_quantized:
        return torch.equal(plain.int_repr(), other.int_repr())
    return torch.equal(bits(plain), bits(other))


def differences(plain: Any, ours: Any) -> list[str]:
    """Everything in which two results differ, in words; empty for none."""
    plain_leaves = tree_flatten(plain)[0]
    our_leaves = tree_flatten(ours)[0]
    if len(plain_leaves) != len(our_leaves):
        return [f"{len(plain_leaves)} results became {len(our_leaves)}"]
    found = []
    for number, (a, b) in enumerate(zip(plain_leaves, our_leaves, strict=True)):
        if not isinstance(a, torch.Tensor):
            if not (a == b or (a != a and b != b)):
                found.append(f"result {number}: {a!r} became {b!r}")
            continue
        if not isinstance(b, torch.Tensor):
            found.append(f"result {number}: a tensor became {type(b).__name__}")
            continue
        found += [f"result {number}: {text}" for text in _tensor_differences(a, b)]
    return found


def _tensor_differences(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    facts = ["dtype", "device", "requires_grad", "layout"]
    found = [
        f"{f} {getattr(a, f)} became {getattr(b, f)}"
        for f in facts
        if getattr(a, f) != getattr(b, f)
    ]
    if a.layout is torch.strided and b.layout is torch.strided:
        if a.size() != b.size():
            return [*found, f"shape {tuple(a.size())} became {tuple(b.size())}"]
        if a.stride() != b.stride():
            found.append(f"stride {a.stride()} became {b.stride()}")
        for name in ("is_conj", "is_neg"):
            if getattr(a, name)() != getattr(b, name)():
                found.append(f"{name} {getattr(a, name)()} became {getattr(b, name)()}")
    if a.numel() and not found:
        plain = tensorsManager.release(b.detach()) if isinstance(b, TensorRef) else b
        if not same_values(a.detach(), plain):
            found.append("other values")
    return found


def plain_leaves(ours: Any) -> list[str]:
    """The dense tensors among results that are no TensorRefs, in words."""
    return [
        f"result {number}: {type(leaf).__name__} of {leaf.dtype} {tuple(leaf.size())}"
        for number, leaf in enumerate(tree_flatten(ours)[0])
        if isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, TensorRef)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
    ]


def managed(value: Any) -> Any:
    """A copy of arguments in which every strided tensor is a TensorRef."""

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        ref = tensorsManager.adopt(copied(x))
        return ref

    return tree_map(convert, value)


def copied(x: Any) -> Any:
    """A detached copy with the same strides and the same wish for gradients."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.layout is torch.strided and not x.is_quantized and x.numel():
        extent = 1 + sum((n - 1) * s for n, s in zip(x.size(), x.stride(), strict=True))
        base = torch.empty(extent, dtype=x.dtype)
        copy = base.as_strided(x.size(), x.stride())
        source = (
            torch.as_strided(
                x.detach().resolve_conj().resolve_neg(), (extent,), (1,), x.storage_offset()
            )
            if not (x.is_conj() or x.is_neg())
            else None
        )
        if source is None:
            copy = x.detach().clone()
        else:
            base.copy_(source)
    else:
        copy = x.detach().clone()
    return copy.requires_grad_(x.requires_grad)
