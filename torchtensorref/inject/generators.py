"""What our patches do around `torch.Generator`: promised random numbers wait at one.

Who promises them is told before somebody looks at its state, or sets it (`promises/draws.py`).
"""

from __future__ import annotations

from typing import Any

from ..base.activation import when_drawn, when_seeded
from .patches import MethodPatch
from .readers import on_plain


def look_at(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that gives the state of a generator; who has numbers wait is told."""
    for tell in when_drawn:
        tell(instance)
    return wrapped(*args, **kwargs)


def set_anew(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that sets a generator, by a plain state; who has numbers wait is told."""
    for tell in when_seeded:
        tell(instance)
    return on_plain(wrapped, instance, args, kwargs)


_WAITING = "promised random numbers wait there"

OF_GENERATORS = (
    MethodPatch("torch", "_C.Generator.get_state", look_at, _WAITING),
    *(
        MethodPatch("torch", f"_C.Generator.{name}", set_anew, _WAITING)
        for name in ("manual_seed", "seed", "set_state")
    ),
)
