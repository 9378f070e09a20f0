"""`torchtensorref run`, `env` and `check`, as a person meets them: in processes of their own."""

import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import torchTensorRef
from torchTensorRef.__main__ import main

from ..support.processes import RUN, printed_by_plain_torch, python
from ..support.sweeps import usual

WHO_AM_I = """
    import pickle, sys
    import __main__

    class Mine:
        pass

    print(__name__, __main__.__file__ == __file__, sys.modules["__main__"].Mine is Mine)
    print(sys.argv, __spec__, __package__, __builtins__.__name__, sys.path[0])
    print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, "torch" in sys.modules)
"""


def test_a_script_finds_the_process_as_python_leaves_it(script, tmp_path):
    path = script(WHO_AM_I)
    given = (path, "--budget", "3", "-m", "x")
    plain, ours = python(*given, cwd=tmp_path), python(*RUN, *given, cwd=tmp_path)
    assert plain.stdout.splitlines()[0] == "__main__ True True"
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)
    assert ours.stderr == "torchTensorRef: the program made no tensor.\n"


def test_a_module_does_too(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    body = (
        "import sys\nfrom . import __name__ as name\nprint(name, __name__, __spec__.name, sys.argv)"
    )
    (package / "__main__.py").write_text(body)
    (package / "other.py").write_text(body)
    for name in ("package", "package.other"):
        given = ("-m", name, "-v", "--device", "x")
        plain, ours = python(*given, cwd=tmp_path), python(*RUN, *given, cwd=tmp_path)
        assert plain.stdout.startswith("package __main__ package.")
        assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_to_a_script_finds_what_lies_beside_the_script(script, tmp_path):
    for folder in ("real", "bin"):
        (tmp_path / folder).mkdir()
    script(WHO_AM_I + "\n    import beside", "real/program.py")
    script("print('beside')", "real/beside.py")
    link = tmp_path / "bin" / "program"
    link.symlink_to(tmp_path / "real" / "program.py")
    plain, ours = python(str(link), cwd=tmp_path), python(*RUN, str(link), cwd=tmp_path)
    assert plain.stdout.endswith("beside\n")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_what_python_has_compiled_runs(script, tmp_path):
    compiled = py_compile.compile(script(WHO_AM_I), str(tmp_path / "program.pyc"))
    renamed = shutil.copy(compiled, tmp_path / "program")
    for given in ((compiled, "a", "-b"), (str(renamed),)):
        plain, ours = python(*given, cwd=tmp_path), python(*RUN, *given, cwd=tmp_path)
        assert plain.stdout.startswith("__main__ True True")
        assert (ours.stdout, ours.returncode) == (plain.stdout, 0)
    (tmp_path / "program.pyc").write_bytes(b"nothing")
    ours = python(*RUN, compiled)
    assert (ours.returncode, ours.stderr.count("\n")) == (2, 1)
    assert "has no code of this Python" in ours.stderr


def test_a_program_comes_from_stdin(tmp_path):
    text = "import sys\nprint(__name__, sys.argv, repr(sys.path[0]), __file__, __loader__)"
    plain, ours = (
        subprocess.run(
            [sys.executable, *before, "-", "a", "--budget", "3"],
            input=text,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        for before in ((), RUN)
    )
    assert plain.stdout.startswith("__main__ ['-', 'a', '--budget', '3'] '' <stdin> ")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_a_folder_with_a_main_runs(script, tmp_path):
    script("import sys; print(__name__, len(sys.argv))", "__main__.py")
    assert python(*RUN, str(tmp_path), "a").stdout == "__main__ 2\n"


MAKES_TENSORS = """
    import argparse
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=2)
    size = parser.parse_args().size
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    print(model(torch.rand(3, size)).sum().item())
"""


def test_numbers_are_plain_torchs_and_the_report_is_on_stderr(script):
    path = script(MAKES_TENSORS)
    plain = printed_by_plain_torch(path, "--size", "300")
    ours = python(*RUN, "--budget", "200KiB", "--strategy", "lru", path, "--size", "300")
    assert (ours.stdout, ours.returncode) == (plain, 0)
    assert "torchTensorRef: lru on sim:0" in ours.stderr
    assert "200.00 KiB" in ours.stderr


def test_the_report_goes_where_it_is_wanted(script, tmp_path):
    path = script(MAKES_TENSORS)
    wanted = tmp_path / "report.json"
    trace = tmp_path / "trace.jsonl"
    ours = python(*RUN, f"--report={wanted}", "--trace", str(trace), path)
    assert ours.stderr == ""
    assert json.loads(wanted.read_text())["device"] == "sim:0"
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {"step", "block", "event", "cause"} == set(events[0])


def test_arguments_that_the_program_refuses(script):
    path = script(
        """
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, default=2)
        size = parser.parse_args().size
        """
    )
    plain, ours = python(path, "--sise", "3"), python(*RUN, "--report", "none", path, "--sise", "3")
    assert (ours.returncode, ours.stderr) == (2, plain.stderr)


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit(3)", 3), ("sys.exit('why')", 1), ("sys.exit()", 0)]
)
def test_the_exit_status_is_the_programs(script, ending, status):
    path = script(f"import sys, atexit\natexit.register(print, 'goodbye')\n{ending}")
    plain, ours = python(path), python(*RUN, "--report", "none", path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (status, plain.stdout, plain.stderr)


RAISES = """
    def deeper():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("told") from error

    deeper()
"""


def test_a_traceback_is_the_programs_alone(script):
    path = script(RAISES)
    plain, ours = python(path), python(*RUN, "--report", "none", path)
    assert (ours.returncode, ours.stderr) == (1, plain.stderr)
    assert "ValueError: told" in ours.stderr


def test_a_hook_that_the_program_sets_gets_its_exception(script):
    path = script(
        """
        import sys, traceback
        sys.excepthook = lambda kind, error, trace: print(
            "hooked", kind.__name__, len(traceback.extract_tb(trace)))
        raise ValueError
        """
    )
    plain, ours = python(path), python(*RUN, "--report", "none", path)
    assert plain.stdout == "hooked ValueError 1\n"
    assert (ours.returncode, ours.stdout) == (1, plain.stdout)


def test_a_syntax_error_is_shown_as_python_shows_it(script):
    path = script("x = (\n")
    plain, ours = python(path), python(*RUN, "--report", "none", path)
    assert (ours.returncode, ours.stderr) == (1, plain.stderr)


@pytest.mark.skipif(os.name == "nt", reason="this system has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_as_they_end_the_program(script, tmp_path, number):
    path = script("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    statuses = []
    for before in ((), RUN):
        with subprocess.Popen(
            [sys.executable, *before, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            # A test run in the background of a shell has it ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.1)  # into the sleep, so that both are interrupted at the same line
            process.send_signal(number)
            process.communicate(timeout=60)
            statuses.append(process.returncode)
    assert statuses == [-number, -number]
    assert not list(tmp_path.glob("torchtensorref-run-*"))


WORKERS = """
    import multiprocessing
    import sys
    import torch

    def work(start):
        tensor = torch.arange(start, start + 3.0)
        return tensor.sum().item(), tensor

    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(pool.map(torch.sum, [torch.ones(3), torch.ones(2)]))
            print([(total, tensor.tolist()) for total, tensor in pool.map(work, range(4))])
"""


def test_worker_processes_work_and_nothing_is_told_that_was_not_asked(script):
    path = script(WORKERS)
    # As plain torch prints it: to run that would take as long as to run us.
    expected = f"{[torch.tensor(3.0), torch.tensor(2.0)]}\n"
    expected += f"{[(3.0 + 3 * n, [n + 0.0, n + 1.0, n + 2.0]) for n in range(4)]}\n"
    for method in usual(["spawn"], ["fork", "forkserver"]):
        ours = python(*RUN, "--report", "none", path, method)
        # Who chose a device, and no report, is told nothing.
        assert (ours.returncode, ours.stdout, ours.stderr) == (0, expected, "")


SUITE = """
    import library, torch

    def test_types():
        assert isinstance(torch.rand(2), torch.Tensor)
        assert hasattr(torch.rand(2), "proxyInfo")

    def test_numbers():
        torch.testing.assert_close(torch.ones(2) + 1, torch.full((2,), 2.0))

    def test_excluded_modules_stay_plain():
        assert not hasattr(library.make(), "proxyInfo")
"""


def test_a_suite_of_tests_runs_under_us(script, tmp_path):
    script(SUITE, "test_of_a_user.py")
    script("import torch\ndef make(): return torch.zeros(1)", "library.py")
    chosen = ("--exclude", "library", "--inject-to", "other")
    ours = python(*RUN, *chosen, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "3 passed" in ours.stdout
    assert ours.returncode == 0
    assert "on sim:0" in ours.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--strategy", "lur"), "'lru'"),
        (("--budget", "6GBi"), "GiB"),
        (("--device", "smi"), "sim"),
        (("--device", "sim:rtx306"), "sim:rtx3060"),
        (("--exclude", "a b"), "not the name of a module"),
        (("--no-such-option", "x"), "no-such-option"),
        (
            ("--timeline", "/nowhere/run.json"),
            "--timeline='/nowhere/run.json' is not understood",
        ),
        (("--report", "none"), "No program is named"),
        (("no_such_script.py",), "can't open file"),
        (("-m", "no_such_module"), "no_such_module"),
        (("-m",), "needs the name"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(given, words, tmp_path):
    ours = python("-m", "torchTensorRef", "run", *given, cwd=tmp_path)
    assert ours.returncode == 2
    assert words in ours.stderr
    assert "Traceback" not in ours.stderr


@pytest.mark.parametrize(
    ("given", "how"),
    usual([("xpu:99", "variable")], [("cuda:99", "option"), ("sim,mps:99", "option")]),
)
def test_a_device_that_is_not_there_is_said_in_a_line(script, given, how):
    path = script("import torch\nprint('before')\ntorch.zeros(1)\nprint('after')\n")
    option, told = (("--device", given), {}) if how == "option" else ((), {"TTR_DEVICE": given})
    ours = python("-m", "torchTensorRef", "run", *option, path, **told)
    assert (ours.returncode, ours.stdout) == (2, "before\n")
    assert ours.stderr.count("\n") == 1
    assert re.match(r"torchtensorref: .*'(cuda|xpu|mps)", ours.stderr)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("forcast x.py", "Did you mean 'forecast'?"),
        ("run --devise sim x.py", "run: error: unrecognized arguments: --devise sim. Did you mean"),
        (
            "check --devices sim",
            "check: error: unrecognized arguments: --devices sim. Did",
        ),
        ("trace smmary x", "Did you mean 'summary'?"),
        ("trace plot x --ouput=y", "Did you mean '--output'?"),
        ("env extra", "env: error: unrecognized arguments: extra\n"),
    ],
)
def test_misspelt_commands_and_options_are_named(given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_disabled_by_the_environment_it_is_plain_python(script):
    path = script("import torch\nprint(type(torch.zeros(1)))")
    ours = python(*RUN, path, TTR_DISABLE="1")
    assert (ours.stdout, ours.stderr) == ("<class 'torch.Tensor'>\n", "")


def test_who_chose_no_device_and_an_odd_budget_is_told_once_of_each(script):
    path = script("import torch\ntorch.zeros(1)\ntorch.ones(1)\n")
    run = ("-m", "torchTensorRef", "run", "--report", "none", path)
    said = python(*run, TTR_BUDGET="sim:1=5GiB").stderr
    assert said.count("a simulated one is used") in (0, 1)  # 0 where there is an accelerator
    told = f"{path}:2: RuntimeWarning: The budget of sim:1 has no effect: in use is "
    assert said.count(told) == 1


NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
sys.argv = ["torchtensorref", *{arguments!r}]
from torchTensorRef.__main__ import main
sys.exit(main())
"""


def test_env_is_one_block_to_paste(tmp_path):
    done = python("-m", "torchTensorRef", "env", cwd=tmp_path, TTR_CHECK="1")
    assert (done.returncode, done.stderr) == (0, "")
    labels = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert labels == [
        *("torchTensorRef", "beside", "torch", "core", "hook", "patches", "taken", "injectTo"),
        *("strategy", "devices", "set", "known"),
    ]
    assert "could not be found out" not in done.stdout
    assert "TTR_CHECK=1" in done.stdout


def test_check_uses_the_devices(tmp_path):
    done = python("-m", "torchTensorRef", "check", cwd=tmp_path)
    verdicts = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert (verdicts["cpu"], verdicts["sim:0"], done.returncode) == ("PASS", "PASS", 0)
    assert "FAIL" not in done.stdout


def test_check_of_a_device_that_fails(capsys):
    with torchTensorRef.options(faults="copy:2"):
        assert main(["check", "--device", "sim"]) == 1
    out, err = capsys.readouterr()
    assert (out.count("FAIL"), err) == (1, "")


def test_check_of_a_device_that_nobody_knows(capsys):
    assert main(["check", "--device", "sim", "--device", "smi"]) == 1
    out, err = capsys.readouterr()
    assert ("FAIL" in out, err) == (True, "")


@pytest.mark.parametrize(("command", "status"), [("env", 0), ("check", 1)])
def test_both_work_without_torch(command, status, tmp_path):
    done = python("-c", NO_TORCH.format(arguments=[command]), cwd=tmp_path)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert "torch" in done.stdout


def test_a_program_without_torch_runs(script):
    path = script("print('no tensors here')")
    done = python("-c", NO_TORCH.format(arguments=["run", path]))
    assert (done.returncode, done.stdout) == (0, "no tensors here\n")


def test_an_unknown_switch_is_named_with_the_nearest():
    done = python("-c", NO_TORCH.format(arguments=["env"]), TTR_BUGDET="3GiB")
    assert done.returncode == 0
    assert "TTR_BUGDET=3GiB" in done.stdout
    assert "'TTR_BUDGET'" in done.stderr
