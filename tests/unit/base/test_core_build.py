"""The library in C++: what it is kept for, and what is said where it cannot be built."""

import os
import subprocess
import sys

import pytest

from torchTensorRef.base import core_build
from torchTensorRef.base.core_build import begin, build, of_this_process


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_kept_in_the_users_cache(cache):
    assert of_this_process().folder.parent == cache / "torchtensorref"


def test_each_torch_and_compiler_has_its_own(monkeypatch, tmp_path):
    folders = {of_this_process().folder}
    monkeypatch.setattr(core_build, "FLAGS", ["-fsanitize=thread"])
    folders.add(of_this_process().folder)
    monkeypatch.setattr(core_build, "_torch_version", lambda: "2.99.0")
    folders.add(of_this_process().folder)
    compiler = tmp_path / "another-compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folders.add(of_this_process().folder)
    assert len(folders) == 4


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    wanted = of_this_process()
    assert "install g++ or clang" in wanted.state == wanted.obstacle
    assert build(wanted) == wanted.obstacle
    assert not begin(wanted)
    assert not wanted.folder.exists()


@pytest.mark.parametrize(
    ("torch", "is_refused"), [("2.8.0", True), ("2.9.1", False), ("2.13.0+cpu", False), ("", True)]
)
def test_a_torch_too_old_is_named(monkeypatch, torch, is_refused):
    monkeypatch.setattr(core_build, "_torch_version", lambda: torch)
    assert ("needs torch 2.9" in of_this_process().obstacle) is is_refused


def test_a_build_that_fails_says_where_it_has_written_why(monkeypatch):
    monkeypatch.setattr(core_build, "_BUILD", "import sys; sys.exit('the compiler has said no')")
    wanted = of_this_process()
    if wanted.obstacle:
        pytest.skip(wanted.obstacle)  # nothing can be built here, whatever the test does
    assert str(wanted.complaint) in build(wanted)
    assert "the compiler has said no" in wanted.complaint.read_text()
    assert not wanted.library.exists()
    assert not begin(wanted), "what has failed is tried again only when somebody asks"


def test_of_two_that_build_one_does(monkeypatch):
    """The second waits for the first, and finds what that has built."""
    made = "import pathlib, sys; pathlib.Path(sys.argv[3], sys.argv[1] + '.so').write_text('made')"
    monkeypatch.setattr(core_build, "_BUILD", made)
    wanted = of_this_process()
    if wanted.obstacle:
        pytest.skip(wanted.obstacle)  # nothing can be built here, whatever the test does
    assert build(wanted) == ""
    monkeypatch.setattr(core_build, "_BUILD", "raise SystemExit('built again')")
    assert build(wanted) == ""
    assert (wanted.library.read_text(), wanted.state) == ("made", "built")
    assert sorted(path.name for path in wanted.folder.iterdir()) == ["lock", wanted.library.name]


def test_everything_runs_without_a_compiler_and_says_so_once(tmp_path):
    program = (
        "import torchTensorRef, torch\n"
        "x = torch.rand(4)\n"
        "assert torch.equal((x + x).target, x.target * 2)\n"
        "from torchTensorRef.diagnostics.environment import report\n"
        "print(report())\n"
    )
    environ = {**os.environ, "PATH": "", "TTR_CORE": "c++", "XDG_CACHE_HOME": str(tmp_path)}
    environ.pop("CXX", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("path in Python") == 1
    assert "operators: Python (no C++ compiler was found: install g++" in done.stdout


def test_who_has_not_imported_torch_asks_for_the_same_library(tmp_path):
    """The metadata of builds with CUDA name another version than `torch.__version__`."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("__all__ = []\n__version__ = '2.13.0+cu999'\n")
    (folder / "__init__.py").write_text("from .version import __version__\n")
    program = """
from torchTensorRef.base import core_build
before = core_build.of_this_process()
import torch
assert torch.__version__ == "2.13.0+cu999"
assert core_build._torch_version() == torch.__version__
assert core_build.of_this_process() == before
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "TTR_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
