"""Threads of ours beside a program that captures a graph of kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from typing import Any

from ..background import at_start
from .own_stream import DRIVERS

__all__ = ["relax_threads"]

#: The call by which a thread says what a capture means to it, by the kind of driver.
CALLS = {
    "cuda": "cuThreadExchangeStreamCaptureMode",
    "hip": "hipThreadExchangeStreamCaptureMode",
}

#: The captures of other threads forbid this thread nothing, nor do its calls spoil them.
RELAXED = 2

_log = logging.getLogger("torchTensorRef")


def relax_threads(kind: str) -> None:
    """Let threads of ours that begin from now on spoil no capture of the program's.

    In the mode that is the default (`capture_error_mode="global"`), a capture is spoilt by what any
    thread of the process asks of the driver meanwhile: whether an event has fired, to page-lock
    memory. Threads that can say that they have no part in it may ask.

    Parameters
    ----------
    kind : str
        Of the driver: ``"cuda"``, ``"hip"``. Others have no such modes.
    """
    exchange = _call_of(kind)
    if exchange is not None:
        at_start[kind] = functools.partial(_relax_this_thread, exchange)


def _call_of(kind: str) -> Any:
    """The driver's call; None where it has none, or is not there."""
    names: tuple[str, ...] = DRIVERS[kind][0] if kind in CALLS else ()
    for name in names:
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(name), CALLS[kind])
    return None


def _relax_this_thread(exchange: Any) -> None:
    status = exchange(ctypes.byref(ctypes.c_int(RELAXED)))
    if status:
        _log.info("torchTensorRef: the driver keeps a thread's mode of captures (%s).", status)
