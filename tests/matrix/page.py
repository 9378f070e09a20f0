"""What `docs/compatibility.md` says of versions of torch and Python."""

from __future__ import annotations

import json
from typing import Any

from torchTensorRef.base import torch_versions

from .cells import CELLS, LIMIT_S, ROOT
from .runs import Run, as_json

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "tests" / "matrix" / "results.json"
#: Runs of all tests, by the version of torch.
WHOLE = ROOT / "tests" / "matrix" / "whole.json"
BEGIN, END = "<!-- begin of the matrix -->", "<!-- end of the matrix -->"

_HEAD = """\
## Versions

`make matrix` runs a selection of the tests (`tests/matrix/cells.py`, at most {limit_s} s each on
idle cores) in an environment of its own for each version. Without a result a row has not been run.

| | torch | Python | | passed | failed | skipped | when |
|---|---|---|---|---:|---:|---:|---|
"""
_WHOLE = """
All tests (`python -m pytest -p tests.matrix.recording`, noted by `python -m tests.matrix --whole`):

| torch | Python | passed | failed | skipped | when |
|---|---|---:|---:|---:|---|
"""
_LACKS = """
What a version lacks is one table (`torchtensorref/base/torch_versions.py`):

| what | torch that has it | elsewhere |
|---|---|---|
"""


def known() -> dict[str, Any]:
    """Return what has been run so far, by cell."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def note(name: str, done: Run) -> None:
    """Keep what came of a cell, beside what is known of the others."""
    RESULTS.write_text(
        json.dumps({**known(), name: as_json(done)}, indent=1, sort_keys=True) + "\n"
    )


def note_whole(done: Run) -> None:
    """Keep what came of all tests, in the place of what is known of that version of torch."""
    found = json.loads(WHOLE.read_text()) if WHOLE.exists() else {}
    found[done.torch] = as_json(done)
    WHOLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _whole() -> list[str]:
    """The rows on runs of all tests, and what failed in them."""
    found = json.loads(WHOLE.read_text()) if WHOLE.exists() else {}
    if not found:
        return []
    lines, failed = [_WHOLE.rstrip()], []
    for torch, run in found.items():
        counts = " | ".join(str(run["counts"][kind]) for kind in ("passed", "failed", "skipped"))
        lines.append(f"| {torch} | {run['python']} | {counts} | {run['day']} |")
        failed += [f"* `{test}` (torch {torch})" for test in sorted(run["failures"])]
    return [*lines, "", "Failed then:", "", *failed] if failed else lines


def section(results: dict[str, Any]) -> str:
    """The part of the page that is about versions."""
    lines = [BEGIN, "", _HEAD.format(limit_s=LIMIT_S).rstrip()]
    for name, cell in CELLS.items():
        run = results.get(name)
        if run is None:
            lines.append(f"| {name} | {cell.torch} | {cell.python} | {cell.why} | not run | | | |")
            continue
        counts = " | ".join(str(run["counts"][kind]) for kind in ("passed", "failed", "skipped"))
        ended = f", {run['broken_off']}" if run["broken_off"] else ""
        lines.append(
            f"| {name} | {run['torch']} | {run['python']} | {cell.why} | {counts} "
            f"| {run['day']}{ended} |"
        )
    lines += _whole()
    lines.append(_LACKS.rstrip())
    for row in torch_versions.ROWS.values():
        lines.append(f"| {row.name} | {row.torches} | {row.reason} |")
    failed = [(name, run) for name, run in results.items() if run["failures"]]
    for name, run in failed:
        lines += ["", f"Failed on {name}:", ""]
        lines += [f"* `{test}`: {why}" for test, why in sorted(run["failures"].items())]
    return "\n".join([*lines, "", END]) + "\n"


def replaced(text: str, new: str) -> str:
    """Put a new section into the page, in the place of the old one."""
    before, _, rest = text.partition(BEGIN)
    return before + new + rest.partition(END)[2].removeprefix("\n")


def write() -> None:
    """Bring the section of the page up to date; the table of models stays as it is."""
    PAGE.write_text(replaced(PAGE.read_text(), section(known())))
