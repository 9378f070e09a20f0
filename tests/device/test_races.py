"""No two streams touch the same bytes with nothing between them: torch's sanitizer is the judge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("race_program.py")


def run(kind: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CSAN detected a possible data race" not in done.stderr
    return done.stdout


def evicted(output: str) -> int:
    return int(output.rpartition("evicted ")[2])


def test_the_program_moves_everything_about():
    assert evicted(run("late")) > 50


@pytest.mark.device
def test_no_race_on_a_card(accelerator):
    if accelerator.kind != "cuda":
        pytest.skip(f"torch has a sanitizer for cuda only, not for {accelerator.kind}")
    assert evicted(run("cuda")) > 20
