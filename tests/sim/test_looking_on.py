"""`run --timeline`, `--live`, `--progress`, `--budget auto`; the report at signals and errors."""

import io
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from torchTensorRef.base.listeners import listeners
from torchTensorRef.interception.onlookers.live import Lines, Panel, rates_between

PROGRAM = """\
import sys, time
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
x = torch.rand(2, 64)
with torch.no_grad():
    for _ in range(3):
        y = model(x)
if "wait" in sys.argv:
    print("ready", flush=True)
    for _ in range(600):  # Python 3.14 does not look for signals behind a call with names
        time.sleep(0.1)
if "fail" in sys.argv:
    raise SystemError("over")
"""


def command(*arguments):
    return [sys.executable, "-m", "torchTensorRef", "run", "--device", "sim", *arguments]


def run(*arguments):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=200, check=False
    )


def test_a_timeline_and_a_report_in_json(script, tmp_path):
    report, timeline = tmp_path / "report.json", tmp_path / "run.json"
    done = run("--report", str(report), "--timeline", str(timeline), "--budget", "40KiB",
               script(PROGRAM))  # fmt: skip
    assert done.returncode == 0, done.stderr
    stats = json.loads(report.read_text())
    about = stats["run"]
    assert about["arguments"][:2] == ["--device", "sim"]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", about["version"])
    assert about["wall_ns"] > about["virtual_ns"] > 0
    assert stats["host_fallback_operators"] == {}
    recorded = json.loads(timeline.read_text())["torchTensorRef"]
    assert recorded["stats"]["fetched_nbytes"] == stats["fetched_nbytes"] > 0
    assert "0.weight" in {name for name, *_ in recorded["blocks"].values()}


def test_the_report_comes_with_an_error_too(script):
    done = run("--budget", "auto", script(PROGRAM), "fail")
    assert done.returncode == 1
    assert "SystemError: over" in done.stderr
    assert "needs      65.00 KiB of tensors that stay, all of them fit" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_report_comes_before_a_signal_ends_it(script, tmp_path):
    report = tmp_path / "report.json"
    with subprocess.Popen(
        command("--report", str(report), script(PROGRAM), "wait"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert json.loads(report.read_text())["op_count"] > 0


def test_the_panel_is_drawn_on_a_terminal_only(manager):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    x = manager.adopt(torch.rand(50, 50))
    x @ x  # the first product imports what counts its operations
    for file, is_drawn in ((Terminal(), True), (io.StringIO(), False)):
        with Panel(manager, file):
            began_s = time.monotonic()
            while time.monotonic() - began_s < 1.2:
                x.toCPU()
                x @ x
        text = file.getvalue()
        assert ("resident" in text and "operators" in text) is is_drawn
        assert (x.proxyInfo.block in text) is is_drawn
        # Drawn, not poured: at most four times a second.
        assert text.count("torchTensorRef: lru on sim:test") <= 12
    assert not listeners.any
    with manager.live():  # stderr of a test is no terminal
        pass


def test_lines_tell_steps_and_rates(manager, capsys):
    model = manager.adopt(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    x = manager.adopt(torch.rand(1, 8))
    with Lines(manager, period_s=0.05), torch.no_grad():
        for _ in range(30):
            model(x)
            time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert re.search(
        r"step [1-9]\d*, [\d.]+ steps/s, .* operators/s, .* GB/s, .* stalled", lines[-1]
    )
    steps = [int(re.search(r"step (\d+)", line)[1]) for line in lines]
    assert steps == sorted(steps)
    assert steps[-1] <= 30


def test_rates_begin_again_with_the_counts():
    names = [f"{name}_nbytes" for name in ("fetched", "prefetched", "written_back")]
    names += ["op_count", "stall_ns", "time_ns", "slow_hit_count", "miss_count"]
    names += ["resident_nbytes", "budget_nbytes"]
    before, now = dict.fromkeys(names, 100), dict.fromkeys(names, 40)
    rates = rates_between(before, now, 2.0)
    assert (rates.ops_per_s, rates.bytes_per_s, rates.stalled_share) == (20.0, 60.0, 1.0)
    assert rates.hit_share == 0.5


def test_copies_are_ranges_in_torchs_profiler(manager):
    from torch.profiler import profile

    model = manager.adopt(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    x = manager.adopt(torch.rand(1, 8))
    with profile() as profiled, torch.no_grad():
        y = model(x)
        y.toCPU()
    keys = {event.key for event in profiled.key_averages()}
    assert {"ttr::fetch 0.weight", "ttr::fetch 0.bias"} <= keys
    assert any(key.startswith("ttr::write_back b") for key in keys)


def test_torchs_profiler_sees_shapes_stacks_and_flops(manager):
    """It asks each operand for its bytes: null, as those of tensors that have none."""
    from torch.profiler import ProfilerActivity, profile

    model = manager.adopt(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()))
    x = manager.adopt(torch.rand(2, 8))
    seen = {"record_shapes": True, "with_stack": True, "profile_memory": True, "with_flops": True}
    model(x)  # what is imported meanwhile leaves names with torch that are gone when it reads them
    with profile(activities=[ProfilerActivity.CPU], **seen) as profiled:
        model(x).sum().backward()
    products = [event for event in profiled.events() if event.name == "aten::addmm"]
    assert [[4], [2, 8], [8, 4], [], []] in [event.input_shapes for event in products]
    assert sum(event.flops for event in products) >= 2 * 2 * 8 * 4
