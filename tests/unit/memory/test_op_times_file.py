"""What was learned of operators' times is there in the next run, and nothing of it can do harm."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from torchTensorRef.base.options import settings
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory import op_times_file
from torchTensorRef.memory.op_times import OpCost, OpKey, OpTimes
from torchTensorRef.memory.op_times_file import FORMAT, OpTimesFile, file_for
from torchTensorRef.operators.plan import kind_named

MM, ADD = kind_named("aten.mm.default"), kind_named("aten.add.Tensor")
FOUND = {(MM, "float32", 10, 12): (1.5, 7), (ADD, "bfloat16", 3, 0): (-0.25, 1)}
COST = OpCost(64, 1000, "float32")


class Accelerator:
    name, hardware, is_host, has_virtual_clock = "late:0", "late one", False, False

    def now_ns(self):
        return 0

    def stopwatch(self):
        return self

    def stop(self):
        """It is known at once."""

    def took_ns(self):
        return 5000


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "times" / "file.json"
    path.parent.mkdir()
    monkeypatch.setattr(settings, "op_times", str(path))
    return path


def learned(device) -> int | None:
    times = OpTimes()
    times.begin(MM, COST, device, device)
    return times.expected_ns(OpKey.of(MM, COST, device), 1000)


def test_what_was_written_is_read_and_added_to(path):
    file = OpTimesFile(path, is_ours=False)
    assert file.read("one") == {}
    file.write("one", FOUND)
    file.write("two", {(MM, "float32", 10, 12): (9.0, 1)})
    file.write("one", {(MM, "float32", 10, 12): (2.5, 8)})
    assert file.read("one") == {**FOUND, (MM, "float32", 10, 12): (2.5, 8)}
    assert file.read("two") == {(MM, "float32", 10, 12): (9.0, 1)}
    assert file.read("three") == {}
    assert os.listdir(path.parent) == ["file.json"]


def test_the_next_run_knows_what_this_one_has_learned(path):
    device, times = Accelerator(), OpTimes()
    times.begin(MM, None, device, device).end(MM, COST)
    times.save()
    assert learned(device) == pytest.approx(5000, abs=1)
    device.hardware = "another one"
    assert learned(device) is None


def test_other_devices_are_used_and_what_was_learned_is_kept(path):
    device, times = Accelerator(), OpTimes()
    times.begin(MM, None, device, device).end(MM, COST)
    times.forget()
    times.begin(MM, COST, device, device)
    assert times.expected_ns(OpKey.of(MM, COST, device), 1000) == pytest.approx(5000, abs=1)


def test_what_was_learned_long_ago_gives_way(path):
    device = Accelerator()
    times = OpTimes()
    for _ in range(5):
        times.begin(MM, None, device, device).end(MM, COST)
    times.save()
    again = OpTimes()
    again.begin(MM, COST, device, device)
    turns = [again.begin(MM, COST, device, device) is not None for _ in range(8)]
    assert sum(turns) >= 2  # not one in 32


def test_nothing_new_is_not_written(path):
    device = Accelerator()
    times = OpTimes()
    times.begin(MM, None, device, device).end(MM, COST)
    times.save()
    path.unlink()
    times = OpTimes()
    times.begin(MM, COST, device, device)
    times.save()
    assert not path.exists()


WRONG = {
    "empty": "",
    "cut off": '{"format": "' + FORMAT + '", "devices": {"late one": [["aten.mm',
    "a list": "[1, 2]",
    "somebody else's": '{"format": "theirs", "devices": {}}',
    "no devices": json.dumps({"format": FORMAT}),
    "not entries": json.dumps({"format": FORMAT, "devices": {"late one": [["aten.mm", 1]]}}),
    "not numbers": json.dumps(
        {"format": FORMAT, "devices": {"x": [["aten.mm.default", "float32", 1, 1, "1.0", 1]]}}
    ),
    "not finite": json.dumps(
        {"format": FORMAT, "devices": {"x": [["aten.mm.default", "f", 1, 1, float("nan"), 1]]}}
    ),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("is_ours", [False, True])
def test_what_is_no_such_file_is_not_read_and_said_once(path, caplog, text, is_ours):
    path.write_text(text)
    file = OpTimesFile(path, is_ours=is_ours)
    with caplog.at_level(logging.WARNING, "torchTensorRef"):
        assert file.read("late one") == {}
        file.write("late one", FOUND)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    if is_ours:
        assert file.read("late one") == FOUND
    else:
        assert path.read_text() == text  # it may be anybody's


def test_bytes_that_are_no_text_are_not_read(path):
    path.write_bytes(b"\xff\xfe\x00")
    assert OpTimesFile(path, is_ours=True).read("x") == {}


def test_times_of_another_torch_are_not_taken(path):
    file = OpTimesFile(path, is_ours=False)
    file.write("one", FOUND)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "torch": "1.0"}))
    assert file.read("one") == {}
    file.write("one", {(ADD, "bfloat16", 3, 0): (1.0, 1)})
    assert file.read("one") == {(ADD, "bfloat16", 3, 0): (1.0, 1)}
    assert json.loads(path.read_text())["torch"] == torch.__version__


def test_operators_that_are_not_there_now_stay_in_the_file(path):
    file = OpTimesFile(path, is_ours=False)
    file.write("one", FOUND)
    content = json.loads(path.read_text())
    content["devices"]["one"].append(["nobodys.op.default", "float32", 1, 1, 1.0, 1])
    path.write_text(json.dumps(content))
    assert file.read("one") == FOUND
    file.write("one", {(ADD, "bfloat16", 3, 0): (1.0, 1)})
    assert "nobodys.op.default" in path.read_text()


def test_a_write_that_fails_leaves_the_file_before_and_no_other(path, monkeypatch, caplog):
    file = OpTimesFile(path, is_ours=False)
    file.write("one", FOUND)
    before = path.read_text()

    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(op_times_file.os, "replace", full)
    file.write("one", {(MM, "float32", 10, 12): (9.0, 1)})
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["file.json"]
    assert "no space left" in caplog.text


def test_the_file_does_not_grow_without_end(path, monkeypatch):
    monkeypatch.setattr(op_times_file, "MOST_ENTRIES", 10)
    file = OpTimesFile(path, is_ours=False)
    file.write("old", {(MM, "float32", n, 0): (1.0, 1) for n in range(8)})
    file.write("one", {(MM, "float32", n, 0): (1.0, 1) for n in range(20)})
    assert len(file.read("one")) == 10
    assert file.read("old") == {}


def test_where_it_is(monkeypatch, tmp_path):
    sim = SimDevice(DeviceSpec("x", 1000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "op_times", "cache")
    assert file_for(Accelerator()).path.parent == tmp_path / "torchtensorref"
    assert file_for(sim) is None  # its time is virtual
    monkeypatch.setattr(settings, "op_times", "off")
    assert file_for(Accelerator()) is None
    monkeypatch.setattr(settings, "op_times", str(tmp_path / "mine.json"))
    assert file_for(sim).path == file_for(Accelerator()).path == tmp_path / "mine.json"


PROGRAM = """
import torch
from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
spec = DeviceSpec("x", 1 << 20, host_kernel_bytes_per_s=40e9)
tensorsManager.device = SimDevice(spec)
tensorsManager.strategy = "flow"
tensorsManager.budget = 40_000
layers = [torch.nn.Linear(64, 64) for _ in range(6)]
with torch.no_grad():
    layers[0](torch.ones(1, 64))
    print(sum(known.count for known in tensorsManager.residency.times._learned.values()))
    for _ in range(3):
        x = torch.ones(1, 64)
        for layer in layers:
            x = layer(x)
"""


def test_a_second_process_begins_with_what_the_first_has_learned(tmp_path):
    path = tmp_path / "times.json"
    environ = {**os.environ, "TTR_OP_TIMES": str(path)}
    known = []
    for _ in range(2):
        run = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        done = subprocess.run(run, env=environ, capture_output=True, text=True, check=True)
        known.append(int(done.stdout))
        content = json.loads(path.read_text())
    assert content["format"] == FORMAT
    assert any(hardware.startswith("host of DeviceSpec") for hardware in content["devices"])
    assert known[1] > known[0]
