"""One run as a timeline, where a step was slower than its target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .machine import Machine


def write(path: Path, machine: Machine, run: Callable[[], Any]) -> None:
    """Run once more and write what happened to `path`.

    With an accelerator that torch's profiler knows, a Chrome trace that Perfetto opens (gzipped);
    beside it, and alone elsewhere, our own events as JSON lines (what `TTR_TRACE_FILE` writes).
    """
    from torchTensorRef import tensorsManager
    from torchTensorRef.base.event_sinks import as_json_line

    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    before = tensorsManager.log.sink
    tensorsManager.log.sink = lambda record: lines.append(as_json_line(record))
    try:
        if machine.device.type in ("cuda", "xpu"):
            _profiled(path.with_suffix(".trace.json.gz"), run)
        else:
            run()
    finally:
        tensorsManager.log.sink = before
    path.write_text("".join(lines))


def _profiled(path: Path, run: Callable[[], Any]) -> None:
    with torch.profiler.profile() as profile:
        run()
    profile.export_chrome_trace(str(path))
