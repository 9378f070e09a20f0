"""What torch's kernels keep of a card: no ledger knows of it, and a test's budget is full of it."""

from __future__ import annotations

from typing import Any


def give_up_workspaces(device: Any) -> None:
    """Give back what products work in: 32 MiB or so for each stream that has multiplied."""
    import torch

    if device.torch_device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
