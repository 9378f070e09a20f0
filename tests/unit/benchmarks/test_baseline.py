"""Baselines of benchmarks: what is compared with what, and when a run fails."""

from __future__ import annotations

import argparse
import doctest
import json

import pytest

from benchmarks import baseline
from benchmarks.baseline import EXACT, Baseline, Figure, Keeper, Tolerance, compare

TENTH = Tolerance(share=0.1)


def row(value, before, tolerance=TENTH, bound=None):
    kept = None if before is None else Baseline({}, {}, {"add": Figure(before, "x")})
    return compare({"add": Figure(value, "x", bound)}, kept, tolerance)[0]


@pytest.fixture
def keeper(tmp_path):
    return Keeper("some", "python -m benchmarks.some", TENTH, tmp_path)


def conclude(keeper, figures, *, writes=False, **settings):
    return keeper.conclude(figures, {"n": len(figures)}, settings=settings, writes=writes)


def test_examples_are_true():
    assert doctest.testmod(baseline).failed == 0


@pytest.mark.parametrize(
    ("value", "before", "tolerance", "bound", "verdict", "contradicts"),
    [
        (1.0, 1.0, TENTH, None, "", False),
        (1.09, 1.0, TENTH, None, "", False),
        (1.11, 1.0, TENTH, None, "WORSE", True),
        (0.8, 1.0, TENTH, None, "better", False),
        (1.05, 1.0, TENTH, 1.03, "OVER THE BOUND", False),
        (1.2, 1.0, TENTH, 1.03, "WORSE, OVER THE BOUND", True),
        (9.0, None, TENTH, None, "", False),
        (9.0, None, TENTH, 7.5, "OVER THE BOUND", False),
        # The larger of the two counts.
        (4.0, 1.0, Tolerance(0.1, 5), None, "", False),
        (115.0, 100.0, Tolerance(0.1, 5), None, "WORSE", True),
        # The difference of two times can be negative; its share allows nothing.
        (-1.0, -2.0, TENTH, None, "WORSE", True),
        (1.0001, 1.0, EXACT, None, "WORSE", True),
        (0.9999, 1.0, EXACT, None, "better", True),
        (1.0, 1.0, EXACT, 1.0, "", False),
        # What is or is not so has no tolerance.
        (True, False, Tolerance(0.1, 5), None, "WORSE", True),
        (True, True, TENTH, False, "OVER THE BOUND", False),
    ],
)
def test_verdicts(value, before, tolerance, bound, verdict, contradicts):
    found = row(value, before, tolerance, bound)
    assert (found.verdict, found.contradicts) == (verdict, contradicts)


def test_the_difference_is_shown_with_its_share():
    assert row(1.5, 1.0).difference == "+0.5 (+50.0%)"
    assert row(1.5, 0.0).difference == "+1.5"
    assert row(1.5, None).difference == row(True, False).difference == "-"


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    figures = {"a/b": Figure(1.25, "ms"), "bad": Figure(False, "yes or no")}
    kept = Baseline({"layers": 4}, {"torch": "2"}, figures)
    kept.write(tmp_path / "some.json")
    assert Baseline.read(tmp_path / "some.json") == kept
    assert json.loads((tmp_path / "some.json").read_text())["figures"]["a/b"]["value"] == 1.25


def test_bounds_are_the_benchmarks_and_not_kept(keeper):
    conclude(keeper, {"add": Figure(5.0, "x", 7.5)}, writes=True)
    assert Baseline.read(keeper.path).figures == {"add": Figure(5.0, "x")}


def test_without_a_baseline_a_run_says_how_to_get_one_and_passes(keeper, capsys):
    assert conclude(keeper, {"add": Figure(5.0, "x", 7.5)}) == 0
    printed = capsys.readouterr().out
    assert "No baseline yet; write one with: python -m benchmarks.some --write-baseline" in printed
    assert printed.splitlines()[-1] == 'RESULT {"n": 1}'
    assert not keeper.path.exists()


def test_without_a_baseline_bounds_count(keeper, capsys):
    assert conclude(keeper, {"add": Figure(8.0, "x", 7.5)}) == 1
    assert capsys.readouterr().err == "Over the bound: add (8)\n"


def test_a_part_is_compared_with_its_part(keeper, capsys):
    conclude(keeper, {"add": Figure(5.0, "x"), "view": Figure(6.0, "x")}, writes=True)
    assert conclude(keeper, {"view": Figure(6.1, "x")}) == 0
    assert "1 figures of the baseline were not measured" in capsys.readouterr().out
    assert conclude(keeper, {"view": Figure(7.1, "x"), "mul": Figure(1.0, "x")}) == 1
    printed = capsys.readouterr()
    assert "Not in the baseline: mul" in printed.out
    assert printed.err == "Worse than the baseline: view (7.1)\n"


def test_nothing_is_written_unless_asked(keeper):
    conclude(keeper, {"add": Figure(5.0, "x")}, writes=True)
    before = keeper.path.read_text()
    assert conclude(keeper, {"add": Figure(9.0, "x")}) == 1
    assert keeper.path.read_text() == before


def test_a_new_baseline_may_be_worse_but_not_over_the_bound(keeper):
    conclude(keeper, {"add": Figure(5.0, "x")}, writes=True)
    assert conclude(keeper, {"add": Figure(7.0, "x", 7.5)}, writes=True) == 0
    assert conclude(keeper, {"add": Figure(8.0, "x", 7.5)}, writes=True) == 1
    assert Baseline.read(keeper.path).figures["add"].value == 8.0


def test_a_run_with_other_settings_is_not_compared(keeper, capsys):
    conclude(keeper, {"add": Figure(5.0, "x")}, writes=True, device="adapter")
    assert conclude(keeper, {"add": Figure(50.0, "x")}, device="sim") == 0
    assert "Not compared: the baseline is of {'device': 'adapter'}" in capsys.readouterr().out


def test_a_run_of_nothing_fails(keeper, capsys):
    assert conclude(keeper, {}) == 1
    assert "Nothing was measured" in capsys.readouterr().err


def test_another_machine_is_named(keeper, capsys, monkeypatch):
    monkeypatch.setattr(baseline, "measured_on", lambda: {"torch": "2.9"})
    conclude(keeper, {"add": Figure(5.0, "x")}, writes=True)
    monkeypatch.setattr(baseline, "measured_on", lambda: {"torch": "2.13"})
    conclude(keeper, {"add": Figure(5.0, "x")})
    assert "torch: the baseline's was 2.9, here it is 2.13" in capsys.readouterr().out


def test_of_figures_that_must_be_equal_only_others_are_listed(tmp_path, capsys):
    keeper = Keeper("some", "python -m benchmarks.some", EXACT, tmp_path)
    figures = {f"cell{number}": Figure(1.5, "x") for number in range(50)}
    conclude(keeper, figures, writes=True)
    capsys.readouterr()
    assert conclude(keeper, {**figures, "cell7": Figure(1.4, "x")}) == 1
    printed = capsys.readouterr()
    assert "cell7" in printed.out
    assert "cell8" not in printed.out
    assert "49 more" in printed.out
    assert printed.err == "Better, but not equal: cell7 (1.4)\n"


def test_a_part_cannot_become_the_baseline(keeper, capsys):
    def parse(*arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--only", default="add,view")
        return keeper.parse(parser, arguments, defaults=["only"])

    assert parse("--write-baseline").write_baseline
    assert not parse("--only", "add").write_baseline
    with pytest.raises(SystemExit):
        parse("--only", "add", "--write-baseline")
    assert "needs a whole run, without --only" in capsys.readouterr().err


def test_versions_that_bind_are_not_compared_and_bounds_count(tmp_path, capsys, monkeypatch):
    keeper = Keeper("some", "python -m benchmarks.some", EXACT, tmp_path, binding=("torch",))
    assert conclude(keeper, {"add": Figure(1.0, "s")}, writes=True) == 0
    assert conclude(keeper, {"add": Figure(2.0, "s")}) == 1
    monkeypatch.setattr(baseline, "versions", lambda: {"torch": "another", "transformers": "x"})
    assert conclude(keeper, {"add": Figure(2.0, "s")}) == 0
    assert "Not compared: other versions of torch" in capsys.readouterr().out
    assert conclude(keeper, {"add": Figure(2.0, "s", 1.5)}) == 1
