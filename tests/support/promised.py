"""The same program with plain torch and on promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchTensorRef


def asked_on_both(program: Callable[[], Any]) -> tuple[Any, Any]:
    """Run a program with plain torch and, from the same seed, on promises; return both results."""
    with torchTensorRef.disabled():
        torch.manual_seed(3)
        plain = program()
    torch.manual_seed(3)
    with torchTensorRef.promising():
        ours = program()
    return plain, ours
