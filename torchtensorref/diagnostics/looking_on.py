"""What ``run --timeline``, ``--live`` and ``--progress`` ask for, begun when devices are opened."""

from __future__ import annotations

import argparse
import atexit
from contextlib import ExitStack
from typing import Any

from ..base.activation import when_open


def begin(chosen: argparse.Namespace) -> None:
    """Have those who look on begin with the first tensor, and end with the process."""
    if not (chosen.timeline or chosen.live or chosen.progress):
        return
    scopes = ExitStack()

    def open_scopes(manager: Any) -> None:
        if chosen.timeline:
            scopes.enter_context(manager.trace(chosen.timeline))
        if chosen.live:
            scopes.enter_context(manager.live())
        if chosen.progress:
            from ..interception.onlookers.live import Lines

            scopes.enter_context(Lines(manager))
        atexit.register(scopes.close)  # before the report, which was asked for earlier

    when_open.append(open_scopes)
