"""An environment is set up, the selection is run in it, and what came of it is counted."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from .cells import LIMIT_S, ROOT, SELECTION, Cell

#: Environments, some 6 GB each: torch comes with its vendor's libraries.
FOLDER = ROOT / ".venv-matrix"
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
    """Run the selection with an interpreter; what takes longer than the limit is broken off."""
    torch, version = json.loads(
        subprocess.run(
            [python, "-c", _VERSIONS],
            env={**os.environ, "TTR_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    report = FOLDER / f"{torch}-{version}.xml"
    FOLDER.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    workers = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    begin = time.perf_counter()
    broken_off = ""
    process = subprocess.Popen([*command, f"--junitxml={report}", *selection], cwd=ROOT)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        broken_off = f"broken off after {limit_s} s"
        process.terminate()  # pytest ends its workers
        process.wait()
    took_s = round(time.perf_counter() - begin, 1)
    counts, failures = _read(report)
    if not broken_off and process.returncode not in (0, 1):
        broken_off = f"pytest ended with {process.returncode}"
    return Run(torch, version, date.today().isoformat(), took_s, counts, failures, broken_off)


def _read(report: Path) -> tuple[dict[str, int], dict[str, str]]:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, str] = {}
    if not report.exists():
        return counts, failures
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [part for part in case if part.tag in ("failure", "error")]
        kind = "failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if wrong:
            why = (wrong[0].get("message") or "").partition("\n")[0]
            failures[f"{case.get('classname')}::{case.get('name')}"] = why[:200]
    return counts, failures


def as_json(done: Run) -> dict[str, object]:
    """Return what is kept of a run."""
    return asdict(done)


def in_words(name: str, done: Run) -> str:
    """Say on a line what came of a run."""
    counts = ", ".join(f"{count} {kind}" for kind, count in done.counts.items())
    ended = f"; {done.broken_off}" if done.broken_off else ""
    where = f"{name}: torch {done.torch}, Python {done.python}"
    return f"{where}: {counts}; {done.took_s:.0f} s{ended}"
