"""What other programs take is watched on each accelerator that has no budget, and only there."""

from __future__ import annotations

import time
from typing import Any

import pytest

from torchTensorRef import tensorsManager
from torchTensorRef.memory import external_pressure

from ...support.device_double import LateDevice, LateModule

MIB = 2**20


@pytest.fixture
def two(manager, monkeypatch):
    """Two doubles of an accelerator without a budget, looked at every 10 ms."""
    monkeypatch.setattr(external_pressure, "PERIOD_S", 0.01)
    devices = [LateDevice(LateModule(32 * MIB), index) for index in range(2)]
    for index, device in enumerate(devices):
        device.capacity_nbytes, device.name = 32 * MIB, f"cuda:{index}"
    manager.budget = None
    manager.device = devices
    yield devices
    manager.budget = None
    manager.device = LateDevice()


def until(condition: Any, timeout_s: float = 20) -> bool:
    ends = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("number", [0, 1])
def test_others_are_watched_on_each_of_several(two, number):
    name = two[number].name
    alone = tensorsManager.budget[name]
    two[number].double.others_nbytes = 16 * MIB
    assert until(lambda: tensorsManager.budget[name] <= alone - 10 * MIB)
    assert tensorsManager.budget[two[1 - number].name] == alone
    two[number].double.others_nbytes = 0
    assert until(lambda: tensorsManager.budget[name] >= alone - MIB)


def test_one_that_has_a_budget_is_left_alone(two):
    names = [device.name for device in two]
    tensorsManager.budget = {names[0]: 20 * MIB}
    for device in two:
        device.double.others_nbytes = 16 * MIB
    assert until(lambda: tensorsManager.budget[names[1]] < 20 * MIB)
    time.sleep(0.05)
    assert tensorsManager.budget[names[0]] == 20 * MIB


def test_what_is_not_in_use_any_more_is_not_watched(two):
    watch = tensorsManager._others
    assert set(watch._watched) == set(two)
    tensorsManager.device = two[0]
    assert set(watch._watched) == {two[0]}
