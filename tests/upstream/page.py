"""The page that says what became of other projects' tests: ``docs/upstream.md``."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .runs import Compared
from .sources import ROOT
from .suites import BUDGETS, SUITES

PAGE = ROOT / "docs" / "upstream.md"
RESULTS = ROOT / "tests" / "upstream" / "results.json"

HEAD = """\
<!-- Made by `python -m tests.upstream`. Do not edit. -->

# Other projects' own tests

The tests that libraries ship, unmodified: once on plain torch, and with `torchtensorref run -m
pytest` on the simulated accelerator, within {tight} (everything comes and goes) and {roomy}.
Compared is what became of each test; what differs is run again both ways, since tests draw numbers.
A library's own failures count as the same where they are the same.

    python -m tests.upstream             # all but those that take long
    python -m tests.upstream --long      # all
    python -m tests.upstream einops timm # some

| library | tests | passed, plain torch | differ, {tight} | differ, {roomy} | left out |
|---|---|---|---|---|---|
"""


def note(compared: Compared) -> dict[str, Any]:
    """Keep what is written of one suite, beside what is known of the others."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[compared.suite.name] = {
        "version": compared.suite.requirement.partition("==")[2],
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "counts": dict(compared.plain.counts),
        "took_s": {
            "plain": round(compared.plain.took_s, 1),
            **{budget: round(run.took_s, 1) for budget, run in compared.ours.items()},
        },
        "differences": {budget: compared.differences(budget) for budget in compared.ours},
    }
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known


def write(known: dict[str, Any], page: Path = PAGE) -> None:
    """Write the page from the results of all suites."""
    lines = [HEAD.format(**BUDGETS)]
    total = {"tests": 0, **dict.fromkeys(BUDGETS, 0)}
    for name, row in sorted(known.items()):
        count = sum(row["counts"].values())
        found = {budget: len(row["differences"][budget]) for budget in BUDGETS}
        total["tests"] += count
        for budget in BUDGETS:
            total[budget] += found[budget]
        lines.append(
            f"| {name} {row['version']} | {count} | {row['counts'].get('passed', 0)} "
            f"| {found['tight']} | {found['roomy']} | {SUITES[name].left_out} |\n"
        )
    lines.append(f"| all | {total['tests']} | | {total['tight']} | {total['roomy']} | |\n")
    versions = sorted({row["torch"] for row in known.values()})
    lines.append(f"\nRun with torch {', '.join(versions)}.\n")
    missing = [name for name in SUITES if name not in known]
    if missing:
        lines.append(f"In the table, and not run yet: {', '.join(missing)}.\n")
    for name, row in sorted(known.items()):
        texts = {
            text: test for found in row["differences"].values() for test, text in found.items()
        }
        if texts:
            lines.append(f"\n## {name}\n\n")
            if SUITES[name].because:
                lines.append(f"{SUITES[name].because}\n\n")
            lines += [f"* `{test}`: {text.strip()}\n" for text, test in sorted(texts.items())]
    page.write_text("".join(lines))
