"""What TensorRefs are given of classes' bodies, and what is left out."""

from __future__ import annotations

import gc
import importlib.util

import pytest
import torch

from torchTensorRef import tensorsManager
from torchTensorRef.tensor import attributes


def test_a_collection_while_it_is_loaded_changes_nothing() -> None:
    """`vars` of a class that nobody keeps is emptied by it: once in 600 processes, torch's class
    had `__slots__` of ours, and no parameter could be swapped.
    """
    spec = attributes.__spec__
    assert spec is not None
    assert spec.loader is not None
    threshold = gc.get_threshold()
    gc.freeze()
    try:
        for allocations in range(1, 400):
            gc.collect(0)
            gc.set_threshold(allocations, 0, 0)
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
            assert {"__slots__", "__module__", "__doc__"} <= loaded._OF_EVERY_CLASS
    finally:
        gc.set_threshold(*threshold)


def test_attributes_are_deleted_as_without_us() -> None:
    """A plain tensor's own of the name of one of ours; of `data` torch says what is to be said."""
    plain = torch.ones(2)
    ref = tensorsManager.adopt(torch.ones(2))
    for tensor in (plain, ref):
        with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
            del tensor.data
    for name in ("target", "proxyInfo"):
        with pytest.raises(AttributeError):
            delattr(plain, name)
        setattr(plain, name, 3)
        assert getattr(plain, name) == 3
        delattr(plain, name)
        assert name not in vars(plain)
        with pytest.raises(AttributeError):
            delattr(ref, name)
