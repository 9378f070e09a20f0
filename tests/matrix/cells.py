"""Where the tests are run: which torch, on which Python, and which of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Cell(NamedTuple):
    """One environment."""

    torch: str
    python: str
    why: str


def pinned(package: str) -> str:
    """Return the version of a package that the tests are run with every day."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)[package]


CELLS = {
    "oldest": Cell("2.9.1", "3.11", "the oldest torch that setup.cfg takes"),
    "2.10": Cell("2.10.0", "3.11", "the oldest line but one"),
    "2.12": Cell("2.12.1", "3.11", "the line before the pinned torch"),
    "pinned": Cell(pinned("torch"), "3.11", "the torch that the tests are run with every day"),
    "2.14": Cell("2.14.1", "3.11", "the line between the pinned and the newest torch"),
    "newest": Cell("2.15.0", "3.11", "the newest torch that is published"),
    "python-3.13": Cell(pinned("torch"), "3.13", "a newer Python"),
    "python-3.14": Cell(pinned("torch"), "3.14", "the newest Python that the pinned torch has"),
    "python-3.15": Cell("2.15.0", "3.15", "the newest Python"),
}

#: What is run in each: whatever changes with torch, in at most `LIMIT_S` seconds.
SELECTION = (
    "tests/unit/base",
    "tests/unit/inject",
    "tests/unit/memory",
    "tests/unit/operators",
    "tests/unit/tensor",
    "tests/conformance/test_faces_of_autograd.py",
    "tests/conformance/test_faces_of_classes.py",
    "tests/conformance/test_faces_of_layouts.py",
    "tests/conformance/test_faces_of_modules.py",
    "tests/conformance/test_faces_of_tracing.py",
    "tests/conformance/test_faces_of_types.py",
    "tests/conformance/test_schema_audit.py",
    "tests/sim/test_compiler.py",
    "tests/sim/test_core.py",
    "tests/sim/test_import_orders.py",
    "tests/sim/test_injection.py",
    "tests/sim/test_training.py",
)
LIMIT_S = 240
