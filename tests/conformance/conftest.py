"""Fixtures: small programs that run twice, on plain tensors and on ours, and are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..support.sweeps import give_by_turns

Program = Callable[[Callable[[Any], Any]], Any]
STRATEGIES = ("genoa", "flow")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test that is to be `right` one of the strategies; both where all is run."""
    give_by_turns(metafunc, "right", STRATEGIES)


@pytest.fixture
def right(manage, request) -> Callable[..., None]:
    """Give `right(program)`: it fails where plain torch gives something else.

    Under a strategy and random evictions besides. What a program may give plain, or compute on the
    host alone, it says by `plain_because=` and `on_host_because=`.
    """
    from torchTensorRef.strategy.choice import make_strategy

    from ..support.programs import assert_right
    from ..support.shaking import Shaken

    manager = manage(Shaken(make_strategy(request.param), seed=1))
    return lambda program, **reasons: assert_right(program, manager, **reasons)
