"""Bytes that are outside, and whether they still are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import torchTensorRef
from torchTensorRef.memory.exposure import Exposure


def plain() -> torch.Tensor:
    with torchTensorRef.disabled():
        return torch.rand(4)


def exposed(tensor: torch.Tensor, own_count: int) -> Exposure:
    device: Any = SimpleNamespace(is_host=True)
    return Exposure(device, tensor.untyped_storage(), "an array", own_count=own_count)


def test_what_only_we_and_torch_hold_is_held_by_nobody_outside():
    """The references that Python itself has during a call are others in each of its versions."""
    tensor = plain()
    exposure = exposed(tensor, own_count=2)
    assert not exposure.held
    del tensor
    assert not exposure.held


def test_a_tensor_outside_holds_the_bytes_until_it_dies():
    tensor = plain()
    exposure = exposed(tensor, own_count=1)
    assert exposure.held
    del tensor
    assert not exposure.held


def test_the_object_of_a_storage_outside_holds_the_bytes_until_it_dies():
    """Torch makes one such object for a storage, and who asks for it gets ours."""
    tensor = plain()
    exposure = exposed(tensor, own_count=2)
    given = tensor.untyped_storage()
    assert exposure.held
    del tensor
    assert exposure.held
    del given
    assert not exposure.held
