"""The table of what versions of torch lack: ranges, words, and who asks."""

import configparser
from pathlib import Path

import pytest
import torch

from torchTensorRef.base import torch_versions
from torchTensorRef.base.torch_versions import Difference


@pytest.mark.parametrize(
    ("first", "last", "having", "lacking"),
    [
        ((2, 9), None, ["2.9.0", "2.10.1", "3.0.0", "2.13.0+cpu"], ["2.8.1", "1.13.0", ""]),
        (None, (2, 14), ["2.9.0", "2.14.1+cu132"], ["2.15.0", "3.1"]),
        ((2, 13), (2, 14), ["2.13.0", "2.14.9"], ["2.12.1", "2.15.0.dev1"]),
    ],
)
def test_a_range_of_versions(first, last, having, lacking):
    row = Difference("x", first, last, "for this test")
    assert [row.is_in(version) for version in (*having, *lacking)] == [
        *(True for _ in having),
        *(False for _ in lacking),
    ]


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        ((2, 9), None, "2.9 or later"),
        (None, (2, 14), "2.14 or earlier"),
        ((2, 13), (2, 14), "2.13 to 2.14"),
    ],
)
def test_a_range_in_words(first, last, words):
    assert Difference("x", first, last, "for this test").torches == words


def test_every_row_says_why_and_some_torch_has_it():
    for row in torch_versions.ROWS.values():
        assert row.reason
        assert row.first or row.last
        assert row.first is None or row.last is None or row.first <= row.last
    assert set(torch_versions.lacking("2.15.0")) == {torch_versions.TRACED_CLASSES}
    assert torch_versions.MANAGEMENT not in torch_versions.lacking("2.9.1")
    assert set(torch_versions.lacking("2.10.0")) == {torch_versions.TRACED_CLASSES}
    assert torch_versions.lacking("2.12.1") == {}
    assert torch_versions.lacking("2.14.1") == {}
    assert torch_versions.lacking("2.8.0").keys() == torch_versions.ROWS.keys()
    assert torch_versions.lacking("2.13.0") == {}


def test_the_package_asks_for_the_oldest_that_is_managed():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    oldest = torch_versions.ROWS[torch_versions.MANAGEMENT].first
    wanted = f"torch>={'.'.join(map(str, oldest))}"
    assert wanted in setup["options"]["install_requires"].split()


def test_a_default_device_that_was_taken_back_is_none_where_the_table_says_so():
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    try:
        answers = torch.get_default_device() == torch.device("cpu")
    except AttributeError:
        answers = False
    assert answers is torch_versions.has(torch_versions.DEFAULT_DEVICE, torch.__version__)
