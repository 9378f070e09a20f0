"""How often threads take turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def taking_turns_every(seconds: float) -> Iterator[None]:
    """Have Python let another thread run that often inside; 5 ms is its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
