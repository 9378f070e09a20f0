"""A copy to the accelerator that says late that it has failed: its replica is given up, no more."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from torchTensorRef.base.errors import TransferError
from torchTensorRef.memory.states import CLEAN, FILLING, INVALID
from torchTensorRef.memory.transfer import ATTEMPTS

from ..support.device_double import LateDevice, LateModule

SIZE = 1 << 18  # of a megabyte: staged


class Link:
    """Fails so many copies of a real device as its driver does."""

    def __init__(self, lane: Any, monkeypatch: Any) -> None:
        self.left, self.issue = 0, lane.issue
        monkeypatch.setattr(lane, "issue", self)

    def __call__(self, source: Any, destination: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("CUDA error: the link hiccups")
        return self.issue(source, destination)


@pytest.fixture
def late(manage, monkeypatch) -> Any:
    """A manager on a real device's double, and its link."""
    manager = manage("lru")
    manager.device = device = LateDevice(LateModule(seed=1))
    manager.budget = 4 << 20
    return manager, Link(device._copier.in_lane, monkeypatch)


@pytest.mark.parametrize(("count", "is_there"), [(2, True), (4, False)])
def test_a_staged_copy_that_fails_stops_nothing(late, count, is_there):
    """Each operator afterwards raised what it had failed with, also those that did not use it."""
    manager, link = late
    x, link.left = manager.adopt(torch.ones(SIZE)), count
    assert (x * 2).sum().item() == 2 * SIZE
    device = manager.residency.books.main
    assert (x._ttr_block.replicas[device].state is CLEAN) is is_there
    assert not link.left
    assert x.mul_(3)[0] == 3
    manager.bring_all_home()
    manager.budget = 8 << 20
    manager.check()
    assert (manager.adopt(torch.ones(3)) + x[:3]).tolist() == [4.0] * 3


def coming(manager: Any) -> Any:
    """A tensor that is fetched ahead by a copy that will turn out to have failed."""
    x, device = manager.adopt(torch.ones(1000)), manager.residency.books.main
    device.fail_next("late")
    manager.residency.copier.fetch(x._ttr_block, device, ahead=True)
    assert x._ttr_block.replicas[device].state is FILLING
    return x


def lower(manager: Any, x: Any) -> None:
    manager.budget = 100


def exchange(manager: Any, x: Any) -> None:
    manager.device = "cpu"


def make_room(manager: Any, x: Any) -> None:
    manager.residency.evictor.make_room(manager.residency.books.main, 20_000 - 100, "a test")


def repair(manager: Any, x: Any) -> None:
    try:
        raise MemoryError
    except MemoryError:
        manager.doubt()
    manager.residency.repair()


LOOKS = {
    "all come home": lambda manager, x: manager.bring_all_home(),
    "the budget is lowered": lower,
    "the device is left": exchange,
    "room is made": make_room,
    "a repair": repair,
    "arrays": lambda manager, x: [x.numpy() for _ in [x.numpy()]],
    "written at home": lambda manager, x: x.copy_(x.cpu()),
    "it grows": lambda manager, x: x.resize_(2000).resize_(1000),
    "written": lambda manager, x: x.mul_(1),
    "shared memory": lambda manager, x: x.share_memory_(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_lets_it_arrive_goes_on(manage, name):
    manager = manage("lru", nbytes=20_000)
    x = coming(manager)
    device = manager.residency.books.main
    LOOKS[name](manager, x)
    replica = x._ttr_block.replicas.get(device)
    assert replica is None or replica.state is not FILLING
    manager.check()
    assert x.tolist() == [1.0] * 1000
    assert (x + 1).tolist() == [2.0] * 1000
    manager.check()


def test_an_operator_fetches_it_once_more(manager):
    x, device = coming(manager), manager.residency.books.main
    before = manager.residency.copier.transfer.counts.fetch_count
    assert (x + 1).tolist() == [2.0] * 1000
    assert manager.residency.copier.transfer.counts.fetch_count == before + 1
    assert x._ttr_block.readable_on(device) is not None
    assert not manager.residency.books.counts.host_fallbacks


def test_one_that_fails_again_lets_the_operator_run_at_home(manager):
    x, device = coming(manager), manager.residency.books.main
    device.fail_next("late")
    assert (x + 1).tolist() == [2.0] * 1000
    assert manager.residency.books.counts.host_fallbacks == {"a copy failed": 1}
    assert x._ttr_block.replicas[device].state is INVALID
    assert (x + 1).tolist() == [2.0] * 1000
    assert x._ttr_block.readable_on(device) is not None


def test_what_another_thread_has_given_up_is_fetched_again(manager):
    """An operator had pinned it and would have read what nobody had written there."""
    x, residency = manager.adopt(torch.ones(1000)), manager.residency
    device, fetch = residency.books.main, residency.copier.fetch

    def fetched(block: Any, *args: Any, **options: Any) -> None:
        fetch(block, *args, **options)
        residency.copier.fetch = fetch
        residency.copier.bring_home(block)
        residency.copier._dirty_replica(block)  # another thread looks where it is

    device.fail_next("late")
    residency.copier.fetch = fetched
    assert (x + 1).tolist() == [2.0] * 1000
    assert not residency.books.counts.host_fallbacks
    manager.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_is_not_kept_from_beginning(late):
    manager, link = late
    x, link.left = manager.adopt(torch.ones(SIZE)), 2
    device = manager.residency.books.main
    manager.residency.copier.fetch(x._ttr_block, device, ahead=True)
    manager.residency._forks.before_fork()
    assert x._ttr_block.replicas[device].state is INVALID
    assert (x + 1).sum().item() == 2 * SIZE


def test_toGPU_says_what_has_failed(manager):
    x = coming(manager)
    manager.residency.books.main.fail_next("late")
    with pytest.raises(TransferError, match="made to fail"):
        x.toGPU()
    assert x.toGPU().tolist() == [1.0] * 1000


def driver_error(text: str = "CUDA error: the link hiccups") -> RuntimeError:
    return torch.AcceleratorError(text)


WAYS = {
    "urgent_lane": lambda device, base, home: device.copy_in(home[:256], base),
    "in_lane": lambda device, base, home: device.copy_in(home, base),
    "out_lane": lambda device, base, home: device.copy_out(base, home),
    "landing": lambda device, base, home: device.copy_out(base, home[:256]),
    "peer_lane": lambda device, base, home: device.copy_across(device.giver, base.clone(), base),
}


@pytest.fixture(params=WAYS)
def way(request, manager, monkeypatch) -> Any:
    """A device, the lane of one way to copy that needs no staging, and the copy."""
    device = LateDevice(LateModule(seed=1))
    device.giver = LateDevice(LateModule(seed=2), 1)  # type: ignore[attr-defined]
    copier = device._copier
    is_small = request.param in ("urgent_lane", "landing")
    monkeypatch.setattr(copier, "is_page_locked", lambda memory: request.param != "landing")
    lane = getattr(copier, "out_lane" if request.param == "landing" else request.param)
    home = torch.ones(256 if is_small else 1 << 20, dtype=torch.uint8)
    base = device.allocate(home.numel())
    return device, lane, lambda: WAYS[request.param](device, base, home)


def test_what_a_driver_refuses_may_be_tried_again(way, monkeypatch):
    """It was its own error and ended the program: nothing was tried again, nor at home."""
    device, lane, copy = way
    pieces = device._copier._pieces
    pieces.give_back(pieces.take())
    free = len(pieces._free)

    def refuse(source: Any, destination: Any) -> Any:
        raise driver_error()

    with monkeypatch.context() as broken:
        broken.setattr(lane, "issue", refuse)
        with pytest.raises(TransferError, match="failed: CUDA error: the link hiccups"):
            copy()
    assert len(pieces._free) == free
    copy().synchronize()


@pytest.mark.parametrize("is_memory", [False, True])
def test_what_a_kernel_has_broken_is_said_as_it_is(way, monkeypatch, is_memory):
    """Nor is it tried again: each further call of the driver raises it."""
    device, lane, copy = way
    error = torch.OutOfMemoryError("CUDA out of memory") if is_memory else driver_error("assert")

    def refuse(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(lane, "issue", refuse)
        if not is_memory:
            broken.setattr(device.double, "may_refuse", refuse)
            broken.setattr(device.giver.double, "may_refuse", refuse)
        with pytest.raises(RuntimeError) as caught:
            copy()
    assert caught.value is error


@pytest.mark.parametrize("count", [1, ATTEMPTS])
def test_an_operator_whose_small_operand_is_refused(late, monkeypatch, count):
    manager, _ = late
    link = Link(manager.residency.books.main._copier.urgent_lane, monkeypatch)
    x, link.left = manager.adopt(torch.arange(10.0)), count
    assert (x * 2)[:3].tolist() == [0.0, 2.0, 4.0]
    assert not link.left
    fallbacks = {"a copy failed": 1} if count == ATTEMPTS else {}
    assert manager.residency.books.counts.host_fallbacks == fallbacks
    manager.check()
