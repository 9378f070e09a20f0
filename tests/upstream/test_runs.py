"""A suite is run on plain torch and with us, and what became of each test is compared."""

from __future__ import annotations

from pathlib import Path

from . import page, runs
from .suites import SUITES, Suite

#: With what processes that tests start begin with; it says why.
SITE = Path(__file__).parents[1] / "support" / "in_processes"
TESTS = """
import torch, pytest, warnings

class TestTensors:
    def test_numbers(self):
        assert (torch.ones(8) + 1).sum() == 16

    @pytest.mark.parametrize("n", [1, 2])
    def test_own_failure(self, n):
        assert n == 1, "the library's own"

def test_that_tells_us_apart():
    assert not hasattr(torch.ones(2), "proxyInfo")

def test_warnings_are_no_errors_of_the_librarys():
    warnings.warn("as this project's own tests have it")
"""


def test_a_suite_is_compared_test_by_test(tmp_path, monkeypatch):
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nfilterwarnings = error\n")
    cache = tmp_path / "cache"
    (cache / "thing" / "tests").mkdir(parents=True)
    (cache / "thing" / "tests" / "test_it.py").write_text(TESTS)
    monkeypatch.setattr(runs, "CACHE", cache)
    monkeypatch.setattr(runs, "unpacked", lambda requirement: cache / "thing")
    monkeypatch.setattr(runs, "install", lambda requirements: SITE)
    monkeypatch.setattr(runs, "BUDGETS", {"tight": "4KiB"})
    compared = runs.compare(Suite("thing==1.0", ("tests",)))
    assert compared.plain.counts == {"passed": 4, "failure": 1}
    assert compared.plain.by_test["tests/test_it::TestTensors::test_own_failure[2]"] == "failure"
    (test,) = compared.differences("tight")
    assert test == "tests/test_it::test_that_tells_us_apart"
    assert compared.differences("tight")[test].startswith("passed became failure")


def test_the_page_says_what_was_run(tmp_path):
    name = next(name for name, suite in SUITES.items() if suite.because)
    row = {
        "version": "1",
        "torch": "2.13",
        "counts": {"passed": 3, "failure": 1},
        "differences": {"tight": {"a::b": "passed became failure: x"}, "roomy": {}},
    }
    page.write({name: row}, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"| {name} 1 | 4 | 3 | 1 | 0 |" in text
    assert f"{SUITES[name].because}\n\n* `a::b`: passed became failure: x" in text
    assert "not run yet" in text
