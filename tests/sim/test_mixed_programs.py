"""Random programs of many kinds of steps: a sample of `python -m tests.stress.mixed`."""

from __future__ import annotations

import pytest

from torchTensorRef.inject import hooks

from ..stress import mixed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("is_promised", [False, True])
@pytest.mark.parametrize("strategy", ["flow", "lru", "genoa"])
@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_program_gives_what_it_gives_with_plain_torch(manage, seed, strategy, is_promised):
    manage(strategy)
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, strategy, promised=is_promised) == ""


@pytest.mark.parametrize("seed", range(4, 8))
def test_a_mixed_program_on_two_accelerators(manage, seed):
    manage("venice", count=2)
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, "venice") == ""
