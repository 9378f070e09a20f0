"""Children of `torchtensorref run`: managed too, within one budget, and in its report."""

import json
import os
import textwrap
from pathlib import Path

import pytest

from ..support import processes
from ..support.processes import AS_FOR_A_USER, RUN
from ..support.sweeps import only_in_sweeps, usual

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COLLECTIVES = Path(__file__).parents[1] / "support" / "collectives.py"


def python(*arguments, **environ):
    done = processes.python(*arguments, **environ)
    assert "Traceback" not in done.stderr, done.stderr
    return done


CHILD = """
    import sys, time
    import torch

    kind = "ref" if hasattr(torch.zeros(1) + 1, "proxyInfo") else "plain"
    print("ready", kind, flush=True)
    sys.stdin.readline()
    if "torchTensorRef" in sys.modules:
        time.sleep(0.6)  # longer than a process takes to see that others have come or gone
        print(sys.modules["torchTensorRef"].tensorsManager.budget)
"""

PARENT = """
    import subprocess, sys, time
    import torch

    torch.zeros(1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    def born():
        child = subprocess.Popen([sys.executable, sys.argv[1]], **pipes)
        print(child.stdout.readline().strip())
        return child

    children = [born() for _ in range(int(sys.argv[2]))]
    print(*(child.communicate("go")[0].strip() for child in children))
    time.sleep(0.6)
    module = sys.modules.get("torchTensorRef")
    print(module and module.tensorsManager.budget)
"""


def test_subprocesses_are_managed_within_the_budget_of_the_run(script, tmp_path):
    program, child = script(PARENT), script(CHILD, "child.py")
    wanted = tmp_path / "report.json"
    ours = python(*RUN, "--budget", "6000B", "--report", wanted, program, child, 2)
    # Three share it; when the first has ended, two; at the end the parent has all of it.
    assert ours.stdout.split() == [*("ready", "ref") * 2, "2000", "3000", "6000"]
    report = json.loads(wanted.read_text())
    assert report["budget_nbytes"] == 6000
    assert [row["stats"]["device"] for row in report["children"]] == ["sim:0", "sim:0"]
    assert all(child in row["command"] for row in report["children"])
    assert all(row["stats"]["op_count"] > 0 for row in report["children"])


@only_in_sweeps
def test_a_budget_for_each_process(script):
    program, child = script(PARENT), script(CHILD, "child.py")
    ours = python(*RUN, "--budget-per-process", "6000B", program, child, 1)
    assert ours.stdout.split()[2:] == ["6000", "6000"]
    assert ours.stderr.count("torchTensorRef: child ") == 1
    assert ours.stderr.count("peak 0 B of 5.86 KiB") + ours.stderr.count(" of 5.86 KiB, f") >= 2


@pytest.mark.parametrize("given", usual([("--no-children",)], [()]))
def test_one_switch_leaves_children_plain(script, given):
    program = script(
        """
        import subprocess, sys
        subprocess.run([sys.executable, sys.argv[1]], input="go", text=True)
        """
    )
    environ = {} if given else {"TTR_DISABLE": "1"}
    ours = python(*RUN, *given, program, script(CHILD, "child.py"), **environ)
    assert ours.stdout == "ready plain\n"
    assert "child" not in ours.stderr


def test_options_that_exclude_each_other():
    done = python(*RUN, "--budget", "1MiB", "--budget-per-process", "1MiB", "x.py")
    assert (done.returncode, "not both" in done.stderr) == (2, True)


def test_a_child_finds_what_python_alone_would_have_given_it(script, tmp_path):
    """Its own `sitecustomize`, a clean path, and nothing of ours before it imports torch.

    A child of a child does, too, and is managed as well.
    """
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.OWN = __file__\n")
    finds = """
        import sys
        print(OWN, sys.modules["sitecustomize"].__file__, [p for p in sys.path if "Ref" in p])
        print([p for p in sys.path if p.endswith("in_children")], sys.argv)
        print([name for name in sys.modules if name.startswith("torchTensorRef")], flush=True)
        """
    starts = """
        import subprocess, sys
        subprocess.run([sys.executable, *sys.argv[1:]], check=True)
        """
    uses_torch = """
        if sys.argv[1:]:
            import torch
            print("ref" if hasattr(torch.zeros(1), "proxyInfo") else "plain")
        """
    child, grandchild = script(finds + starts, "child.py"), script(finds + uses_torch, "last.py")
    program = script(starts)
    environ = {"PYTHONPATH": str(own)}
    plain = python(program, child, grandchild, **environ)
    ours = python(*RUN, "--report", "none", program, child, grandchild, "a", **environ)
    expected = plain.stdout.replace("last.py']", "last.py', 'a']")
    assert len(expected.splitlines()) == 6
    assert ours.stdout == f"{expected}ref\n"
    # Isolated from its environment, it is isolated from us, too.
    assert (
        python(*RUN, program, "-I", "-c", "import sys; print(sys.flags.isolated)").stdout == "1\n"
    )


KILLED = """
    import os, subprocess, sys

    child = "import torch, os, signal; torch.zeros(1); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", child])
    other = "import torch; torch.zeros(1)"
    subprocess.run([sys.executable, "-c", other])
"""


@pytest.mark.skipif(os.name == "nt", reason="this system has no such signals")
def test_a_child_that_was_killed_is_told_of_and_takes_no_share(script, tmp_path):
    trace = tmp_path / "trace"
    ours = python(*RUN, "--budget", "600KiB", "--trace", trace, script(KILLED))
    lines = ours.stderr.splitlines()
    assert lines[0] == "torchTensorRef: the program made no tensor itself."
    assert lines[2] == "  was killed before it could report"
    assert lines[4].startswith("  flow on sim:0, peak")
    assert " of 600.00 KiB" in lines[4]
    numbers = [line.split()[2].strip(":") for line in lines[1:] if " child " in line]
    assert {path.name for path in tmp_path.glob("trace.*")} == {f"trace.{n}" for n in numbers}


@only_in_sweeps
def test_a_child_that_sets_a_budget_keeps_it(script):
    child = script(
        """
        import time, torch, torchTensorRef
        torchTensorRef.tensorsManager.budget = 1234
        torch.zeros(1)
        time.sleep(0.6)
        print(torchTensorRef.tensorsManager.budget)
        """,
        "child.py",
    )
    program = script(
        """
        import subprocess, sys, torch
        torch.zeros(1)
        subprocess.run([sys.executable, sys.argv[1]])
        """
    )
    assert python(*RUN, "--budget", "6000B", program, child).stdout == "1234\n"


SPAWNS = """
    import os, sys
    import torch
    import torch.distributed
    import torch.multiprocessing

    def kind(x):
        return "ref" if hasattr(x, "proxyInfo") else "plain"

    def work(rank, model, folder):
        text = f"worker {kind(torch.zeros(2) + rank)}\\n"
        os.write(1, text.encode())
        options = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 1}
        torch.distributed.init_process_group("gloo", **options)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(torch.ones(3, 4)).sum().backward()
        os.write(1, f"{model.weight.grad.tolist()}\\n".encode())

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.zeros(2) + i, kind(torch.zeros(1))

    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, args=(torch.nn.Linear(4, 2), sys.argv[1]), nprocs=1)
        options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": "spawn"}
        for batch, kinds in torch.utils.data.DataLoader(Rows(), **options):
            print("loader", *set(kinds), batch.sum().item())
"""


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spawned")
    (folder / "program.py").write_text(textwrap.dedent(SPAWNS))
    # Tensors that are shared say goodbye to the module of theirs, so it may not go before them.
    return python(*RUN, folder / "program.py", folder, **AS_FOR_A_USER)


def test_spawned_processes_are_managed_and_a_loaders_workers_are_not(spawned):
    lines = spawned.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("worker ref", "loader plain 12.0")
    assert spawned.stderr.count("torchTensorRef: child ") == 1


def test_a_model_sent_to_another_process_is_trained_in_parallel(spawned):
    """Its parameters are plain there, and their gradients are not (Lightning's `ddp_spawn`)."""
    # gloo, in torch 2.9, has a word before them
    assert spawned.stdout.splitlines()[-2] == str([[3.0] * 4] * 2)


PRELOADED = """
    import torch

    def kind(x):
        return "ref" if hasattr(x, "proxyInfo") else "plain"

    made = torch.ones(2)

    def work(start):
        return kind(made), kind(torch.ones(1)), (made + start).sum().item()
"""
SERVED = """
    import multiprocessing
    import preloaded

    if __name__ == "__main__":
        import torchTensorRef
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["preloaded"])
        with context.Pool(1) as pool:
            print(*pool.map(preloaded.work, [1])[0], preloaded.kind(preloaded.made + 1))
            print(torchTensorRef.tensorsManager.budget)
"""


def test_a_server_that_forks_is_plain_and_takes_no_part_of_the_budget(script, tmp_path):
    """Python 3.14 has one by default, which imports the program itself as this one its module."""
    script(PRELOADED, "preloaded.py")
    ours = python(*RUN, "--budget", "6000B", script(SERVED), PYTHONPATH=str(tmp_path))
    assert ours.stdout.splitlines() == ["plain plain 4.0 ref", "6000"]
    assert "torchTensorRef: child " not in ours.stderr


@only_in_sweeps  # `accelerate launch` is such a launcher
def test_processes_that_a_launcher_starts_give_plain_torchs_numbers(tmp_path):
    for name, before in (("plain", ()), ("ours", (*RUN, "--budget", "8KiB"))):
        (tmp_path / name).mkdir()
        command = (*before, *LAUNCH, COLLECTIVES, tmp_path / name)
        done = processes.python(*command)
        if not before and "terminate called without an active exception" in done.stderr:
            done = processes.python(*command)  # plain torch ends so now and then, in gloo's threads
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr
    assert done.stderr.count("torchTensorRef: child ") == 2
    for rank in ("0.json", "1.json"):
        plain, ours = (json.loads((tmp_path / n / rank).read_text()) for n in ("plain", "ours"))
        assert (plain["kind"], ours["kind"]) == ("plain", "ref")
        assert ours["out"] == plain["out"]


def test_accelerate_launches_managed_programs(script):
    pytest.importorskip("accelerate")
    path = script('import torch\nprint(hasattr(torch.zeros(1), "proxyInfo"))')
    ours = python(*RUN, "-m", "accelerate.commands.launch", "--cpu", path)
    assert ours.stdout == "True\n"
    assert "child" in ours.stderr
