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


def assert_all_was_heard(output: str) -> None:
    kernels, copies, evicted = map(int, output.split())
    assert evicted > 20
    assert kernels > evicted
    assert copies > evicted / 2, "what is evicted clean is copied once"


def test_the_program_moves_everything_about():
    assert_all_was_heard(run("late"))


@pytest.mark.device
def test_no_race_on_a_card(accelerator):
    if accelerator.kind != "cuda":
        pytest.skip(f"torch has a sanitizer for cuda only, not for {accelerator.kind}")
    assert_all_was_heard(run("cuda"))
