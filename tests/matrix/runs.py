"""An environment is set up, the selection is run in it, and what came of it is counted."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from . import recording
from .cells import LIMIT_S, ROOT, SELECTION, Cell

#: Environments, some 6 GB each: torch comes with its vendor's libraries.
FOLDER = ROOT / ".venv-matrix"
#: So long pytest may take to end when it is told to.
GRACE_S = 30
#: `recording`, as it is found from the root.
PLUGIN = "tests.matrix.recording"
_VERSIONS = """
import json, platform, torch
print(json.dumps([torch.__version__, platform.python_version()]))
"""


@dataclass
class Run:
    """What came of the selection in one environment."""

    torch: str
    python: str
    day: str
    took_s: float
    #: How many passed, failed, were skipped.
    counts: dict[str, int]
    #: What failed, and the first line of why.
    failures: dict[str, str] = field(default_factory=dict)
    #: What was run of the tests, and what kept the rest from being run; "" for all of it.
    broken_off: str = ""


def python_of(name: str, cell: Cell) -> Path:
    """Return an interpreter with the cell's torch and all that tests need, set up if need be."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / f"torch-{cell.torch}.stamp"
    if stamp.exists():
        return python
    subprocess.run([f"python{cell.python}", "-m", "venv", "--clear", folder], check=True)
    kept = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-cache-dir"]
    wanted = [f"torch=={cell.torch}", "-e", f"{ROOT}[test]"]
    subprocess.run([*pip, "-c", kept, *wanted], check=True, cwd=ROOT)
    stamp.touch()
    return python


def run(python: Path, selection: tuple[str, ...] = SELECTION, limit_s: int = LIMIT_S) -> Run:
    """Run the selection with an interpreter; what takes longer than the limit is broken off.

    The limit is that of a machine of one's own: where others want the cores, it is longer.
    """
    limit_s = round(limit_s * (1 + os.getloadavg()[0] / (os.cpu_count() or 1)))
    torch, version = _versions(python)
    record = FOLDER / f"{torch}-{version}.jsonl"
    FOLDER.mkdir(exist_ok=True)
    record.write_text("")
    workers = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN]
    environ = {**os.environ, recording.VARIABLE: str(record)}
    begin = time.perf_counter()
    broken_off = ""
    process = subprocess.Popen([*command, *workers, *selection], cwd=ROOT, env=environ)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        broken_off = f"broken off after {limit_s} s"
        process.send_signal(signal.SIGINT)  # pytest ends its workers
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    took_s = round(time.perf_counter() - begin, 1)
    counts, failures = _read(record)
    if not broken_off and process.returncode not in (0, 1):
        broken_off = f"pytest ended with {process.returncode}"
    return Run(torch, version, date.today().isoformat(), took_s, counts, failures, broken_off)


def whole(python: Path, record: Path) -> Run:
    """Return what came of a whole suite, which `recording` has written down."""
    counts, failures = _read(record)
    torch, version = _versions(python)
    return Run(torch, version, date.today().isoformat(), 0.0, counts, failures)


@functools.cache
def _versions(python: Path) -> tuple[str, str]:
    torch, version = json.loads(
        subprocess.run(
            [python, "-c", _VERSIONS],
            env={**os.environ, "TTR_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    return torch, version


def _read(record: Path) -> tuple[dict[str, int], dict[str, str]]:
    # A test may pass and fail in its end; then it has failed.
    reasons: dict[str, str] = {}
    outcomes: dict[str, str] = {}
    for line in record.read_text().splitlines():
        name, outcome, why = json.loads(line)
        outcomes[name] = "failed" if "failed" in (outcome, outcomes.get(name)) else outcome
        if outcome == "failed":
            reasons.setdefault(name, why)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in outcomes.values():
        counts[outcome] += 1
    return counts, reasons


def as_json(done: Run) -> dict[str, object]:
    """Return what is kept of a run."""
    return asdict(done)


def in_words(name: str, done: Run) -> str:
    """Say on a line what came of a run."""
    counts = ", ".join(f"{count} {kind}" for kind, count in done.counts.items())
    ended = f"; {done.broken_off}" if done.broken_off else ""
    where = f"{name}: torch {done.torch}, Python {done.python}"
    return f"{where}: {counts}; {done.took_s:.0f} s{ended}"
