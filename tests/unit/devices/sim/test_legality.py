"""What a real device would answer with wrong bits raises here, and names both accesses."""

from __future__ import annotations

import pytest
import torch

from torchTensorRef.base.errors import InvariantError
from torchTensorRef.devices import DeviceSpec, HostDevice, SimDevice


@pytest.fixture
def sim():
    spec = DeviceSpec(
        "plain",
        capacity_nbytes=100,
        flops_per_s={"default": 1e9},
        memory_bytes_per_s=1e9,
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        copy_latency_ns=0,
        launch_ns=0,
        dispatch_ns=1,
        host_memory_bytes_per_s=100e9,
    )
    device = SimDevice(spec, poison=True)
    yield device
    assert device.resident_nbytes == device.recount_nbytes()


def host_bytes(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def operate(sim, reads, writes, flops=10):
    sim.before_operator(reads, writes)
    sim.after_operator(reads, writes, flops=flops, nbytes=0, dtype_name="float32")


def test_bytes_arrive_when_the_event_fires_not_when_it_is_issued(sim):
    base = sim.allocate(10)
    source = host_bytes(10, 1)
    arrival = sim.copy_in(source, base)
    assert base.tolist() == [0xFF] * 10
    assert not arrival.is_done()
    assert base.tolist() == [0xFF] * 10
    source.fill_(2)  # too early: the copy still reads it
    arrival.wait()
    assert base.tolist() == [2] * 10


def test_reading_before_waiting_names_both_accesses(sim):
    base = sim.allocate(10)
    sim.copy_in(host_bytes(10), base)
    with pytest.raises(InvariantError, match=r"reads it .*allocation 1 .*arrives by copy 1 \(h2d"):
        sim.before_operator([base], [])
    with pytest.raises(InvariantError, match="writes it"):
        sim.before_operator([], [base])


def test_asking_an_event_that_has_fired_is_waiting_enough(sim):
    base = sim.allocate(10)
    arrival = sim.copy_in(host_bytes(10), base)
    sim.machine.wait_until(arrival.end_ns)
    with pytest.raises(InvariantError):
        sim.before_operator([base], [])
    assert arrival.is_done()
    sim.before_operator([base], [])


def test_waiting_for_a_later_copy_of_the_engine_is_enough(sim):
    a, b = sim.allocate(10), sim.allocate(10)
    sim.copy_in(host_bytes(10, 1), a)
    sim.copy_in(host_bytes(10, 2), b).wait()
    sim.before_operator([a, b], [])
    assert (a[0].item(), b[0].item()) == (1, 2)


def test_waiting_for_the_other_engine_is_not_enough(sim):
    a, b = sim.allocate(10), sim.allocate(10)
    sim.copy_in(host_bytes(10), a)
    sim.copy_out(b, host_bytes(10)).wait()
    with pytest.raises(InvariantError, match="arrives by copy 1"):
        sim.before_operator([a], [])


def test_operands_must_be_on_the_device(sim):
    with pytest.raises(InvariantError, match="unknown here, has no bytes on this device"):
        sim.before_operator([host_bytes(10)], [])
    base = sim.allocate(10)
    sim.empty(base)
    with pytest.raises(InvariantError, match="emptied allocation 1"):
        sim.before_operator([base], [])


def test_overwriting_what_is_being_copied_out_is_refused(sim):
    base, home = sim.allocate(10), host_bytes(10)
    base.fill_(4)
    written_back = sim.copy_out(base, home)
    sim.before_operator([base], [])
    with pytest.raises(InvariantError, match=r"writes it .*is being read by copy 1 \(d2h"):
        sim.before_operator([], [base])
    assert home.tolist() == [0xFF] * 10
    written_back.wait()
    sim.before_operator([], [base])
    assert home.tolist() == [4] * 10


def test_a_slot_with_an_unfinished_reader_is_not_written(sim):
    victim = sim.allocate(100)
    operate(sim, [victim], [], flops=500)
    too_early = sim.record()
    operate(sim, [victim], [], flops=500)
    sim.empty(victim)
    sim.refill(victim, 100)
    for after in (None, too_early):
        with pytest.raises(InvariantError, match="its users will not have finished"):
            sim.copy_in(host_bytes(100), victim, after=after)
    sim.copy_in(host_bytes(100), victim, after=sim.available(victim)).wait()
    sim.before_operator([victim], [])


def test_copying_over_a_replica_waits_for_its_own_readers(sim):
    base = sim.allocate(10)
    operate(sim, [base], [], flops=100)
    with pytest.raises(InvariantError, match="pass `after`"):
        sim.copy_in(host_bytes(10), base)
    sim.copy_in(host_bytes(10), base, after=sim.available(base))


def test_copying_out_what_is_not_written_yet_is_refused(sim):
    base, home = sim.allocate(10), host_bytes(10)
    before = sim.record()
    operate(sim, [], [base], flops=100)
    with pytest.raises(InvariantError, match="its writer"):
        sim.copy_out(base, home, after=before)
    assert sim.copy_out(base, home).start_ns == sim.record().end_ns


def test_copying_out_what_is_still_arriving_needs_an_order(sim):
    base, home = sim.allocate(10), host_bytes(10, 0)
    arrival = sim.copy_in(host_bytes(10, 9), base)
    with pytest.raises(InvariantError, match="its writer"):
        sim.copy_out(base, home)
    sim.copy_out(base, home, after=arrival).synchronize()
    assert home.tolist() == [9] * 10


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
def test_both_ends_of_a_copy_have_one_size(sim, direction):
    base = sim.allocate(10)
    ends = (host_bytes(9), base) if direction == "copy_in" else (base, host_bytes(9))
    with pytest.raises(InvariantError, match="does not match the 9 bytes"):
        getattr(sim, direction)(*ends)


def test_a_part_is_copied_out_alone_and_has_to_be_within_its_base(sim):
    base, home = sim.allocate(10), host_bytes(3)
    sim.copy_in(torch.arange(10, dtype=torch.uint8), base).synchronize()
    sim.copy_out(base, home, start=4).synchronize()
    assert home.tolist() == [4, 5, 6]
    for start in (-1, 8):
        with pytest.raises(InvariantError, match="does not match the 3 bytes"):
            sim.copy_out(base, home, start=start)


def test_an_emptied_base_gets_nothing_from_a_copy_in_flight(sim):
    base = sim.allocate(10)
    arrival = sim.copy_in(host_bytes(10), base)
    sim.empty(base)
    sim.refill(base, 10)
    arrival.wait()
    assert base.tolist() == [0xFF] * 10


def test_a_base_that_dies_while_it_is_filled_is_forgotten(sim):
    base = sim.allocate(100)
    arrival = sim.copy_in(host_bytes(100), base)
    del base
    assert sim.resident_nbytes == 0
    ready = sim.available(incoming := sim.allocate(100))
    assert ready is not None
    assert ready.end_ns == arrival.end_ns
    arrival.wait()
    assert incoming.tolist() == [0xFF] * 100


def test_bytes_copied_out_of_a_base_that_dies_still_arrive(sim):
    base, home = sim.allocate(10), host_bytes(10)
    base.fill_(6)
    written_back = sim.copy_out(base, home)
    del base
    assert sim.resident_nbytes == 0
    written_back.synchronize()
    assert home.tolist() == [6] * 10


def test_the_host_may_not_use_bytes_that_are_on_their_way(sim):
    host = HostDevice(capacity_nbytes=1)
    host.machines.append(sim.machine)
    base, home = sim.allocate(10), host.allocate(10)
    written_back = sim.copy_out(base, home)
    with pytest.raises(InvariantError, match="the host has not waited"):
        host.before_operator([home], [])
    written_back.wait()  # compute waits, the host does not
    with pytest.raises(InvariantError, match=r"writes a host replica.*copy 1"):
        host.before_operator([], [home])
    written_back.synchronize()
    host.before_operator([home], [home])


def test_a_round_trip_keeps_the_bits_in_inference_mode(sim):
    with torch.inference_mode():
        base, home = sim.allocate(10), host_bytes(10, 0)
        arrival = sim.copy_in(host_bytes(10, 8), base)
    arrival.wait()
    sim.copy_out(base, home).synchronize()
    assert home.tolist() == [8] * 10


def test_a_landing_copy_keeps_its_address(sim):
    host = HostDevice(capacity_nbytes=1)
    host.machines.append(sim.machine)
    base, home = sim.allocate(10), host_bytes(10)
    address = home.data_ptr()
    sim.copy_out(base, home).wait()
    del home
    assert all(host_bytes(10).data_ptr() != address for _ in range(100))
    sim.machine.wait_until(1000)
    other = host_bytes(10)
    sim.copy_out(base, other).synchronize()
    assert sim.machine.landing == {}


def test_fetching_what_is_being_written_back_needs_an_order(sim):
    base, home = sim.allocate(10), host_bytes(10)
    base.fill_(3)
    written_back = sim.copy_out(base, home)
    other = sim.allocate(10)
    with pytest.raises(InvariantError, match="its source's copy 1"):
        sim.copy_in(home, other)
    sim.copy_in(home, other, after=written_back).wait()
    assert other.tolist() == [3] * 10
