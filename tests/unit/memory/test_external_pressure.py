"""What other programs take is watched on each accelerator that has no budget, and only there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from torchTensorRef import tensorsManager
from torchTensorRef.memory import external_pressure, leaving

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


SHORT = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("where", ["home", "evictor"])
def test_one_look_that_fails_is_repeated(two, monkeypatch, where, caplog):
    """The thread died with the first error, and what it had pinned stayed pinned."""
    first = two[0]
    xs = [tensorsManager.adopt(torch.ones(MIB // 4)).toGPU() * n for n in range(20)]
    residency, failures = tensorsManager.residency, []

    def fail(*_: Any) -> Any:
        failures.append(1)
        raise SHORT if where == "home" else KeyError("a mistake")

    with monkeypatch.context() as broken:
        if where == "home":
            broken.setattr(leaving, "empty_bytes", fail)
            broken.setattr(first, "home_memory", lambda nbytes: None)
        else:
            broken.setattr(residency.evictor, "evict_some", fail)
        first.double.others_nbytes = 16 * MIB
        assert until(lambda: len(failures) > 2)
    ledger = residency.books.ledgers[first]
    assert until(lambda: 0 < ledger.resident_nbytes <= ledger.budget.limit_nbytes)
    assert not residency.holds.pinned
    assert [float(x[0]) for x in xs] == list(range(20))
    assert len([one for one in caplog.records if "others" in one.message]) == (where != "home")


def test_a_lack_of_memory_at_home_is_said_in_torchs_class(manager, monkeypatch):
    """Operators are tried again, or in blocks, after that alone; and nothing stays pinned."""
    x, residency = manager.adopt(torch.ones(1000)).toGPU() * 2, manager.residency
    (replica,) = x._ttr_block.replicas.values()

    def fail(nbytes: int) -> Any:
        raise SHORT

    with monkeypatch.context() as short:
        short.setattr(leaving, "empty_bytes", fail)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4,000 bytes of host"):
            residency.evictor.evict(replica, "a test")
        residency.evictor.try_evict(replica, "a test")
        residency.evictor.try_write_back(replica)
        with pytest.raises(torch.OutOfMemoryError):
            x.numpy()
    assert not residency.holds.pinned
    assert x.unique().tolist() == [2.0]
    manager.check()
