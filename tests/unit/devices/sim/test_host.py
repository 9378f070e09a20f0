"""The host of simulated devices at work: its kernels, beside the link, and what has to cross."""

from __future__ import annotations

import pytest

from torchTensorRef import ConfigError
from torchTensorRef.devices import registry
from torchTensorRef.devices.host.device import HostDevice
from torchTensorRef.devices.sim.cards import SPECS, read_specs
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.devices.storages import empty_bytes

#: One byte per ns on the link, three of host memory, of which a kernel takes two.
SPEC = DeviceSpec(
    "host",
    capacity_nbytes=100_000,
    flops_per_s={"default": 1e9},
    memory_bytes_per_s=1e12,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    host_memory_bytes_per_s=3e9,
    host_flops_per_s=1e9,
    host_kernel_bytes_per_s=2.5e9,
    copy_latency_ns=0,
    launch_ns=0,
    dispatch_ns=0,
)


@pytest.fixture
def host():
    return HostDevice(capacity_nbytes=1)


def plugged_into(host: HostDevice, **changes: float) -> SimDevice:
    sim = SimDevice(SPEC.scaled(**changes))
    host.machines.append(sim.machine)
    return sim


def copied_in(sim: SimDevice, nbytes: int):
    return sim.copy_in(empty_bytes(nbytes), sim.allocate(nbytes))


def test_a_kernel_takes_no_more_than_it_can(host):
    sim = plugged_into(host)
    host.charge(0, 2500, "float32")
    assert sim.now_ns() == 1000


def test_a_kernel_has_what_copies_leave_over(host):
    sim = plugged_into(host)
    copied_in(sim, 1000)
    host.charge(0, 2000, "float32")  # two of three bytes per ns while the copy runs
    assert sim.now_ns() == 1000
    host.charge(0, 2500, "float32")
    assert sim.now_ns() == 2000


def test_a_kernel_and_the_link_work_at_once(host):
    sim = plugged_into(host, host_memory_bytes_per_s=10e9)
    arrival = copied_in(sim, 1000)
    host.charge(0, 2500, "float32")
    assert sim.now_ns() == arrival.end_ns == 1000


def test_without_a_figure_it_takes_all_that_there_is(host):
    sim = plugged_into(host, host_kernel_bytes_per_s=None)
    assert not sim.knows_host
    host.charge(0, 3000, "float32")
    assert sim.now_ns() == 1000


def test_what_it_is_told_of_its_host():
    clocks = SimDevice(SPEC).clocks()
    assert SimDevice(SPEC).knows_host
    assert (clocks.host_bytes_per_s, clocks.host_flops_per_s) == (2.5e9, 1e9)
    faster_than_memory = SimDevice(SPEC.scaled(host_kernel_bytes_per_s=5e9))
    assert faster_than_memory.clocks().host_bytes_per_s == 3e9


def test_an_operator_waits_for_its_operands_at_home_and_its_result_for_the_crossing(host):
    """The order of a program: operator on the device, at home, on the device again."""
    sim = plugged_into(host, urgent_nbytes=100)
    weight = copied_in(sim, 10_000)  # the link is busy until 10,000
    activation = sim.allocate(50)
    sim.after_operator([], [activation], flops=500, nbytes=0, dtype_name="float32")
    home = sim.copy_out(activation, empty_bytes(50), after=sim.record())
    assert (home.start_ns, home.end_ns) == (500, 550)
    home.synchronize()
    host.charge(0, 2000, "float32")
    assert sim.now_ns() == 550 + 1000
    crossing = copied_in(sim, 50)
    assert crossing.end_ns == 1550 + 50  # it has passed the weight
    crossing.wait()
    sim.charge(10, 0, "float32")
    assert sim.record().end_ns == 1610
    assert weight.end_ns == 10_000
    assert copied_in(sim, 1000).start_ns == 10_050  # what the crossing took of the link


def test_what_is_urgent_arrives_before_what_it_has_passed():
    sim = SimDevice(SPEC.scaled(urgent_nbytes=100), poison=True)
    large, small = sim.allocate(1000), sim.allocate(10)
    source = empty_bytes(10).fill_(7)
    slow = sim.copy_in(empty_bytes(1000).fill_(3), large)
    fast = sim.copy_in(source, small)
    assert fast.end_ns < slow.end_ns
    fast.synchronize()
    assert small.eq(7).all()
    assert not large.eq(3).any()
    sim.before_operator([small], [])
    slow.synchronize()
    assert large.eq(3).all()


def test_without_it_copies_keep_their_order():
    sim = SimDevice(SPEC)
    slow = copied_in(sim, 1000)
    assert copied_in(sim, 10).start_ns == slow.end_ns


def test_a_stopwatch_counts_what_compute_does_and_not_what_it_waits_for():
    sim = SimDevice(SPEC)
    watch = sim.stopwatch()
    assert watch.took_ns() is None
    copied_in(sim, 1000).wait()
    sim.charge(30, 0, "float32")
    watch.stop()
    sim.charge(50, 0, "float32")
    assert watch.took_ns() == 30
    assert HostDevice(capacity_nbytes=1).stopwatch() is None


@pytest.mark.parametrize("wrong", [{"host_kernel_bytes_per_s": 0.0}, {"urgent_nbytes": -1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="host"):
        SPEC.scaled(**wrong)


def test_machines_are_shared_by_what_their_hosts_can_do():
    one, two = Machine.of(SPEC), Machine.of(SPEC.scaled(host_kernel_bytes_per_s=1e9))
    assert one.kernel_bytes_per_ns == 2.5
    assert two.kernel_bytes_per_ns == 1.0
    try:
        first = registry.resolve(SPEC)
        other = registry.resolve(SPEC.scaled(host_kernel_bytes_per_s=1e9))
        assert first.machine is not other.machine
    finally:
        registry.reset()


def test_a_users_card_can_say_it(tmp_path):
    path = tmp_path / "mine.toml"
    card = "[mine]\ngib = 2\ntflops_float32 = 1\ntflops_half = 2\nmemory_gb_per_s = 100\n"
    path.write_text(card + "link_gb_per_s = 8\nhost_kernels_gb_per_s = 20\n")
    try:
        assert read_specs(path)["mine"].host_kernel_bytes_per_s == 20e9
    finally:
        SPECS.pop("mine")
    path.write_text(card + "link_gb_per_s = 8\nhost_kernels_gb_per_s = 0\n")
    with pytest.raises(ConfigError, match="above 0"):
        read_specs(path)


def test_no_card_of_ours_claims_what_nobody_has_measured():
    assert not any(spec.host_kernel_bytes_per_s for spec in SPECS.values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"capacity_nbytes": -1}, "capacity_nbytes is -1; it must be a number, 0 or more"),
        ({"capacity_nbytes": "6GiB"}, "capacity_nbytes is '6GiB'; it must be a number"),
        ({"launch_ns": -5}, "launch_ns is -5"),
        ({"queue_depth": 0}, "queue_depth is 0; it must be a number, 1 or more"),
        ({"h2d_bytes_per_s": "fast"}, "h2d_bytes_per_s is 'fast'; it must be a number above 0"),
    ],
)
def test_a_wrong_figure_of_a_spec_is_named(wrong, words):
    with pytest.raises(ConfigError, match=words):
        DeviceSpec("card", **{"capacity_nbytes": 1, **wrong})
