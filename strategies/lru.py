"""Give back what the program has left alone the longest."""

from __future__ import annotations

from ..strategy import OldestFirst


class LeastRecentlyUsed(OldestFirst):
    """Evict what has waited longest; among equals, the largest."""

    name = "lru"
