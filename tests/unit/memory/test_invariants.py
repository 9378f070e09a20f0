"""What `check()` looks for that no program can bring about by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torchTensorRef.memory.invariants import storage_violations


def block(name: str, base: torch.Tensor) -> Any:
    return SimpleNamespace(name=name, base_on=lambda device: base)


def test_two_blocks_over_one_storage_are_told_by_their_names():
    device: Any = SimpleNamespace(name="sim:0")
    whole, other = torch.zeros(4), torch.zeros(4)
    blocks = [block("b1", whole), block("b2", other), block("b3", whole[2:])]
    assert storage_violations(blocks[:2], device) == []
    assert storage_violations(blocks, device) == ["b1 and b3 have one storage on sim:0"]
