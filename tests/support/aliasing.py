"""Which tensors are the same object, and which share memory: on plain tensors and on TensorRefs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchTensorRef.tensor.tensor_ref import TensorRef


def alias_differences(plain: Any, ours: Any) -> list[str]:
    """Where two runs differ in what is identical to what, and in what shares memory with what.

    Parameters
    ----------
    plain, ours : pytree
        Inputs and results together, in the same structure.
    """
    found = []
    for what, key in (("the same object as", id), ("sharing memory with", memory_of)):
        expected, actual = _first_equals(plain, key), _first_equals(ours, key)
        found += [
            f"tensor {number}: {what} {a if a != number else 'none'}"
            f" became {b if b != number else 'none'}"
            for number, (a, b) in enumerate(zip(expected, actual, strict=False))
            if a != b
        ]
    return found


def memory_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors over one storage; the tensor's own where it has none."""
    if isinstance(tensor, TensorRef):
        return id(tensor._ttr_block)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_mkldnn:
        return id(tensor)
    return ("storage", tensor.untyped_storage()._cdata)


def _first_equals(tree: Any, key: Any) -> list[int]:
    """For each tensor the number of the first one with an equal key."""
    first: dict[Any, int] = {}
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [first.setdefault(key(tensor), number) for number, tensor in enumerate(tensors)]
