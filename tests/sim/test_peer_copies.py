"""What crosses between accelerators whose hardware has a link: past the host, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory.states import CLEAN, DIRTY, INVALID
from torchTensorRef.strategy import OpSnapshot, Strategy

from ..support.device_double import LateDevice, LateModule
from ..support.differential import bits
from ..support.several import assert_plain_torchs, on_several, tower
from ..support.sweeps import usual

PEER = 50e9


def on_two(*budgets: int, peer: float | None = PEER, **given: Any) -> Any:
    """The manager on accelerators with a link between them."""
    return on_several(*budgets, peer_bytes_per_s=peer, **given)


class Turns(Strategy):
    """Runs each operator that the first accelerator has not all operands of where the test says."""

    name = "turns"
    spreads = True

    def __init__(self) -> None:
        self._device = ""

    @property
    def device(self) -> str:
        """Where operators run from now on."""
        return self._device

    @device.setter
    def device(self, name: str) -> None:
        self._device, books = name, tensorsManager.residency.books
        for accelerator in books.accelerators:
            for block in books.blocks_on(accelerator):
                block.ready = None  # else an operator runs where its operands are

    def place(self, op: OpSnapshot) -> str:
        """Return what the test has set."""
        return self.device or op.default_device

    def victims(self, device: Any, candidates: Any, need_nbytes: int) -> Any:
        """Name the least recently used ones."""
        return [block.block_id for block in candidates]


def states(tensor: Any) -> list[Any]:
    """The states of a tensor's replicas: at home, on the first accelerator, on the second."""
    books = tensorsManager.residency.books
    replicas = tensor._ttr_block.replicas
    places = [books.host, *books.accelerators]
    return [replicas[d].state if d in replicas else INVALID for d in places]


@pytest.mark.parametrize("budgets", usual([(80 << 10, 80 << 10)], [(40 << 10, 60 << 10, 30 << 10)]))
def test_inference_and_training_are_plain_torchs(manager, budgets):
    manager = on_two(*budgets)
    assert_plain_torchs(manager)
    assert manager.stats()["peer_nbytes"] > 0
    manager.check()


@pytest.mark.parametrize("peer", [PEER, None])
def test_activations_cross_past_the_host(manager, peer):
    manager = on_two(80 << 10, 80 << 10, peer=peer)
    model, x = manager.adopt(tower()), manager.adopt(torch.rand(1, 64))
    with torch.no_grad():
        for _ in range(3):
            model(x)
        manager.reset_stats()
        model(x)
    stats = manager.stats()
    assert (stats["peer_nbytes"] > 0) == (peer is not None)
    assert (stats["written_back_nbytes"] == 0) == (peer is not None)
    manager.check()


def test_what_was_just_made_moves_and_what_is_wanted_back_goes_by_home(manager):
    turns = Turns()
    manager = on_two(1 << 20, 1 << 20, strategy=turns)
    a = manager.adopt(torch.arange(1000.0))
    turns.device = "sim:test1"
    b = a * 2
    assert states(b) == [INVALID, INVALID, DIRTY]
    turns.device = "sim:test0"
    c = b + 1
    assert states(b) == [INVALID, DIRTY, INVALID]
    manager.check()
    turns.device = "sim:test1"
    d = torch.addcmul(a + 3, b, c)
    assert states(b) == [CLEAN, CLEAN, CLEAN]
    plain = torch.arange(1000.0)
    assert torch.equal(bits(d), bits(torch.addcmul(plain + 3, plain * 2, plain * 2 + 1)))
    manager.check()


def test_what_home_has_too_comes_from_whoever_brings_it_first(manager):
    turns = Turns()
    manager = on_two(1 << 20, 1 << 20, strategy=turns, h2d_bytes_per_s=PEER / 2)
    a = manager.adopt(torch.arange(1000.0))
    for turns.device in ("sim:test1", "sim:test0"):
        a + 1
        manager.residency.books.accelerators[1].synchronize()  # else it has first to read it itself
    assert states(a) == [CLEAN, CLEAN, CLEAN]
    assert manager.stats()["peer_nbytes"] == 4000
    manager = on_two(1 << 20, 1 << 20, strategy=turns, h2d_bytes_per_s=PEER * 2)
    b = manager.adopt(torch.arange(1000.0))
    for turns.device in ("sim:test1", "sim:test0"):
        b + 1
        manager.residency.books.accelerators[1].synchronize()
    assert states(b) == [CLEAN, CLEAN, CLEAN]
    assert manager.stats()["peer_nbytes"] == 0


def test_who_writes_what_is_being_read_waits(manager):
    turns = Turns()
    manager = on_two(1 << 20, 1 << 20, strategy=turns, h2d_bytes_per_s=1e9, peer=2e9)
    a = manager.adopt(torch.arange(100_000.0))
    turns.device = "sim:test1"
    a + 1
    manager.residency.books.accelerators[1].synchronize()
    turns.device = "sim:test0"
    b = a + 1
    assert manager.stats()["peer_nbytes"] == a.nbytes
    giver, taker = manager.residency.books.accelerators[::-1]
    with manager.residency.books.lock:
        manager.residency.evictor.evict(a._ttr_block.replicas[taker], "the test wants it away")
    turns.device = "sim:test1"
    copied_ns, waits_ns = taker.peer_free_ns(giver), giver.clocks().compute_free_ns
    assert giver.now_ns() < copied_ns
    assert waits_ns < copied_ns
    a.mul_(2)
    assert giver.clocks().compute_free_ns > copied_ns
    plain = torch.arange(100_000.0)
    assert torch.equal(bits(b), bits(plain + 1))
    assert torch.equal(bits(a), bits(plain * 2))
    manager.check()


@pytest.mark.parametrize(("first", "second", "is_short"), [(200, 8, True), (8, 200, False)])
def test_what_is_made_beside_what_is_written_goes_by_the_budget_where_it_runs(
    manager, first, second, is_short
):
    turns = Turns()
    manager = on_two(first << 10, second << 10, strategy=turns)
    plain, x = nn.BatchNorm1d(16), torch.rand(100, 16)
    ours, y = manager.adopt(nn.BatchNorm1d(16)), manager.adopt(x.clone())
    turns.device = "sim:test1"
    assert torch.equal(bits(manager.release(ours(y))), bits(plain(x)))
    assert torch.equal(bits(manager.release(ours.running_var)), bits(plain.running_var))
    reasons = manager.stats()["host_fallback_reasons"]
    assert ("the operator needs more than the budget" in reasons) == is_short
    manager.check()


def test_a_copy_that_fails_goes_by_home(manager):
    turns = Turns()
    manager = on_two(1 << 20, 1 << 20, strategy=turns)
    a = manager.adopt(torch.arange(1000.0))
    turns.device = "sim:test1"
    b = a * 2
    taker = manager.residency.books.main
    for attempt in (1, 2, 3):
        taker.fail_next("copy", attempt)
    turns.device = "sim:test0"
    c = b + 1
    assert manager.stats()["peer_nbytes"] == 0
    assert states(b) == [CLEAN, CLEAN, CLEAN]
    assert torch.equal(bits(c), bits(torch.arange(1000.0) * 2 + 1))
    manager.check()


def test_a_link_is_free_of_the_hosts_memory_and_takes_its_time(manager):
    spec = DeviceSpec(
        "test", capacity_nbytes=1 << 20, peer_bytes_per_s=1e9, copy_latency_ns=0, launch_ns=0
    )
    machine = Machine.of(spec)
    a, b, c = (SimDevice(spec, k, machine=machine, name=f"sim:test{k}") for k in range(3))
    assert a.peer_bytes_per_s(b) == 1e9
    assert a.peer_bytes_per_s(a) == 0
    assert a.peer_bytes_per_s(SimDevice(spec, 3, name="sim:test3")) == 0
    other = SimDevice(DeviceSpec("old", capacity_nbytes=1 << 20), 4, machine=machine)
    assert a.peer_bytes_per_s(other) == other.peer_bytes_per_s(a) == 0
    given, taken, third = a.allocate(1000), b.allocate(1000), c.allocate(1000)
    source = torch.arange(1000).to(torch.uint8)
    a.copy_in(source, given).synchronize()
    began_ns = machine.now_ns
    first = b.copy_across(a, given, taken)
    second = c.copy_across(a, given, third)
    assert first.end_ns == began_ns + 1000
    assert second.end_ns == began_ns + 2000
    a.empty(given)  # both have yet to read it
    second.synchronize()
    first.synchronize()
    assert torch.equal(taken, source)
    assert torch.equal(third, source)


def test_what_comes_from_home_passes_what_comes_by_a_slower_link(manager):
    spec = DeviceSpec("test", capacity_nbytes=1 << 20, peer_bytes_per_s=1e9, copy_latency_ns=0)
    machine = Machine.of(spec)
    a, b = (SimDevice(spec, k, machine=machine, poison=True, name=f"sim:test{k}") for k in range(2))
    given, taken, other = a.allocate(4000), b.allocate(4000), b.allocate(1000)
    source = torch.arange(4000).to(torch.uint8)
    a.copy_in(source, given).synchronize()
    late = b.copy_across(a, given, taken)
    early = b.copy_in(source[:1000], other)
    assert early.end_ns < late.end_ns
    early.wait()
    b.before_operator([other], [other])
    assert torch.equal(other, source[:1000])
    late.wait()
    b.before_operator([taken], [taken])
    assert torch.equal(taken, source)


def test_real_accelerators_copy_to_each_other_by_torch(manager):
    module = LateModule()
    givers = [LateDevice(module, index) for index in (0, 1)]
    assert givers[0].peer_bytes_per_s(givers[1]) > 0
    assert givers[0].peer_bytes_per_s(givers[0]) == 0
    manager.device = givers
    manager.strategy = "venice"
    manager.budget = 80 << 10
    manager.reset_stats()
    plain, ours = tower(), manager.adopt(tower())
    x = torch.rand(4, 64)
    with torch.no_grad():
        for _ in range(3):
            expected, found = plain(x), ours(manager.adopt(x))
    assert torch.equal(bits(expected), bits(found))
    assert manager.stats()["peer_nbytes"] > 0
    manager.check()


def test_what_came_across_may_be_in_use_when_the_next_copy_comes(manager, monkeypatch):
    module = LateModule()
    a, b = LateDevice(module, 0), LateDevice(module, 1)
    given, taken = a.allocate(4096), b.allocate(4096)
    monkeypatch.setattr(b._rooms.freed, "take", lambda start, nbytes: ([], True))
    b.empty(taken)
    b.refill(taken, 4096)  # into room whose users are known, and are through with it
    assert b.available(taken) is None
    b.copy_across(a, given, taken)
    assert b.available(taken) is not None
