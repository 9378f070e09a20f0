"""A lack of memory, however torch says it."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["is_out_of_memory", "raise_as_cuda"]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory; mps has no class of its own for that."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def raise_as_cuda(error: RuntimeError) -> NoReturn:
    """Raise an error again, as torch's class for a lack of memory if it is one."""
    import torch

    if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
        raise error
    raise torch.OutOfMemoryError(str(error)) from error
