"""Virtual time: engines, the roofline, and memory that copies and the host share."""

from __future__ import annotations

import pytest
import torch

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.devices import DeviceSpec, HostDevice, SimDevice
from torchTensorRef.devices.sim.cards import SPECS
from torchTensorRef.devices.sim.machine import Machine, SharedMemory

#: One byte per ns everywhere, so that one can follow by eye. Host memory is no limit.
PLAIN = DeviceSpec(
    "plain",
    capacity_nbytes=10_000,
    flops_per_s={"float16": 2e9, "default": 1e9},
    memory_bytes_per_s=1e9,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    copy_latency_ns=10,
    launch_ns=5,
    dispatch_ns=1,
    host_memory_bytes_per_s=100e9,
    host_flops_per_s=1e9,
)


def host_bytes(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_an_operator_takes_the_larger_of_work_and_movement():
    sim = SimDevice(PLAIN)
    sim.charge(100, 30, "float32")
    assert sim.record().end_ns == 1 + 5 + 100
    sim.charge(100, 30, "float16")
    assert sim.record().end_ns == 106 + 5 + 50
    sim.charge(0, 30, "float16")
    assert sim.record().end_ns == 161 + 5 + 30


def test_the_host_runs_ahead_and_stops_only_when_told():
    sim = SimDevice(PLAIN)
    for _ in range(10):
        sim.charge(100, 0, "float32")
    assert sim.now_ns() == 10
    mark = sim.record()
    assert not mark.is_done()
    mark.synchronize()
    assert sim.now_ns() == mark.end_ns == 1 + 10 * 105
    assert mark.is_done()


def test_the_host_waits_when_the_queue_is_full():
    sim = SimDevice(PLAIN.scaled(queue_depth=2))
    sim.charge(100, 0, "float32")
    sim.charge(100, 0, "float32")
    assert sim.now_ns() == 2
    sim.charge(100, 0, "float32")
    assert sim.now_ns() == 106  # the first one has ended


def test_copies_of_pageable_memory_are_slower_and_the_host_waits_for_them():
    spec = PLAIN.scaled(pageable_bytes_per_s=0.5e9)
    for page_locked, took_ns in ((True, 10 + 100), (False, 10 + 200)):
        sim = SimDevice(spec, page_locked=page_locked)
        base = sim.allocate(100)
        arrival = sim.copy_in(host_bytes(100), base)
        assert arrival.end_ns == took_ns
        assert sim.now_ns() == (0 if page_locked else took_ns)
        arrival.wait()
        leaving = sim.copy_out(base, host_bytes(100), after=sim.record())
        assert leaving.end_ns == 2 * took_ns
        assert sim.now_ns() == (0 if page_locked else 2 * took_ns)
        rate = 1e9 if page_locked else 0.5e9
        assert sim.clocks().h2d_bytes_per_s == sim.clocks().d2h_bytes_per_s == pytest.approx(rate)


def test_pageable_memory_is_never_faster_than_the_link():
    for spec in SPECS.values():
        pageable = spec.link_bytes_per_s(to_device=True, page_locked=False)
        assert pageable <= spec.link_bytes_per_s(to_device=True, page_locked=True)
    slow = PLAIN.scaled(h2d_bytes_per_s=0.1e9)
    assert slow.link_bytes_per_s(to_device=True, page_locked=False) == 0.1e9


def test_both_ways_to_charge_take_the_same_time():
    fast, noted = SimDevice(PLAIN), SimDevice(PLAIN)
    base = noted.allocate(8)
    for _ in range(3):
        fast.charge(7, 9, "float16")
        noted.after_operator([base], [base], flops=7, nbytes=9, dtype_name="float16")
    assert fast.record().end_ns == noted.record().end_ns


def test_copies_queue_on_their_engine_and_overlap_the_other():
    sim = SimDevice(PLAIN)
    a, b = sim.allocate(100), sim.allocate(100)
    first = sim.copy_in(host_bytes(100), a)
    second = sim.copy_in(host_bytes(100), b)
    back = sim.copy_out(a, host_bytes(100), after=first)
    assert (first.end_ns, second.end_ns, back.end_ns) == (110, 220, 220)


def test_a_half_duplex_link_takes_turns():
    sim = SimDevice(PLAIN.scaled(duplex=False))
    a, b = sim.allocate(100), sim.allocate(100)
    assert sim.copy_in(host_bytes(100), a).end_ns == 110
    assert sim.copy_out(b, host_bytes(100)).end_ns == 220


def test_a_stall_is_the_time_compute_waited_for_nothing_but_a_copy():
    sim = SimDevice(PLAIN)
    base = sim.allocate(100)
    arrival = sim.copy_in(host_bytes(100), base)
    sim.charge(50, 0, "float32")  # ends at 56
    arrival.wait()
    assert sim.stall_ns == 0  # nothing has been held up yet
    sim.charge(10, 0, "float32")
    assert sim.stall_ns == 110 - 56
    assert sim.record().end_ns == 110 + 15


def test_a_copy_that_hides_behind_compute_is_no_stall():
    sim = SimDevice(PLAIN)
    base = sim.allocate(100)
    arrival = sim.copy_in(host_bytes(100), base)
    sim.charge(500, 0, "float32")
    arrival.wait()
    sim.charge(10, 0, "float32")
    assert sim.stall_ns == 0


def test_copies_of_two_devices_share_host_memory():
    spec = PLAIN.scaled(host_memory_bytes_per_s=1.5e9)
    machine = Machine(memory_bytes_per_s=1.5e9, flops_per_s=1e9)
    one, two = SimDevice(spec, 0, machine=machine), SimDevice(spec, 1, machine=machine)
    a, b = one.allocate(1000), two.allocate(1000)
    assert one.copy_in(host_bytes(1000), a).end_ns == 1010
    # half a byte per ns is left over until 1010, then all of the link's rate
    assert two.copy_in(host_bytes(1000), b).end_ns == 1010 + 500
    one.charge(1, 1, "float32")
    assert one.now_ns() == two.now_ns() == 1


def test_the_host_computes_with_what_copies_leave_over():
    sim = SimDevice(PLAIN.scaled(host_memory_bytes_per_s=3e9, copy_latency_ns=0))
    host = HostDevice(capacity_nbytes=1)
    host.machines.append(sim.machine)
    host.charge(0, 300, "float32")
    assert sim.now_ns() == host.now_ns() == 100
    base = sim.allocate(1000)
    sim.copy_in(host_bytes(1000), base)
    host.charge(0, 300, "float32")  # two bytes per ns are left
    assert sim.now_ns() == 250
    host.charge(400, 300, "float32")  # more work than movement
    assert sim.now_ns() == 650


def test_shared_memory_counts_every_byte_once():
    memory = SharedMemory()
    assert memory.finish(0, 100, rate=1, total_rate=1, lane="a") == 100
    assert memory.finish(50, 100, rate=1, total_rate=1, lane="b") == 200
    assert memory.finish(0, 10, rate=1, total_rate=2) == 10
    memory.forget_before(200)
    assert not any(memory._reserved.values())


def test_room_in_use_is_available_when_its_last_reader_ends():
    sim = SimDevice(PLAIN.scaled(capacity=100))
    victim = sim.allocate(100)
    sim.after_operator([victim], [], flops=500, nbytes=0, dtype_name="float32")
    last_reader = sim.record()
    sim.empty(victim)
    incoming = sim.allocate(100)
    ready = sim.available(incoming)
    assert ready is not None
    assert ready.end_ns == last_reader.end_ns
    assert sim.copy_in(host_bytes(100), incoming, after=ready).end_ns == ready.end_ns + 110


def test_room_nobody_used_is_available_at_once():
    sim = SimDevice(PLAIN)
    sim.charge(500, 0, "float32")
    assert sim.available(sim.allocate(100)) is None


def test_operators_without_notes_may_have_read_anything():
    sim = SimDevice(PLAIN)
    base = sim.allocate(100)
    sim.copy_in(host_bytes(100), base).wait()
    sim.charge(500, 0, "float32")
    ready = sim.available(base)
    assert ready is not None
    assert ready.end_ns == sim.record().end_ns


def test_a_result_waits_for_room_that_is_being_copied_out():
    sim = SimDevice(PLAIN.scaled(capacity=100))
    dirty = sim.allocate(100)
    home = host_bytes(100, 0)
    dirty.fill_(5)
    written_back = sim.copy_out(dirty, home)
    sim.empty(dirty)
    result = host_bytes(50)
    sim.account(result)
    sim.charge(0, 0, "float32")
    assert sim.stall_ns == written_back.end_ns - 1
    written_back.synchronize()
    assert home.tolist() == [5] * 100


def test_the_same_program_takes_the_same_time():
    def run():
        sim = SimDevice(SPECS["rx6600xt"])
        bases = [sim.allocate(1000 * n) for n in range(1, 6)]
        for base in bases:
            event = sim.copy_in(host_bytes(base.numel()), base, after=sim.available(base))
            sim.charge(10**6, 10**4, "float16")
            event.wait()
            sim.after_operator([base], [], flops=10**7, nbytes=10**5, dtype_name="bfloat16")
        sim.synchronize()
        return sim.now_ns(), sim.stall_ns

    assert run() == run()


def test_synchronize_waits_for_every_engine():
    sim = SimDevice(PLAIN)
    base, home = sim.allocate(100), host_bytes(100, 0)
    arrival = sim.copy_in(host_bytes(100, 3), base)
    back = sim.copy_out(base, home, after=arrival)
    sim.synchronize()
    assert sim.now_ns() == back.end_ns
    assert home.tolist() == base.tolist() == [3] * 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes_per_s": 0},
        {"flops_per_s": {}},
        {"flops_per_s": {"float32": -1}},
        {"launch_ns": -1},
        {"queue_depth": 0},
    ],
)
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ConfigError, match="plain"):
        PLAIN.scaled(**wrong)


def test_named_specs_are_ordered_as_the_cards_are():
    names = ("laptop", "rx6600xt", "rtx3060", "rtx4090", "h200")
    capacities = [SPECS[name].capacity_nbytes for name in names]
    assert capacities == sorted(capacities)
    assert SPECS["rx6600xt"].capacity_nbytes == 8 * 2**30
    assert SPECS["rtx3060"].h2d_bytes_per_s == 2 * SPECS["rx6600xt"].h2d_bytes_per_s
    assert PLAIN.scaled(capacity="2KiB").capacity_nbytes == 2048


def test_streaming_through_two_slots_keeps_the_link_busy():
    sim = SimDevice(PLAIN.scaled(capacity=2000, copy_latency_ns=0))
    slots = [sim.allocate(1000), sim.allocate(1000)]
    source = host_bytes(1000)
    for step in range(10):
        slot = slots[step % 2]
        sim.copy_in(source, slot, after=sim.available(slot)).wait()
        sim.before_operator([slot], [])
        sim.after_operator([slot], [], flops=400, nbytes=0, dtype_name="float32")
    sim.synchronize()
    # ten copies of 1000 ns one after the other, and the last operator behind them
    assert sim.now_ns() == 10 * 1000 + 405
    assert sim.stall_ns == sim.now_ns() - 10 * 405 - 1  # all but the first dispatch
