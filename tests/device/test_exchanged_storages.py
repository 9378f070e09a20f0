"""Devices that cannot empty a storage (mps): what is evicted is really gone, and views follow."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ..support.device_double import ExchangingDevice, LateModule
from .conftest import managed_by
from .test_promises import MIB, layers, train


@pytest.fixture
def device() -> ExchangingDevice:
    return ExchangingDevice(LateModule(seed=4))


@pytest.fixture
def manager(device: ExchangingDevice) -> Any:
    with managed_by(device) as make:
        yield make("lru", 8 * MIB)


def test_nobody_holds_what_was_evicted(manager: Any, device: ExchangingDevice) -> None:
    model = manager.adopt(layers(256, 4))
    train(model, [manager.adopt(torch.rand(4, 256)) for _ in range(3)], foreach=True)
    manager.bring_all_home()
    gc.collect()
    assert device.given_up
    assert device.held_nbytes() == 0


def test_views_follow_their_block_into_another_storage(manager: Any) -> None:
    x = manager.adopt(torch.arange(600_000, dtype=torch.float32))
    view, turned = x[10:20], x.view(600, 1000).t()
    for turn in range(3):
        view.add_(1)  # dirty there
        manager.bring_all_home()
        y = manager.adopt(torch.ones(600_000)) * turn  # takes the room
        assert manager.release((x + y)[10:12]).tolist() == [11.0 + 2 * turn, 12.0 + 2 * turn]
        assert turned[15, 0] == 16.0 + turn
        assert view.is_contiguous()


def test_every_operator_is_decided_upon(manager: Any) -> None:
    x = manager.adopt(torch.ones(1000))
    manager.reset_stats()
    for _ in range(5):
        x = x * 1.5
    assert manager.stats()["ready_op_count"] == 0
    assert x._ttr_plain is None
