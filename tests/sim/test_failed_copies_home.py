"""A copy home that says late that it has failed: it is issued again, and stops nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchTensorRef.base.errors import TransferError
from torchTensorRef.devices.accelerator.events import StagedEvent
from torchTensorRef.devices.accelerator.staging import StagedCopy
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.memory.states import DIRTY, INVALID


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first copy home fails as staged ones do: whoever waits for it is told."""
    copy_out, count = SimDevice.copy_out, []

    def late(device: SimDevice, base: Any, destination: Any, **order: Any) -> Any:
        count.append(1)
        if len(count) > 1:
            return copy_out(device, base, destination, **order)
        copy = StagedCopy(torch.zeros(4), torch.zeros(4), ())
        copy.error = RuntimeError("the link hiccups")
        copy.issued.set(), copy.landed.set()
        return StagedEvent(copy, SimpleNamespace(stall_ns=0, hold_compute_back=None))

    monkeypatch.setattr(SimDevice, "copy_out", late)
    return count


def made_there(manager: Any) -> Any:
    x = manager.adopt(torch.zeros(64, 16)).toGPU()
    return x.add_(1)


def test_whoever_reads_it_has_it_copied_again(manager, fails_once):
    x = made_there(manager)
    assert x.numpy().max() == 1
    assert len(fails_once) == 2


def test_one_that_nobody_waits_for_stops_no_eviction(manager, fails_once):
    x, y = made_there(manager), made_there(manager)
    evictor, device = manager.residency.evictor, manager.residency.books.main
    evictor.try_write_back(x._ttr_block.replicas[device])
    assert evictor.evict(y._ttr_block.replicas[device], "a test") == y.nbytes
    manager.bring_all_home()
    assert (x.cpu() + y.cpu()).unique().tolist() == [2]


def test_what_is_written_meanwhile_does_not_need_it(manager, fails_once):
    """The operator has run: it must neither be told of a failure nor run again."""
    x = made_there(manager)
    block, device = x._ttr_block, manager.residency.books.main
    manager.residency.evictor.try_write_back(block.replicas[device])
    manager.residency.copier.has_been_written(block, device)
    states = block.replicas[device].state, block.replicas[manager.residency.books.host].state
    assert states == (DIRTY, INVALID)


def test_in_place_in_blocks_is_not_begun_again_where_some_have_been_written(manage, monkeypatch):
    """Copies home that fail for good were taken for a lack of room: some were added to twice."""
    monkeypatch.setattr("torchTensorRef.memory.copies.LINK_PAUSES_S", (0.0,))
    manager = manage("lru", 2500)
    x, y = manager.adopt(torch.zeros(64, 16)), manager.adopt(torch.ones(64, 16))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TransferError("the link is broken")

    with monkeypatch.context() as broken:
        broken.setattr(SimDevice, "copy_out", fails)
        with pytest.raises(TransferError):
            x.add_(y)
    assert set(x.unique().tolist()) <= {0.0, 1.0}


def test_a_budget_that_copies_home_do_not_let_be_lowered_is_that_of_before(manage, monkeypatch):
    """It was in force all the same: more was held than it allowed, and `check()` said so."""
    monkeypatch.setattr("torchTensorRef.memory.copies.LINK_PAUSES_S", (0.0,))
    manager = manage("lru", 20_000, count=2)
    manager.budget = before = {"sim:test": 10_000, "sim:test1": 20_000}
    xs = [made_there(manager) for _ in range(2)]

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TransferError("the link is broken")

    with monkeypatch.context() as broken:
        broken.setattr(SimDevice, "copy_out", fails)
        with pytest.raises(TransferError) as caught:
            manager.budget = {"sim:test": 5_000, "sim:test1": 5_000}
    assert "is what it was before" in caught.value.__notes__[0]
    assert manager.budget == before == manager._budget_setting
    manager.check()
    manager.budget = {"sim:test": 5_000, "sim:test1": 5_000}
    assert manager.residency.books.main.resident_nbytes <= 5_000
    assert [x.unique().tolist() for x in xs] == [[1], [1]]
