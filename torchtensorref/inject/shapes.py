"""What our patches do around torch's shape functions: they lay out results as one device's kernels.

Of tensors without bytes torch takes those to be CUDA's. Promises are fulfilled by the kernels of
the device that is in use (`promises/shapes.py`).
"""

from __future__ import annotations

from typing import Any

from ..base.activation import shaped_for
from .patches import Patch


def hinted(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Say which kind of device a tensor without bytes is on."""
    return shaped_for.get() or wrapped(*args, **kwargs)


OF_SHAPES = (
    Patch(
        "torch._meta_registrations",
        "device_hint",
        hinted,
        "shape functions take tensors without bytes for CUDA's, whose kernels lay out otherwise",
    ),
)
