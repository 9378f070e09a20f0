"""What kernels look at beside their operands, kept for those that run later than they are asked.

Torch's settings are those of the process: other threads see them change, too, as they do when a
program changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..base.scopes import surely

__all__ = ["as_asked", "settings_now"]

#: Settings that are on or off, by the names that torch's C++ has for them.
_SWITCHES = (
    "cpu_allow_fp16_reduced_precision_reduction",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "deterministic_fill_uninitialized_memory",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
)


def _deterministic() -> tuple[bool, bool]:
    only_warns: bool = torch._C._get_deterministic_algorithms_warn_only()
    return torch._C._get_deterministic_algorithms(), only_warns


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


#: How each is read, and set.
_WAYS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (torch.get_default_dtype, torch._C._set_default_dtype),
    (_deterministic, _set_deterministic),
    *(
        (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
        for name in _SWITCHES
        if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
    ),
]
_READS = [read for read, _ in _WAYS]
#: What was read last: whoever is asked for under the same settings keeps the same tuple.
_last: list[tuple[Any, ...]] = [()]


def settings_now() -> tuple[Any, ...]:
    """Return torch's settings as they are now."""
    known, found = _last[0], tuple([read() for read in _READS])
    if found == known:
        return known
    _last[0] = found
    return found


def as_asked(settings: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Let such settings hold inside."""
    return nullcontext() if settings_now() == settings else _changed(settings)


@contextmanager
def _changed(settings: tuple[Any, ...]) -> Iterator[None]:
    changed: list[tuple[Any, ...]] = []

    def put_back() -> None:
        for read, change, wanted, before in changed:
            if read() == wanted:  # else the program has set it meanwhile
                change(before)

    with surely(put_back):
        for (read, change), wanted in zip(_WAYS, settings, strict=True):
            before = read()
            if before != wanted:
                changed.append((read, change, wanted, before))
                change(wanted)
        yield
