"""The comparisons with plain torch fail where nothing of ours took part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support.injection import assert_same_injected
from ..support.programs import Bring, assert_right, assert_same, plain_result, unchanged


def product(bring: Bring) -> Any:
    return bring(torch.rand(4, 4)) @ bring(torch.rand(4, 4))


def test_a_program_that_nothing_is_managed_of(manager: Any, monkeypatch: Any) -> None:
    assert_right(product, manager)
    monkeypatch.setattr(type(manager), "adopt", staticmethod(unchanged))
    with pytest.raises(AssertionError, match="the accelerator ran no operator"):
        assert_right(product, manager)
    with pytest.raises(AssertionError, match=r"plain results.*result 0: Tensor of .*\(4, 4\)"):
        assert_right(product, manager, on_host_because="to see what is said of its results")
    assert_right(product, manager, on_host_because="it has", plain_because="it has")


def test_a_program_that_runs_on_the_host(manage: Any) -> None:
    manager = manage(nbytes=16)
    with pytest.raises(AssertionError, match="the accelerator ran no operator"):
        assert_right(product, manager)
    assert_right(product, manager, on_host_because="nothing fits")
    with pytest.raises(AssertionError, match="the accelerator ran no operator"):
        assert_same(plain_result(product), plain_result(product), plain_because="they are")


def test_other_values_are_found(manager: Any) -> None:
    def program(bring: Bring) -> Any:
        return product(bring) + (0 if bring is unchanged else 1)

    with pytest.raises(AssertionError, match="other values"):
        assert_right(program, manager)


def test_an_injected_program_that_makes_nothing(manager: Any) -> None:
    held = torch.rand(30, 30)
    assert_same_injected(lambda: torch.nn.Linear(30, 30)(held), manager)
    with pytest.raises(AssertionError, match="the accelerator ran no operator"):
        assert_same_injected(lambda: held @ held, manager)


def test_operators_are_counted_by_their_path(manager: Any) -> None:
    x = manager.adopt(torch.rand(8), sole=True)
    manager.reset_stats()
    with torch.no_grad():
        _ = x + 1
        stats = manager.stats()
        assert (stats["op_count"], stats["ready_op_count"], stats["slow_op_count"]) == (1, 0, 1)
        _ = x + 1, x.exp(), x[2:]
    stats = manager.stats()
    assert (stats["op_count"], stats["ready_op_count"], stats["slow_op_count"]) == (3, 2, 1)
