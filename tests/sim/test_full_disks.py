"""Full disks, closed streams, sudden ends: nothing of the program's is lost, files are whole.

In processes of their own. A full disk is a limit of the process on the size of a file: what is
written beyond it is written in part, and then refused, as on a disk.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support import processes
from ..support.sweeps import only_in_sweeps, usual

resource = pytest.importorskip("resource", reason="this system has no such limits")

RUN = (*processes.RUN, "--budget", "300KiB")
NO_SPACE = ("No space left", "File too large")
needs_full_device = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="this system has no /dev/full"
)

#: By hand: to make an optimizer torch imports its compiler, which takes as long as torch itself.
TRAINS = """
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [part for _ in range(4) for part in (torch.nn.Linear(128, 128), torch.nn.GELU())]
    model = torch.nn.Sequential(*parts)
    for _ in range(3):
        loss = model(torch.rand(8, 128)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    print(loss.item().hex(), [p.sum().item().hex() for p in model.parameters()])
"""
SAVES = """
    import sys, torch

    x = torch.arange(4000.0) * 2
    try:
        torch.save({"x": x}, sys.argv[1])
    except Exception as error:
        print(type(error).__name__)
    print(x.sum().item(), (x + 1).sum().item())
"""
#: Less than a report in JSON has, and that file of 16,000 bytes; enough for some steps.
FILE_NBYTES = 3000


def python(
    *arguments: str,
    file_nbytes: int | None = None,
    environ: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Run Python to its end, on a disk where a file may have so many bytes."""

    def limit() -> None:
        if file_nbytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_nbytes, file_nbytes))

    limited = {"preexec_fn": limit, **options}
    return processes.python("-B", *arguments, options=limited, **(environ or {}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> str:
    """What `TRAINS` and then `SAVES` print with plain torch, where files may have so many bytes."""
    folder = tmp_path_factory.mktemp("plain")
    path = folder / "program.py"
    path.write_text(textwrap.dedent(TRAINS + SAVES))
    done = python(str(path), str(folder / "saved"), file_nbytes=FILE_NBYTES)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def plain_trains(plain: str) -> str:
    """What `TRAINS` prints with plain torch."""
    return plain.splitlines(keepends=True)[0]


@pytest.fixture(scope="module")
def full(tmp_path_factory: Any) -> Any:
    """Where both programs ran managed, with a trace and a report, on such a disk; what came out."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "program.py").write_text(textwrap.dedent(TRAINS + SAVES))
    (folder / "report.json").write_text("of yesterday\n")
    options = ("--report", str(folder / "report.json"), "--trace", str(folder / "trace.jsonl"))
    program = (str(folder / "program.py"), str(folder / "saved"))
    return folder, python(*RUN, *options, *program, file_nbytes=FILE_NBYTES)


def events_of(path: Path) -> list[dict[str, Any]]:
    """Read a trace; whatever happened, each line of it is whole."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_full_disk_ends_the_trace_and_nothing_else(full: Any, plain: str) -> None:
    folder, ours = full
    assert (ours.returncode, ours.stdout) == (0, plain)
    assert ours.stderr.count("ends before step") == 1
    assert any(words in ours.stderr for words in NO_SPACE)
    told = [line for line in ours.stderr.splitlines() if line.startswith("torchTensorRef: ")]
    assert len(told) == 1
    steps = [event["step"] for event in events_of(folder / "trace.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert f"before step {len(steps) + 1}:" in ours.stderr


def test_a_report_is_whole_or_as_it_was(full: Any) -> None:
    folder, ours = full
    assert (folder / "report.json").read_text() == "of yesterday\n"
    told, report = ours.stderr.splitlines()[-2:]
    assert told.startswith("torchtensorref: the report is not in ")
    assert any(words in told for words in NO_SPACE)
    assert json.loads(report)["strategy"] == "flow"  # it is not lost
    names = ["program.py", "report.json", "saved", "trace.jsonl"]
    assert sorted(file.name for file in folder.iterdir()) == names


def test_what_a_program_cannot_save_it_still_has(full: Any, plain: str) -> None:
    error, numbers = plain.splitlines()[1:]
    assert error.endswith("Error")
    assert full[1].stdout.splitlines()[1:] == [error, numbers]


@needs_full_device
def test_where_nothing_can_be_written_at_all(script: Any, plain_trains: str) -> None:
    with open("/dev/full", "w") as full:
        told = python(*RUN, script(TRAINS), environ={"TTR_TRACE": "2"}, stderr=full)
    assert (told.returncode, told.stdout) == (0, plain_trains)


@only_in_sweeps
@needs_full_device
def test_a_report_that_cannot_be_written_is_told(script: Any, plain_trains: str) -> None:
    report = python(*RUN, "--report", "/dev/full", script(TRAINS))
    assert (report.returncode, report.stdout) == (0, plain_trains)
    assert "No space left" in report.stderr
    assert "torchTensorRef: flow on sim:0" in report.stderr


#: What `env` finds is told alike with torch, which takes ten times as long.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from torchTensorRef.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@needs_full_device
def test_what_was_found_and_cannot_be_written_is_told() -> None:
    with open("/dev/full", "w") as full:
        found = python("-c", WITHOUT_TORCH, "env", stdout=full)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "could not be written: [Errno 28]" in found.stderr


@pytest.mark.parametrize("option", ["--report", "--trace"])
@pytest.mark.parametrize(
    ("name", "words"), [("no/folder/file", "there is no folder"), ("", "is a folder")]
)
def test_paths_are_tried_at_start(
    script: Any, tmp_path: Path, option: str, name: str, words: str
) -> None:
    path = script("print('the program ran')")
    ours = python(*RUN, option, str(tmp_path / name), path)
    assert (ours.returncode, ours.stdout) == (2, "")
    assert ours.stderr.count("\n") == 1
    assert f"torchtensorref: {option}='" in ours.stderr
    assert words in ours.stderr


def test_a_variable_with_a_bad_path_is_refused_by_the_import(tmp_path: Path) -> None:
    environ = {"TTR_TRACE_FILE": str(tmp_path / "no" / "trace")}
    done = python("-c", "import torchTensorRef", environ=environ)
    assert done.returncode == 1
    assert "ConfigError: TTR_TRACE_FILE=" in done.stderr.splitlines()[-1]
    disabled = python("-c", "import torchTensorRef", environ={**environ, "TTR_DISABLE": "1"})
    assert (disabled.returncode, disabled.stderr) == (0, "")


@only_in_sweeps
def test_the_folder_of_a_report_is_that_of_the_start(script: Any, tmp_path: Path) -> None:
    path = script("import os, torch\nos.chdir('/')\ntorch.zeros(1)")
    ours = python(*RUN, "--report", "report.json", "--trace", "t", path, cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads((tmp_path / "report.json").read_text())["device"] == "sim:0"
    assert (tmp_path / "t").exists()


@only_in_sweeps
def test_a_report_is_printed_once(script: Any) -> None:
    path = script("import torch\ntorch.zeros(1)")
    ours = python(*RUN, path, environ={"TTR_TRACE": "1"})
    assert ours.stderr.count("torchTensorRef: flow on sim:0") == 1


GOES_ON = """
    import sys, torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    model.load_state_dict(torch.load(sys.argv[1], mmap=True), assign=True)
    print("ready", flush=True)
    while True:
        model(torch.rand(8, 128)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
"""


@only_in_sweeps
def test_killed_at_random(script: Any, tmp_path: Path) -> None:
    path, weights = script(GOES_ON), tmp_path / "weights.pt"
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    torch.save(model.state_dict(), weights)
    saved = weights.read_bytes()
    draw = random.Random(0)
    for number in usual([0], range(1, 5)):
        trace, report = tmp_path / f"trace{number}.jsonl", tmp_path / "report.json"
        given = ("--report", str(report), "--trace", str(trace), path, str(weights))
        with subprocess.Popen([sys.executable, *RUN, *given], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(draw.uniform(0.05, 0.6))
            process.kill()
            assert process.wait(timeout=60) == -signal.SIGKILL
        events = events_of(trace)
        assert any(event["event"].startswith("fetch sim") for event in events)
        assert weights.read_bytes() == saved
        assert not report.exists()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("closed", usual([2], [1]))
def test_a_program_whose_streams_are_closed(
    script: Any, tmp_path: Path, plain_trains: str, closed: int
) -> None:
    path, trace = script(TRAINS), tmp_path / "trace.jsonl"
    command = f'"$@" {closed}>&-'
    given = ["sh", "-c", command, "sh", sys.executable, *RUN, "--trace", str(trace), path]
    done = subprocess.run(given, capture_output=True, text=True, timeout=240, check=False)
    # The report is for stderr: where that is closed it goes nowhere, above all not to stdout.
    assert (done.returncode, done.stdout) == (0, "" if closed == 1 else plain_trains)
    assert events_of(trace)


@pytest.mark.parametrize("command", usual(["env"], ["check"]))
def test_nobody_reads_what_was_found(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        program = ("-c", WITHOUT_TORCH) if command == "env" else ("-m", "torchTensorRef")
        done = python(*program, command, stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")


SPAWNS = """
    import multiprocessing
    import torch

    def work(size):
        x = torch.ones(size, size)
        return (x @ x).sum().item()

    if __name__ == "__main__":
        print(work(50))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [20]))
        print(work(60))
"""


def test_each_process_has_its_trace(script: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # The name of the program is imported by the child: it is managed like its parent.
    path = script("import torchTensorRef" + SPAWNS.replace("\n    ", "\n"))
    environ = {"TTR_TRACE_FILE": str(trace), "TTR_TRACE": "3", "TTR_DEVICE": "sim"}
    done = python(path, environ=environ)
    assert done.stdout == "125000.0\n[8000.0]\n216000.0\n"
    files = sorted(tmp_path.glob("trace.jsonl*"))
    assert len(files) == 2
    of_parent, of_child = map(events_of, files)
    assert [event["event"] for event in of_parent].count("aten.mm.default") == 2
    assert [event["event"] for event in of_child].count("aten.mm.default") == 1
    steps = [event["step"] for event in of_parent]
    assert steps == list(range(1, len(steps) + 1))


def test_a_trace_of_a_part_of_a_program(tmp_path: Path) -> None:
    program = """
        import torch, torchTensorRef

        torchTensorRef.tensorsManager.device = "sim"
        x = torch.ones(50, 50)
        x @ x
        with torchTensorRef.options(trace=3, trace_file="part.jsonl"):
            x + x
        x @ x
        with torchTensorRef.options(trace=2):
            torch.ones(60, 60).neg()
        print(torchTensorRef.base.options.settings.trace)
    """
    done = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    found = [event["event"] for event in events_of(tmp_path / "part.jsonl")]
    assert "aten.add.Tensor" in found
    assert "aten.mm.default" not in found
    assert done.stderr.count("torchTensorRef: flow on sim:0") == 2  # the totals of each scope
    assert "fetch sim:0" in done.stderr
