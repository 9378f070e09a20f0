"""Random programs of many kinds of steps: a sample of `python -m tests.stress.mixed`."""

from __future__ import annotations

import itertools

import pytest

from torchTensorRef import tensorsManager
from torchTensorRef.base.listeners import listeners
from torchTensorRef.inject import hooks

from ..stress import mixed, mixed_training
from ..stress.mixed_changes import Changes
from ..stress.soak import late, simulated
from ..support.sweeps import usual

pytestmark = pytest.mark.filterwarnings("ignore")


#: Each strategy once; that which looks ahead without promises and with them.
MIXED = [(2, "flow", False), (1, "flow", True), (3, "lru", True), (1, "genoa", False)]
MORE_MIXED = [
    case
    for case in itertools.product(range(4), ("flow", "lru", "genoa"), (False, True))
    if case not in MIXED
]


@pytest.mark.parametrize(("seed", "strategy", "is_promised"), usual(MIXED, MORE_MIXED))
def test_a_mixed_program_gives_what_it_gives_with_plain_torch(manage, seed, strategy, is_promised):
    manage(strategy)
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, strategy, promised=is_promised) == ""


@pytest.mark.parametrize(
    ("seed", "is_promised"),
    usual([(126, False), (1, True)], [(1, False), (126, True), (130, False), (130, True)]),
)
def test_a_program_that_trains(manage, seed, is_promised):
    manage("flow")
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, "flow", kind=mixed_training, promised=is_promised) == ""


@pytest.mark.parametrize("seed", usual([4], [5, 6, 7]))
def test_a_mixed_program_on_two_accelerators(manage, seed):
    manage("venice", count=2)
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, "venice") == ""


@pytest.mark.parametrize("seed", usual([10, 31029], [8, 9]))
def test_a_mixed_program_on_the_double_of_a_real_accelerator(manage, seed):
    """There ready operators run in C++; one of these trains what it fetched in inference mode."""
    manage("lru")
    tensorsManager.device = late(seed)[0]
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, ("flow", "lru", "genoa")[seed % 3]) == ""


@pytest.mark.parametrize("seed", [36, 50, 60])
def test_what_is_set_and_seen_between_the_steps_changes_no_number(manage, seed):
    """Forecasts are among it, which have left sizes and graphs changed."""
    manage("flow")
    devices = simulated()
    tensorsManager.device = devices[0]
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, "flow", changed=devices) == ""


@pytest.mark.parametrize("seed", usual([7], [11]))
def test_it_changes_none_on_the_double_of_a_real_accelerator(manage, seed):
    manage("lru")
    devices = late(seed)
    tensorsManager.device = devices[0]
    with hooks.is_disabled.entered(False):
        assert mixed.compared(seed, "lru", changed=devices) == ""


def test_all_of_that_is_done_and_taken_back(manage):
    manage("flow")
    devices = simulated()
    tensorsManager.device = devices[0]
    with hooks.is_disabled.entered(False), Changes(3, devices) as changes:
        mixed.run(3, changes=changes)
    assert {"budget", "strategy", "device", "foreseen", "released"} <= {*changes.done}
    assert not tensorsManager.middlewares
    assert not listeners.any
    assert tensorsManager.placement == "auto"
