"""A selection of tests is run elsewhere, and the page says what came of it."""

import os
import sys
from pathlib import Path

import pytest
import torch

from torchTensorRef.base import torch_versions

from . import page, runs
from .cells import CELLS, ROOT, SELECTION

CORES = os.cpu_count() or 1
TESTS = """
import time, pytest

def test_that_passes():
    assert True

def test_that_fails():
    assert 1 == 2, "on purpose"

@pytest.fixture
def ending():
    yield
    raise ValueError("at the end")

def test_that_fails_at_its_end(ending):
    pass

@pytest.mark.skip(reason="on purpose")
def test_that_is_skipped():
    assert False
"""


def test_what_is_selected_is_there():
    assert [name for name in SELECTION if not (ROOT / name).exists()] == []


def test_a_selection_is_run_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    tests = tmp_path / "test_it.py"
    tests.write_text(TESTS)
    done = runs.run(Path(sys.executable), (str(tests),))
    assert done.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert done.torch == torch.__version__
    assert not done.broken_off
    (first, why), (second, why_second) = done.failures.items()
    assert first.endswith("test_that_fails")
    assert "on purpose" in why
    assert second.endswith("test_that_fails_at_its_end")
    assert "at the end" in why_second


def test_a_file_that_cannot_be_read_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    (tmp_path / "test_it.py").write_text("import no_such_library\n")
    done = runs.run(Path(sys.executable), (str(tmp_path / "test_it.py"),))
    assert done.counts["failed"] == 1


@pytest.mark.parametrize(("load", "given_s"), [(0, 10), (CORES, 5)])
def test_what_takes_too_long_is_broken_off(tmp_path, monkeypatch, load, given_s):
    """And what was run is counted; where others want the cores, it may take longer."""
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    monkeypatch.setattr(runs, "GRACE_S", 1)  # pytest hears no SIGINT where its parents ignore it
    monkeypatch.setattr(runs.os, "getloadavg", lambda: (load, load, load))
    tests = tmp_path / "test_it.py"
    waits = "def test_that_waits():\n    time.sleep(60)\n"
    tests.write_text(f"import time\n\ndef test_first():\n    pass\n\n{waits}")
    done = runs.run(Path(sys.executable), (str(tests),), limit_s=given_s)
    assert done.broken_off == "broken off after 10 s"
    assert done.counts["passed"] == 1
    assert 10 <= done.took_s < 55


def test_the_page_says_what_was_run_where():
    """And it is the page that there is: neither the table nor a result was changed without it."""
    text = page.PAGE.read_text()
    assert page.replaced(text, page.section(page.known())) == text
    assert all(row.reason in text for row in torch_versions.ROWS.values())


def test_a_failure_and_a_cell_that_was_not_run_are_told():
    name, *others = CELLS
    run = runs.Run("2.9.1", "3.11.7", "a day", 1.0, {"passed": 2, "failed": 1, "skipped": 0})
    run.failures["a::b"] = "because"
    text = page.section({name: runs.as_json(run)})
    assert "| 2 | 1 | 0 | a day |" in text
    assert "* `a::b`: because" in text
    assert text.count("not run | |") == len(others)
    old = f"before\n{page.section({})}after\n"
    assert page.replaced(old, text) == f"before\n{text}after\n"
