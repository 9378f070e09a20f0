"""What happens when an optimizer is about to step: it may run on plain tensors."""

from __future__ import annotations

import sys
from typing import Any

from . import hooks


def on_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Return other arguments for the step where it has run already; None where it has not."""
    if f"{hooks.PACKAGE}.manager" not in sys.modules or not hooks.state.active:
        return None  # there is no TensorRef yet
    from ..native_step import step_natively

    return step_natively(optimizer, args, kwargs)
