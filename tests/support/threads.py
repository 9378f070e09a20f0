"""Work of another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Return what work gives in a thread of its own; IndexError if it raises, or takes 20 s."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(20)
    return found[0]
