"""What `TTR_TRACE` asks for: totals at exit, and events as they happen, to a file or to stderr."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable
from typing import IO

from .event_log import EventLog, EventRecord
from .options import settings

_COLUMNS = ("step", "block", "event", "cause")


def as_json_line(record: EventRecord) -> str:
    """Write one event as a line of JSON: step, block, event, cause."""
    return json.dumps(dict(zip(_COLUMNS, record, strict=True))) + "\n"


def begin(log: EventLog, totals: Callable[[], str]) -> None:
    """Start what the settings ask for; called once, when the manager opens its devices.

    Parameters
    ----------
    log : EventLog
        Where the events come from.
    totals : Callable
        Gives the text to be written at exit, from level 1 on.
    """
    if settings.trace >= 1:
        atexit.register(lambda: sys.stderr.write(totals() + "\n"))
    if settings.trace_file is not None:
        lines: IO[str] = open(settings.trace_file, "w", buffering=1 << 16)  # noqa: SIM115 (until exit)
        atexit.register(lines.close)
        log.sink = lambda record: _write(lines, as_json_line(record))
    elif settings.trace >= 2:
        log.sink = lambda record: _write(sys.stderr, "{:>6} {} {} ({})\n".format(*record))


def _write(lines: IO[str], text: str) -> None:
    if not lines.closed:
        lines.write(text)
