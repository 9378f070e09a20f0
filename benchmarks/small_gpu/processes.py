"""Seats' processes: forked from one that has imported everything, or afresh; and their endings."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from .seat import BAD_FORK, Job, main

#: Imported once, in the process that seats are forked from: seconds per seat on a slow machine.
#: torchTensorRef is not among them: a seat that is not ours never imports it.
PRELOADED = "benchmarks.small_gpu.preloaded"


class Ending(NamedTuple):
    """How a seat's process ended."""

    events: list[dict[str, Any]]
    status: str
    took_s: float


class Processes:
    """Runs seats one at a time.

    Parameters
    ----------
    folder : Path
        For jobs, their events and what they print.
    is_forking : bool
        Whether to try.

    Notes
    -----
    Forking is right only while the process forked from has not touched the accelerator. A seat
    looks (`BAD_FORK`), and then all further ones are started afresh.
    """

    def __init__(self, folder: Path, *, is_forking: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # Otherwise asking whether there is a device opens it, in the process forked from.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED])
        self.is_forking = is_forking

    def run(self, name: str, job: Job, limit_s: float) -> Ending:
        """Run one seat; it is killed after `limit_s`."""
        events = self.folder / f"{name}.events"
        events.unlink(missing_ok=True)
        job["out"] = str(events)
        began_s = time.perf_counter()
        status = self._run_once(name, job, limit_s)
        if status == f"exit {BAD_FORK}":
            self.is_forking = False
            status = self._run_once(name, job, limit_s)
        text = events.read_text() if events.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return Ending(found, status, time.perf_counter() - began_s)

    def last_line(self, name: str) -> str:
        """Return the last line that a seat printed."""
        log = self.folder / f"{name}.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )

    def _run_once(self, name: str, job: Job, limit_s: float) -> str:
        log = self.folder / f"{name}.log"
        return (
            self._forked(log, job, limit_s) if self.is_forking else self._fresh(log, job, limit_s)
        )

    def _forked(self, log: Path, job: Job, limit_s: float) -> str:
        process = self._context.Process(target=_main_into, args=(log, job))
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
            return f"stopped after {limit_s:.0f} s"
        return _status(process.exitcode or 0)

    def _fresh(self, log: Path, job: Job, limit_s: float) -> str:
        path = log.with_suffix(".job")
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.small_gpu.seat", str(path)]
        with log.open("ab") as into:
            try:
                done = subprocess.run(
                    command, stdout=into, stderr=into, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                return f"stopped after {limit_s:.0f} s"
        return _status(done.returncode)


def _status(code: int) -> str:
    if code < 0:
        return f"ended by signal {-code}"
    return "ended" if code == 0 else f"exit {code}"


def _main_into(log: Path, job: Job) -> None:
    """Run a seat with everything it prints in a file."""
    with log.open("ab", buffering=0) as into:
        os.dup2(into.fileno(), 1)
        os.dup2(into.fileno(), 2)
    main(job)
