"""The table of options, the environment, and scopes."""

import dataclasses
import os
import subprocess
import sys

import numpy
import pytest

from torchTensorRef.base import options as config
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.options import OPTIONS, Settings, options, read, settings

from ...support.processes import python


def test_nothing_set_gives_the_defaults():
    assert read({"HOME": "/root", "TTRX": "1", "TTR_TRACE": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TTR_DISABLE", "1", True),
        ("TTR_SYNC", " 0 ", False),
        ("TTR_TRACE", "3", 3),
        ("TTR_TRACE_FILE", "out.jsonl", os.path.abspath("out.jsonl")),
        ("TTR_CHECK", "2", 2),
        ("TTR_STRATEGY", "lru", "lru"),
        ("TTR_DEVICE", "sim:rx6600xt", "sim:rx6600xt"),
        ("TTR_BUDGET", "6GiB", "6GiB"),
        ("TTR_BUDGET", "25%", "25%"),
        ("TTR_BUDGET", "cuda:0=6GiB, cpu=50%", {"cuda:0": "6GiB", "cpu": "50%"}),
        ("TTR_FAULTS", "copy:17,alloc:3", "copy:17,alloc:3"),
        ("TTR_INJECT_TO", "transformers, diffusers.models", ("transformers", "diffusers.models")),
        ("TTR_EXCLUDE", "a.b", ("a.b",)),
    ],
)
def test_each_variable_is_read(variable, text, value):
    name = variable.removeprefix("TTR_").lower()
    assert read({variable: text}) == dataclasses.replace(Settings(), **{name: value})


def test_every_option_has_its_variable_and_its_words():
    for name, option in OPTIONS.items():
        assert option.variable == f"TTR_{name.upper()}"
        assert option.default == getattr(Settings(), name)
        assert option.values
        assert option.effect
        assert option.cost


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("TTR_TRACE", "4", "a number from 0 to 3"),
        ("TTR_TRACE", "yes", "a number from 0 to 3"),
        ("TTR_SYNC", "true", "use 0 (off) or 1 (on)"),
        ("TTR_BUDGET", "6 gigs", "such as '6GiB'"),
        ("TTR_BUDGET", "cuda:0=6GiB,cpu", "Write it as 'cuda:0=6GiB,cuda:1=25%'"),
        ("TTR_BUDGET", "200%", "such as '25%'"),
        ("TTR_FAULTS", "copies:1", "Did you mean 'copy'?"),
        ("TTR_FAULTS", "copy:0", "from 1 upward"),
        ("TTR_FAULTS", "copy", "from 1 upward"),
        ("TTR_COMPILED", "of", "Did you mean 'off'? Known: forced, off, on"),
        ("TTR_TRACEBACKS", "shrot", "Did you mean 'short'?"),
        ("TTR_CORE", "pyhton", "Did you mean 'python'?"),
        ("TTR_BLOCKS", "exatc", "Did you mean 'exact'?"),
        ("TTR_OP_TIMES", "cahce", "did you mean 'cache'? For a file of that name, write './cahce'"),
        ("TTR_OP_TIMES", "Off", "did you mean 'off'?"),
        ("TTR_INJECT_TO", "transformers;diffusers", "separated by commas"),
    ],
)
def test_a_bad_value_names_its_variable_and_the_way_out(variable, text, hint):
    with pytest.raises(ConfigError) as caught:
        read({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is not understood")
    assert hint in str(caught.value)


def test_an_unknown_variable_is_named_with_the_nearest(caplog):
    assert read({"TTR_BUGDET": "6GiB", "TTR_TRACE": "2"}) == Settings(trace=2)
    (record,) = caplog.records
    assert "TTR_BUGDET is none of ours" in record.getMessage()
    assert "Did you mean 'TTR_BUDGET'" in record.getMessage()
    assert len(record.getMessage()) < 220


def test_a_variable_in_lower_case_is_said_to_do_nothing(caplog):
    assert read({"ttr_budget": "6GiB", "ttrx": "1"}) == Settings()
    (record,) = caplog.records
    assert "ttr_budget is none of ours" in record.getMessage()
    assert "Did you mean 'TTR_BUDGET'" in record.getMessage()


def test_an_unknown_variable_of_somebody_else_stops_no_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import torchTensorRef; print('here')"],
        env={"TTR_POISSON": "1", "TTR_SYNC": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "here\n"
    assert done.stderr.count("Did you mean 'TTR_POISON'") == 1


def test_where_all_is_off_nothing_is_said_of_unknown_variables(caplog):
    assert read({"TTR_POISSON": "1", "TTR_DISABLE": "1"}) == Settings(disable=True)
    assert not caplog.records


def test_faults_are_taken_apart():
    assert config.parse_faults("copy:17, alloc:3") == (("copy", 17), ("alloc", 3))


def test_a_scope_sets_and_sets_back():
    with options(trace=2, poison=True, compiled="off") as inside:
        assert inside is settings
        assert (settings.trace, settings.poison, settings.compiled) == (2, True, "off")
        with options(trace="3"):
            assert settings.trace == 3
        assert settings.trace == 2
    assert settings == Settings(core=settings.core)


def test_a_scope_sets_back_after_an_error():
    with pytest.raises(KeyError), options(check=1):
        raise KeyError
    assert settings == Settings(core=settings.core)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"tracing": 1}, "Did you mean 'trace'"),
        ({"sync": 1, "trace": 9}, r"options\(trace=...\)='9'.*from 0 to 3"),
        ({"trace": None}, "from 0 to 3"),
        ({"disable": True}, r"torchTensorRef.disabled\(\)"),
        ({"budget": "6GiB"}, r"Write tensorsManager.budget = ..., or set TTR_BUDGET"),
        ({"strategy": "lru"}, "Write tensorsManager.strategy"),
        ({"device": "sim"}, "Write tensorsManager.device"),
        ({"inject_to": "a"}, r"Write injectTo.append"),
        ({"exclude": "a"}, r"Write injectTo.exclude"),
        ({"trace_file": "/"}, "is a folder"),
        *[({"trace_file": bad}, "it takes path") for bad in ([], float("nan"), b"1", -1, True)],
        ({"trace": numpy.array([1, 2])}, "it takes 0 to 3"),
        ({"trace": 1.5}, "it takes 0 to 3"),
        ({"compiled": True}, "it takes on, off, forced"),
        ({"trace_file": "/no/such/folder/x"}, "there is no folder '/no/such/folder'"),
    ],
)
def test_a_bad_scope_changes_nothing(changes, hint):
    with pytest.raises(ConfigError, match=hint), options(**changes):
        pytest.fail("the scope was entered")
    assert settings == Settings(core=settings.core)


def test_who_listens_hears_of_changes(monkeypatch):
    heard = []
    monkeypatch.setattr(
        config, "listeners", [lambda before: heard.append((before.trace, settings.trace))]
    )
    with options(trace=2), options(sync=1):
        pass
    assert heard == [(0, 2), (2, 2), (2, 2), (2, 0)]


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only disk
    with pytest.raises(ConfigError, match="trace' may not be written; name a file where you may"):
        read({"TTR_TRACE_FILE": str(tmp_path / "trace")})
    assert not list(tmp_path.iterdir())


def test_disabled_nothing_of_ours_stands_in_the_way():
    environ = {"TTR_BUDGET": "abc", "TTR_BUGDET": "1GiB", "TTR_DEVICE": "sim", "TTR_DISABLE": "1"}
    assert read(environ) == Settings(disable=True, device="sim")
    with pytest.raises(ConfigError, match="TTR_DISABLE='yes'"):
        read({"TTR_DISABLE": "yes"})


@pytest.mark.parametrize(
    ("arguments", "lines", "status"),
    [
        (("-c", "import torchTensorRef"), 6, 1),  # 5 before Python 3.13, which also quotes `-c`
        (("-m", "torchTensorRef", "run", "program.py"), 1, 2),
        (("-m", "torchTensorRef", "env"), 1, 2),
    ],
)
def test_a_wrong_variable_is_said_in_a_line_or_few(arguments, lines, status):
    done = python(*arguments, TTR_CORE="pyton")
    told = done.stderr.splitlines()
    assert done.returncode == status
    assert len(told) <= lines
    assert "TTR_CORE='pyton' is not understood: Did you mean 'python'?" in told[-1]


def test_we_ourselves_are_not_included_by_the_environment():
    with pytest.raises(ConfigError, match=r"TTR_INJECT_TO.*the runtime itself"):
        read({"TTR_INJECT_TO": "torchTensorRef.memory"})
    assert read({"TTR_INJECT_TO": "torchTensorRef", "TTR_DISABLE": "1"}).disable


def test_a_listener_that_raises_leaves_nothing_changed(monkeypatch):
    def refuse(before):
        raise ValueError("a listener's")

    monkeypatch.setattr(config, "listeners", [refuse])
    with pytest.raises(ValueError, match="a listener's"), options(sync=True):
        pytest.fail("the scope was entered")
    assert settings == Settings(core=settings.core)


def test_whole_numbers_of_other_kinds_and_paths_are_taken(tmp_path):
    with options(trace=numpy.int64(1), sync=True, trace_file=tmp_path / "trace.jsonl"):
        assert (settings.trace, settings.sync) == (1, True)
        assert settings.trace_file == str(tmp_path / "trace.jsonl")
