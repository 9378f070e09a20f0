"""The smallest dry run of the benchmark against peers, as a person starts it: is it honest?"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.sweeps import only_in_sweeps

PEERS = ("accelerate", "diffusers", "transformers")
pytestmark = [
    only_in_sweeps,  # `tests/unit/benchmarks/test_small_gpu.py` has its parts
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in PEERS), reason="needs the peers"
    ),
]

ROOT = Path(__file__).parents[2]
WHO = "flow,plain,accelerate,diffusers"


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small_gpu")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.small_gpu", "--dry", "--scale", "tiny"),
            *("--only", f"diffusion,50,{WHO}", "--state", str(folder)),
            *("--write", str(folder / "page.md")),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT ")), (folder / "page.md").read_text()


def test_every_cell_has_figures_or_a_reason(dry):
    result, page = dry
    assert result["is_finished"]
    cells = result["cells"]["diffusion"]["50"]
    assert set(cells) == {"flow", "plain", "accelerate", "diffusers block", "diffusers leaf"}
    for name, row in cells.items():
        if name == "plain":
            assert row["status"] == "skipped"
            assert "the cap is" in row["reason"]
        else:
            assert row["status"] == "measured", row
            assert row["step_s"] > 0
        assert f"| {name} |" in page


def test_everyone_gives_the_bits_of_plain_torch(dry):
    cells = dry[0]["cells"]["diffusion"]["50"]
    measured = {name: row["same"] for name, row in cells.items() if row["status"] == "measured"}
    assert len(measured) == 4
    assert all(same["bits"] and same["largest"] == 0 for same in measured.values()), measured


def test_ours_keeps_within_the_cap_and_nobody_beats_the_floor(dry):
    row = dry[0]["cells"]["diffusion"]["50"]["flow"]
    assert 0.5 * row["cap_nbytes"] < row["memory"]["allocated"] <= row["cap_nbytes"]
    assert 0.2 < row["of_floor"] <= 1


def test_times_of_the_host_are_not_compared(dry):
    result, page = dry
    cells = result["cells"]["diffusion"]["50"]
    for name in ("accelerate", "diffusers block", "diffusers leaf"):
        assert not cells[name]["is_comparable"]
        assert "of_bound" not in cells[name]
        assert cells[name]["note"].startswith("on the host: ")
    peers = [t for t in result["targets"] if "times faster" in t["what"]]
    assert len(peers) == 2
    assert all(t["met"] is None for t in peers)
    assert "A dry run" in page


def test_a_process_that_fails_or_takes_too_long_is_told_from_one_that_ends(tmp_path):
    """Of those that are started afresh; the dry run is what forked ones do."""
    from benchmarks.small_gpu.processes import Processes
    from benchmarks.small_gpu.seat import Job

    job = Job(
        device="cpu",
        scale="tiny",
        family="denoiser",
        contestant="plain",
        workloads=["diffusion"],
        cap_nbytes=None,
        headroom_nbytes=0,
        weights=str(tmp_path / "nothing"),
        out="",
        results={},
        cell_s=1.0,
        timelines={},
    )
    processes = Processes(tmp_path / "seats", is_forking=False)
    ending = processes.run("failing", job, 120.0)
    assert ending.status == "exit 42"
    assert [event["event"] for event in ending.events] == ["started", "failed"]
    assert "nothing" in ending.events[-1]["reason"]
    assert "Traceback" in (tmp_path / "seats" / "failing.log").read_text()
    ending = processes.run("slow", job, 0.001)
    assert ending.status == "stopped after 0 s"
