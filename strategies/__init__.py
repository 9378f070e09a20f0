"""The strategies that come with the package, by the name that chooses each.

Nothing in the package imports this folder: the manager asks it for a name. A strategy of yours
needs no place here; give the object itself to `tensorsManager.strategy`.
"""

from __future__ import annotations

from ..strategy import Strategy
from .flow.flow import Flow
from .genoa import Genoa
from .lru import LeastRecentlyUsed
from .venice import Venice

#: Name -> class; called without arguments.
AVAILABLE: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Genoa, LeastRecentlyUsed, Flow, Venice)
}

__all__ = ["AVAILABLE", "Flow", "Genoa", "LeastRecentlyUsed", "Venice"]
