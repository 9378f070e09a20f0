"""Fixtures: small programs that run twice, on plain tensors and on ours, and are compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest

Program = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture
def right(manage, request) -> Callable[[Program], None]:
    """Give `right(program)`: it fails where plain torch gives something else.

    Under `genoa` or `flow`, as the test's name has it, with random evictions besides.
    """
    from torchTensorRef.strategy.choice import make_strategy

    from ..support.programs import assert_right
    from ..support.shaking import Shaken

    strategy = ("genoa", "flow")[zlib.crc32(request.node.name.encode()) % 2]
    manager = manage(Shaken(make_strategy(strategy), seed=1))
    return lambda program: assert_right(program, manager)
