"""What happens now, while it happens: a panel on a terminal, or a line every few seconds.

A thread looks at the counts, at most four times a second; operators do nothing for it.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as module_hooks

from ...base.event_sinks import say
from ...base.listeners import Happening, listeners
from ...base.progress import screen
from ...base.units import format_nbytes

#: Between two looks, in seconds.
PANEL_PERIOD_S = 0.25
LINE_PERIOD_S = 2.0


class Rates(NamedTuple):
    """What has happened between two looks, per second of the clock on the wall."""

    ops_per_s: float
    bytes_per_s: float
    #: Of the device's time between them; of the operands that were looked for.
    stalled_share: float
    hit_share: float
    resident_nbytes: int
    budget_nbytes: int


def rates_between(before: dict[str, Any], now: dict[str, Any], seconds: float) -> Rates:
    """Compare two statistics; after `reset_stats` in between, from there on."""
    if now["op_count"] < before["op_count"]:
        before = dict.fromkeys(before, 0)

    def more(*names: str) -> int:
        return sum(now[name] - before[name] for name in names)

    hits, misses = more("slow_hit_count"), more("miss_count")
    return Rates(
        more("op_count") / seconds,
        more("fetched_nbytes", "prefetched_nbytes", "written_back_nbytes") / seconds,
        # Of the busiest of several accelerators: it may be another one than before.
        min(max(more("stall_ns"), 0) / max(more("time_ns"), 1), 1.0),
        hits / max(hits + misses, 1),
        now["resident_nbytes"],
        now["budget_nbytes"],
    )


class _Looking(AbstractContextManager["_Looking"]):
    """A thread that looks at the counts every now and then."""

    def __init__(self, manager: Any, period_s: float) -> None:
        self._manager = manager
        self._period_s = period_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="torchTensorRef-live", daemon=True)

    def __enter__(self) -> _Looking:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it; the thread is gone afterwards."""
        self._is_over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        before, at_s = None, time.monotonic()
        while not self._is_over.wait(self._period_s):
            if self._manager._residency is None:
                continue  # nothing is opened for it
            now, now_s = self._manager.stats(), time.monotonic()
            if before is not None:
                self.show(rates_between(before, now, max(now_s - at_s, 1e-9)), now)
            before, at_s = now, now_s

    def show(self, rates: Rates, stats: dict[str, Any]) -> None:
        """Show what was seen."""


class Lines(_Looking):
    """A line on stderr every few seconds: steps, GB/s, the share stalled, the share of hits.

    A step is a call of a whole model: of a module that is in no other one.
    """

    def __init__(self, manager: Any, period_s: float = LINE_PERIOD_S) -> None:
        super().__init__(manager, period_s)
        self._step_count = self._told_count = 0
        self._hook: Any = None

    def __enter__(self) -> Lines:
        """Begin to count steps, and to look."""
        self._hook = module_hooks.register_module_forward_pre_hook(self._on_call)
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._hook.remove()
        super().__exit__()

    def _on_call(self, module: nn.Module, args: Any) -> None:
        if not self._manager.names.of_module(module):
            self._step_count += 1

    def show(self, rates: Rates, stats: dict[str, Any]) -> None:
        """Write the line."""
        steps = (self._step_count - self._told_count) / self._period_s
        self._told_count = self._step_count
        say(
            f"torchTensorRef: step {self._step_count}, {steps:.1f} steps/s, "
            f"{rates.ops_per_s:,.0f} operators/s, {rates.bytes_per_s / 1e9:.2f} GB/s, "
            f"{rates.stalled_share:.0%} stalled, {rates.hit_share:.0%} hits, "
            f"{format_nbytes(rates.resident_nbytes)} of {format_nbytes(rates.budget_nbytes)}"
        )


class Panel(_Looking):
    """A panel of rich on a terminal; nothing at all where stderr is none."""

    def __init__(self, manager: Any, file: Any = None) -> None:
        super().__init__(manager, PANEL_PERIOD_S)
        self._file = file or sys.stderr
        self._live: Any = None
        #: The last copy to the accelerator.
        self._last: Happening | None = None

    def __enter__(self) -> Panel:
        """Begin to draw, if there is somewhere to draw."""
        is_there = self._file is not None and getattr(self._file, "isatty", bool)()
        if is_there and screen.try_take():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._file), refresh_per_second=1 / PANEL_PERIOD_S
            )
            self._live.start()
            listeners.add_sink(self._note)
            super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End it; the last panel stays on the screen."""
        if self._live is not None:
            listeners.remove_sink(self._note)
            super().__exit__()
            self._live.stop()
            screen.give_back()

    def _note(self, happening: Happening, _: Any) -> None:
        if happening.kind == "fetch":
            self._last = happening

    def show(self, rates: Rates, stats: dict[str, Any]) -> None:
        """Draw the panel anew."""
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        last, coming = self._last, "nothing"
        if last is not None:
            name = self._manager.names.of_block(last.block_id)
            coming = f"{name} ({format_nbytes(last.nbytes)}{', ahead' if last.is_ahead else ''})"
        grid = Table.grid(padding=(0, 2))
        total = max(rates.budget_nbytes, 1)
        bar = ProgressBar(total=total, completed=rates.resident_nbytes, width=20)
        held = f"{format_nbytes(rates.resident_nbytes)} of {format_nbytes(rates.budget_nbytes)}"
        grid.add_row("resident", bar, held)
        grid.add_row("link", f"{rates.bytes_per_s / 1e9:.2f} GB/s", f"fetched last: {coming}")
        grid.add_row(
            "stalled",
            f"{rates.stalled_share:.0%}",
            f"hits {rates.hit_share:.0%} of those looked for",
        )
        grid.add_row("operators", f"{rates.ops_per_s:,.0f} /s", f"{stats['op_count']:,} so far")
        title = f"torchTensorRef: {stats['strategy']} on {stats['device']}"
        self._live.update(Box(grid, title=title, title_align="left"), refresh=True)
