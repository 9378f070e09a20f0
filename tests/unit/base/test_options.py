"""The table of options, the environment, and scopes."""

import dataclasses
import subprocess
import sys

import pytest

from torchTensorRef.base import options as config
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.options import OPTIONS, Settings, options, read, settings


def test_nothing_set_gives_the_defaults():
    assert read({"HOME": "/root", "TTRX": "1", "TTR_TRACE": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TTR_DISABLE", "1", True),
        ("TTR_SYNC", " 0 ", False),
        ("TTR_TRACE", "3", 3),
        ("TTR_TRACE_FILE", "out.jsonl", "out.jsonl"),
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
        ("TTR_SYNC", "true", "use 0 or 1"),
        ("TTR_BUDGET", "6 gigs", "such as '6GiB'"),
        ("TTR_BUDGET", "cuda:0=6GiB,cpu", "Write it as 'cuda:0=6GiB,cpu=24GiB'"),
        ("TTR_BUDGET", "200%", "such as '25%'"),
        ("TTR_FAULTS", "copies:1", "Did you mean 'copy'?"),
        ("TTR_FAULTS", "copy:0", "from 1 upward"),
        ("TTR_FAULTS", "copy", "from 1 upward"),
        ("TTR_INJECT_TO", "transformers;diffusers", "separated by commas"),
    ],
)
def test_a_bad_value_names_its_variable_and_the_way_out(variable, text, hint):
    with pytest.raises(ConfigError) as caught:
        read({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is not understood")
    assert hint in str(caught.value)


def test_an_unknown_variable_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'TTR_BUDGET'") as caught:
        read({"TTR_BUGDET": "6GiB"})
    assert caught.value.nearest == "TTR_BUDGET"
    assert "TTR_TRACE" in caught.value.known


def test_an_unknown_variable_is_refused_when_we_are_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import torchTensorRef.base.options"],
        env={"TTR_POISSON": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Did you mean 'TTR_POISON'" in done.stderr


def test_faults_are_taken_apart():
    assert config.parse_faults("copy:17, alloc:3") == (("copy", 17), ("alloc", 3))


def test_a_scope_sets_and_sets_back():
    with options(trace=2, poison=True, budget="1KiB") as inside:
        assert inside is settings
        assert (settings.trace, settings.poison, settings.budget) == (2, True, "1KiB")
        with options(trace="3"):
            assert settings.trace == 3
        assert settings.trace == 2
    assert settings == Settings()


def test_a_scope_sets_back_after_an_error():
    with pytest.raises(KeyError), options(check=1):
        raise KeyError
    assert settings == Settings()


@pytest.mark.parametrize(
    ("changes", "hint"),
    [({"tracing": 1}, "Did you mean 'trace'"), ({"sync": 1, "trace": 9}, "from 0 to 3")],
)
def test_a_bad_scope_changes_nothing(changes, hint):
    with pytest.raises(ConfigError, match=hint), options(**changes):
        pytest.fail("the scope was entered")
    assert settings == Settings()
