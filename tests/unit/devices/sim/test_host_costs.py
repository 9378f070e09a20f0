"""What management takes of the host's own time, in virtual time; and who measured it."""

from __future__ import annotations

import json

import pytest
import torch

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.devices import DeviceSpec, SimDevice
from torchTensorRef.devices.registry import spec_of
from torchTensorRef.devices.sim.host_costs import HOST_COSTS, HostCosts, host_costs_of

COSTS = HostCosts(ready_ns=3, decided_ns=40, fetched_ns=500, evicted_ns=6000)
#: One byte per ns, and no latency.
PLAIN = DeviceSpec(
    "plain",
    capacity_nbytes=10_000,
    flops_per_s={"default": 1e9},
    memory_bytes_per_s=1e9,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    copy_latency_ns=0,
    launch_ns=0,
    dispatch_ns=1,
    host_memory_bytes_per_s=100e9,
)
COUNTED = PLAIN.scaled(host_costs=COSTS)


def test_each_path_takes_what_it_costs():
    sim = SimDevice(COUNTED)
    base = sim.allocate(100)
    sim.copy_in(torch.zeros(100, dtype=torch.uint8), base).wait()
    assert sim.now_ns() == 500
    sim.note_decision()
    assert sim.now_ns() == 540
    sim.after_operator([base], [], flops=7, nbytes=0, dtype_name="float32")
    assert sim.now_ns() == 544
    sim.synchronize()
    before = sim.now_ns()
    sim.empty(base)
    assert sim.now_ns() == before + 6000
    assert sim.host_ns == 6543


def test_a_base_without_bytes_is_given_back_for_nothing():
    sim = SimDevice(COUNTED)
    sim.empty(sim.allocate(0))
    assert sim.host_ns == sim.now_ns() == 0


def test_a_copy_between_devices_is_one_that_is_fetched():
    spec = COUNTED.scaled(peer_bytes_per_s=1e9)
    giver = SimDevice(spec)
    taker = SimDevice(spec, 1, machine=giver.machine)
    there, here = giver.allocate(10), taker.allocate(10)
    taker.copy_across(giver, there, here)
    assert (taker.host_ns, giver.host_ns, taker.now_ns()) == (500, 0, 500)


def test_what_compute_is_idle_for_is_told_apart():
    sim = SimDevice(COUNTED)
    sim.charge(100, 0, "float32")
    assert (sim.host_stall_ns, sim.stall_ns) == (4, 0)  # the first operator's issue
    sim.charge(100, 0, "float32")
    assert sim.host_stall_ns == 4  # issued while the first one ran
    for _ in range(10):
        sim.note_decision()
    sim.charge(100, 0, "float32")
    assert sim.now_ns() == 4 + 4 + 400 + 4
    assert sim.host_stall_ns == 4 + sim.now_ns() - 204
    assert sim.stall_ns == 0


def test_waiting_is_not_the_hosts_own_time():
    sim = SimDevice(COUNTED)
    base = sim.allocate(1000)
    sim.charge(10, 0, "float32")
    idle_ns = sim.host_stall_ns
    sim.copy_in(torch.zeros(1000, dtype=torch.uint8), base).synchronize()
    sim.charge(10, 0, "float32")
    assert sim.host_stall_ns == idle_ns + 4  # from where the host went on
    assert sim.stall_ns == 0  # compute waited for nothing


def test_without_costs_nothing_is_counted():
    sim = SimDevice(PLAIN)
    base = sim.allocate(100)
    sim.note_decision()
    sim.copy_in(torch.zeros(100, dtype=torch.uint8), base).synchronize()
    sim.empty(base)
    assert (sim.now_ns(), sim.host_ns) == (100, 0)


def test_small_copies_are_those_that_take_less_than_to_decide():
    assert SimDevice(PLAIN).decision_nbytes == 0
    assert SimDevice(COUNTED).decision_nbytes == 6540
    assert SimDevice(COUNTED.scaled(decision_nbytes=3)).decision_nbytes == 3


def test_a_negative_time_is_refused():
    with pytest.raises(ConfigError, match="negative"):
        HostCosts(ready_ns=-1)


def test_an_unknown_host_gives_the_nearest_that_is_known():
    name = next(iter(HOST_COSTS))
    with pytest.raises(ConfigError, match=name) as caught:
        host_costs_of(name + "x")
    assert caught.value.nearest == name
    assert "--calibrate" in str(caught.value)


def test_a_spec_is_plugged_into_a_host_by_name_and_by_file(tmp_path):
    name, measured = next(iter(HOST_COSTS.items()))
    assert spec_of("rtx4060", name).host_costs == measured.costs
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"ready_ns": 7, "processor": "mine"}))
    assert spec_of(PLAIN, str(path)).host_costs == HostCosts(ready_ns=7, processor="mine")
    path.write_text('{"redy_ns": 7}')
    with pytest.raises(ConfigError, match="redy_ns"):
        spec_of(PLAIN, str(path))


def test_all_that_is_known_of_a_measured_host_is_told():
    for name, measured in HOST_COSTS.items():
        assert all([*measured, measured.costs.processor]), name
        times = measured.costs.ready_ns, measured.costs.decided_ns, measured.costs.evicted_ns
        assert min(times) > 0, name
