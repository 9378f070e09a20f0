"""What a driver says of the memory of its cards, and which of them has the most."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["default_index", "memory_info"]


def memory_info(module: Any, index: int) -> tuple[int, int] | None:
    """What the driver has free and in all; None where it does not say (some xpu devices)."""
    try:
        free_nbytes, total_nbytes = module.mem_get_info(index)
    except (AttributeError, RuntimeError):
        return None
    return int(free_nbytes), int(total_nbytes)


def default_index(module: Any, current: int) -> int:
    """Return the number of the card that is used where nobody names one.

    Parameters
    ----------
    current : int
        The one that torch is on. Programs say so (`set_device`), but for the first.

    Notes
    -----
    A launcher starts one process for each card (`LOCAL_RANK`), and each has its own. Else it is the
    one with the most memory free, of equals the first, which is everybody's.
    """
    count = int(module.device_count())
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdecimal() and count:
        return int(rank) % count
    if current:
        return current
    return max(range(count), key=lambda index: (_free_nbytes(module, index), -index), default=0)


def _free_nbytes(module: Any, index: int) -> int:
    """Ask the vendor's management library where there is one.

    The driver opens a device to say it, and keeps some memory of it then.
    """
    try:
        used = module.device_memory_used(index)
        return int(module.get_device_properties(index).total_memory) - int(used)
    except (AttributeError, ImportError, RuntimeError):
        info = memory_info(module, index)
        return 0 if info is None else info[0]
