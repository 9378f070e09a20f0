"""The examples in the docstrings.

pytest's own collector imports by path, under a name that is not ours, so they are run from here.
"""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "torchTensorRef": ROOT / "torchtensorref",
    "torchTensorRef.strategies": ROOT / "strategies",
}


def names():
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            if path.name != "__main__.py" and ">>>" in path.read_text():
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join((package, *parts)).removesuffix(".__init__")


@pytest.mark.parametrize("name", list(names()))
def test_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
