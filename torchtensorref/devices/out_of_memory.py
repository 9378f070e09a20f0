"""A lack of memory, however torch says it."""

from __future__ import annotations

__all__ = ["is_out_of_memory", "is_said_otherwise", "of_host", "said_as_cuda"]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def is_said_otherwise(error: RuntimeError) -> bool:
    """Whether it is so, and said in another class than torch's own for that, as mps does."""
    import torch

    return is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError)


def said_as_cuda(error: RuntimeError) -> RuntimeError:
    """Return another error that says it in torch's class."""
    import torch

    return torch.OutOfMemoryError(str(error))


def of_host(nbytes: int) -> RuntimeError:
    """Say in torch's class for it that the host has no memory; torch itself says it otherwise."""
    import torch

    return torch.OutOfMemoryError(
        f"cpu out of memory. Tried to allocate {nbytes:,} bytes of host memory."
    )
