"""The benchmark on a bare machine: carried wheels, a state in one file, peers in their ways."""

import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.small_gpu import __main__ as command
from benchmarks.small_gpu import archive, calls, carried, seat, table
from benchmarks.small_gpu.contestants import CONTESTANTS, Contestant, reason_not
from benchmarks.small_gpu.machine import Machine
from benchmarks.small_gpu.plan import NO_CAP, Seat
from benchmarks.small_gpu.workloads import Workload

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the models are transformers'"
)


# -- from what is there ----------------------------------------------------------------------------


def wheel(path, module, text):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{module}/__init__.py", text)


def test_carried_wheels_of_this_python_are_imported_and_nothing_is_installed(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    this = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheel(wheels / "one_carried-1.0-py3-none-any.whl", "one_carried", "number = 1")
    wheel(wheels / f"two_carried-1.0-{this}-{this}-any.whl", "two_carried", "number = 2")
    wheel(wheels / "three_carried-1.0-cp39-cp39-any.whl", "three_carried", "number = 3")
    assert carried.open_site(wheels, site) == [site]
    asks = "import one_carried, two_carried; print(one_carried.number + two_carried.number)"
    done = subprocess.run(
        [sys.executable, "-c", asks], env=carried.environment([site]), capture_output=True
    )
    assert done.stdout.strip() == b"3", done.stderr
    assert not (site / "three_carried").exists(), "of another Python"


def test_ours_is_taken_from_the_tree_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    site = tmp_path / "site"
    assert carried.open_site(tmp_path / "none", site) == [site]
    asks = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)];"
    asks += "import torchTensorRef, torchTensorRef.strategies.flow as f; print(f.__file__)"
    environment = {**carried.environment([site])}
    done = subprocess.run(
        [sys.executable, "-c", asks], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(site)), done.stderr


def test_make_gpu_installs_nothing_where_torch_is_there(tmp_path):
    dry = subprocess.run(
        ["make", "-n", "gpu", f"VENV={tmp_path}/none", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert dry.returncode == 0, dry.stderr
    assert "pip" not in dry.stdout
    assert "benchmarks.small_gpu.carried benchmarks.small_gpu.calls" in dry.stdout


# -- one file --------------------------------------------------------------------------------------


class Scripted:
    """Stands for the processes: answers each job from a list of events."""

    def __init__(self, folder, *endings):
        self.folder, self.endings, self.jobs, self.is_forking = folder, list(endings), [], True

    def run(self, name, job, limit_s):
        self.jobs.append(job)
        for path in job["results"].values():
            torch.save({"tokens": torch.ones(2), "logits": torch.ones(2)}, path)
        return command.Ending(self.endings.pop(0), "ended", 0.1)

    def last_line(self, name):
        return ""


def probed(digest="0"):
    rates = dict.fromkeys(
        ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s", "flops_per_s"), 1e9
    )
    return {
        "event": "probe",
        "probe": {"link": {"h2d": {"4": 1e6}}, **rates},
        "digest": digest,
        "hardware": {"device": "one"},
        "total_nbytes": 0,
    }


def said(workload, **changes):
    memory = dict.fromkeys(
        ("allocated", "reserved", "page_locked", "rss", "in_steps", "between_steps", "retries"), 1
    )
    return {
        "event": "measured",
        "workload": workload,
        **seat.figures([1.0]),
        "first_s": 1.0,
        "is_comparable": True,
        "is_repeatable": True,
        "headroom_nbytes": 0,
        "memory": memory,
        "counts": {},
        "note": "",
        **changes,
    }


def bench(monkeypatch, folder, state, *endings):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    arguments = ["--device", "cpu", "--scale", "tiny", "--only", "decode1", "--state", str(state)]
    made = command.Bench(command.parse(arguments))
    made.processes = Scripted(made.folder, *endings)
    return made


PLAIN, FLOW = Seat(0, "llama", NO_CAP, "plain"), Seat(0, "llama", 50, "flow")


def test_a_bare_machine_goes_on_from_one_file(tmp_path, monkeypatch):
    state = tmp_path / "state.tar.gz"
    first = bench(monkeypatch, tmp_path / "first", state, [probed()], [said("decode1")])
    first._prepare()
    first._run_seat(PLAIN)
    assert state.exists()
    second = bench(monkeypatch, tmp_path / "second", state, [probed()], [said("decode1")])
    second._prepare()
    assert len(second.processes.jobs) == 1, "weights are made where there are none"
    second._run_seat(PLAIN)
    assert len(second.processes.jobs) == 1, "what was measured is not measured again"
    second._run_seat(FLOW)
    assert second.state.row("decode1", 50, "flow")["same"]["bits"]
    third = bench(monkeypatch, tmp_path / "third", state)
    results = sorted(path.name for path in third.results.iterdir())
    assert results == ["decode1_none_plain.pt"], "equal results are not carried"
    assert third.comparison.finished("decode1", 50, "flow")["same"]["bits"]


def test_other_weights_are_not_gone_on_with(tmp_path, monkeypatch):
    state = tmp_path / "state.tar.gz"
    bench(monkeypatch, tmp_path / "first", state, [probed()])._prepare()
    with pytest.raises(RuntimeError, match="not those of the run"):
        bench(monkeypatch, tmp_path / "second", state, [probed("1")])._prepare()


def test_the_tests_that_passed_are_in_the_file_as_well(tmp_path, monkeypatch):
    state, made = tmp_path / "state.tar.gz", []
    for name in ("first", "second"):
        for folder in calls.TESTED:
            (tmp_path / name / folder).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)

        def run(arguments, **options):
            made.append(arguments)
            return subprocess.CompletedProcess(arguments, 0)

        monkeypatch.setattr(calls.subprocess, "run", run)
        assert calls.main(["--call", "tests", "--state", str(state)]) == 0
    assert len(made) == 1


def test_an_archive_is_whole_or_as_it_was(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "state.tar"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "state.json").write_text("{}")
    archive.pack(file, folder)
    (folder / "run" / "second.json").write_text("{}")

    def breaks(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive.pack(file, folder, breaks)
    assert archive.unpack(file, tmp_path / "other")
    assert [p.name for p in (tmp_path / "other" / "run").iterdir()] == ["state.json"]
    assert not archive.unpack(tmp_path / "none.tar", tmp_path / "other")


# -- warming up ------------------------------------------------------------------------------------


class Changing(Contestant):
    """Settles after so many runs; None: never."""

    def __init__(self, settles_after):
        super().__init__("changing")
        self.settles_after, self.runs = settles_after, 0

    def is_settled(self):
        self.runs += 1
        return self.settles_after is not None and self.runs >= self.settles_after


@pytest.mark.parametrize(
    ("settles_after", "runs", "is_settled"), [(1, 2, True), (5, 5, True), (None, 8, False)]
)
def test_who_still_changes_is_warmed_up_longer_and_not_for_ever(settles_after, runs, is_settled):
    contestant, done = Changing(settles_after), []
    workload = Workload("decode1", lambda *_: None, warm_up_runs=2)
    job = {"device": "cpu", "warm_s": 0.0}
    found = seat._warm_up(job, workload, contestant, Machine("cpu"), lambda: done.append(1))
    assert (len(done), found) == (runs, is_settled)


def test_all_are_warmed_up_for_the_same_seconds():
    clock = iter(range(100))
    machine = types.SimpleNamespace(runs_once=False, now_s=lambda: float(next(clock)))
    workload, done = Workload("decode1", lambda *_: None), []
    seat._warm_up(
        {"device": "cpu", "warm_s": 6.0}, workload, Changing(1), machine, lambda: done.append(1)
    )
    assert len(done) == 6


def test_who_was_still_changing_is_said_in_the_table():
    row = {"workload": "prefill", "cap": 50, "contestant": "flow", "cap_nbytes": 200, "same": {}}
    row |= {"status": "measured", **said("prefill", is_settled=False, counts={"staged_nbytes": 5})}
    texts = dict(zip(table.HEADINGS, table.cells_of(row), strict=True))
    assert "still changing" in texts["note"]
    assert (texts["staged"], texts["retries"]) == ("5 B", "1")


# -- FlexTensor ------------------------------------------------------------------------------------


def test_flextensor_is_skipped_with_its_reason(monkeypatch):
    peer = CONTESTANTS["flextensor"]
    assert reason_not(peer, "decode1", 1, 1, "cpu") == "FlexTensor needs cuda, and this is cpu"
    assert reason_not(peer, "training", 1, 1, "cuda:0") == "FlexTensor is for inference only"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason_not(peer, "decode1", 1, 1, "cuda:0") == "flextensor is not installed"


def test_flextensor_gets_all_blocks_the_same_cap_and_its_warm_up(monkeypatch):
    """What is handed over; flextensor itself begins with an event of cuda."""
    given = {}

    class Config:
        def __init__(self, **options):
            given.update(options)

    manager = types.SimpleNamespace(phase=types.SimpleNamespace(value="profiling"))
    module = types.SimpleNamespace(
        OffloadConfig=Config,
        offload=lambda model, config: ("before", model),
        get_offload_manager=lambda: manager,
    )
    monkeypatch.setitem(sys.modules, "flextensor", module)
    machine = types.SimpleNamespace(index=0, total_nbytes=lambda: 1000, put=None)
    peer = CONTESTANTS["flextensor"]
    model = types.SimpleNamespace(_no_split_modules=["LlamaDecoderLayer"])
    peer.place(model, machine, 250, ROOT)
    assert given["max_gpu_mem_fraction"] == 0.25
    assert given["include_patterns"] == ["class:LlamaDecoderLayer"]
    assert peer.model_to_run(model) == ("before", model)
    assert not peer.is_settled()
    manager.phase.value = "inference"
    assert peer.is_settled()
