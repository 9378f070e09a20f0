"""The memory of a simulated device: exact to the byte, and an independent witness."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from torchTensorRef.base.errors import ConfigError, InvariantError, TransferError
from torchTensorRef.devices import DeviceSpec, SimDevice
from torchTensorRef.devices.sim.memory import BusyRoom


def device(capacity_nbytes=1000, **options):
    return SimDevice(DeviceSpec("tiny", capacity_nbytes=capacity_nbytes), **options)


def kernel_result(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_capacity_holds_to_the_byte():
    sim = device(100)
    first = sim.allocate(60)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 out of memory\."):
        sim.allocate(41)
    second = sim.allocate(40)
    assert (sim.resident_nbytes, sim.free_nbytes(), sim.peak_nbytes) == (100, 0, 100)
    assert (first.shape, first.dtype, second.device.type) == ((60,), torch.uint8, "cpu")


def test_a_dead_base_leaves_the_books_without_a_call():
    sim = device(100)
    base = sim.allocate(60)
    del base
    assert (sim.resident_nbytes, sim.peak_nbytes) == (0, 60)
    again = sim.allocate(100)
    assert sim.resident_nbytes == 100
    del again
    assert sim.free_nbytes() == 100


def test_a_base_in_a_cycle_is_counted_until_it_is_collected():
    sim = device(100)
    gc.disable()
    try:
        cycle = [sim.allocate(60)]
        cycle.append(cycle)
        del cycle
        assert sim.resident_nbytes == 60
        gc.collect()
        assert sim.resident_nbytes == 0
    finally:
        gc.enable()


def test_results_of_kernels_are_counted_by_their_storage():
    sim = device(100)
    result = kernel_result(80)[:10]  # a view of ten bytes keeps all eighty
    sim.account(result)
    assert sim.resident_nbytes == 80 == sim.recount_nbytes()
    with pytest.raises(torch.OutOfMemoryError):
        sim.account(kernel_result(21))
    assert sim.resident_nbytes == 80


def test_a_result_is_counted_once():
    sim = device()
    result = kernel_result(10)
    sim.account(result)
    with pytest.raises(InvariantError, match="counted already"):
        sim.account(result)
    assert sim.resident_nbytes == 10


def test_emptied_and_refilled_bases_keep_their_storage():
    sim = device(100)
    base = sim.allocate(60)
    view = base[10:20]
    sim.empty(base)
    assert (sim.resident_nbytes, base.untyped_storage().nbytes()) == (0, 0)
    sim.refill(base, 60)
    base.fill_(7)
    assert view.tolist() == [7] * 10
    assert sim.resident_nbytes == 60 == sim.recount_nbytes()


def test_a_refill_that_does_not_fit_leaves_the_base_empty():
    sim = device(100)
    base = sim.allocate(60)
    sim.empty(base)
    other = sim.allocate(50)
    with pytest.raises(torch.OutOfMemoryError):
        sim.refill(base, 60)
    assert base.untyped_storage().nbytes() == 0
    del other
    sim.refill(base, 60)
    assert sim.resident_nbytes == 60


def test_an_emptied_base_that_dies_changes_nothing():
    sim = device(100)
    base = sim.allocate(60)
    sim.empty(base)
    del base
    assert sim.resident_nbytes == 0
    assert not sim._memory.residents.emptied


def test_freeing_twice_is_refused():
    sim = device()
    base = sim.allocate(10)
    sim.empty(base)
    with pytest.raises(InvariantError, match=r"emptied allocation 1 \(10 bytes\) .*freed twice"):
        sim.empty(base)


def test_refilling_what_is_full_is_refused():
    sim = device()
    base = sim.allocate(10)
    with pytest.raises(InvariantError, match="was not emptied"):
        sim.refill(base, 10)


def test_blocks_without_bytes():
    sim = device(0)
    base = sim.allocate(0)
    sim.empty(base)
    sim.refill(base, 0)
    sim.copy_in(torch.empty(0, dtype=torch.uint8), base).wait()
    sim.before_operator([base], [base])
    assert sim.resident_nbytes == 0


def test_peak_can_start_again():
    sim = device(100)
    base = sim.allocate(70)
    del base
    kept = sim.allocate(20)
    assert sim.peak_nbytes == 70
    sim.reset_peak()
    assert sim.peak_nbytes == 20 == kept.numel()


def test_poison_marks_fresh_and_freed_bytes():
    sim = device(poison=True)
    base = sim.allocate(4)
    assert base.tolist() == [0xFF] * 4
    base.zero_()
    sim.empty(base)
    sim.refill(base, 4)
    assert base.tolist() == [0xFF] * 4


def test_planned_allocations_fail_once():
    sim = device()
    sim.fail_next("alloc", number=2)
    first = sim.allocate(1)
    with pytest.raises(torch.OutOfMemoryError, match="Allocation 2 was made to fail"):
        sim.allocate(1)
    third = sim.allocate(1)
    assert (sim.alloc_count, sim.resident_nbytes) == (3, first.numel() + third.numel())


@pytest.mark.parametrize("way", ["refill", "account"])
def test_every_way_to_get_bytes_can_fail(way):
    sim = device()
    base = sim.allocate(5)
    sim.empty(base)
    sim.fail_next("alloc")
    with pytest.raises(torch.OutOfMemoryError):
        sim.refill(base, 5) if way == "refill" else sim.account(kernel_result(5))
    assert (sim.resident_nbytes, base.untyped_storage().nbytes()) == (0, 0)


def test_planned_copies_fail_once_and_change_nothing():
    sim = device()
    base, source = sim.allocate(3), torch.ones(3, dtype=torch.uint8)
    sim.fail_next("copy")
    with pytest.raises(TransferError, match="Copy 1 from cpu to sim:0") as caught:
        sim.copy_in(source, base)
    assert (caught.value.source, caught.value.destination, caught.value.nbytes) == (
        "cpu",
        "sim:0",
        3,
    )
    sim.copy_in(source, base).wait()
    assert (sim.copy_count, base.tolist()) == (2, [1, 1, 1])


def test_unknown_faults_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'alloc'"):
        device().fail_next("aloc")
    with pytest.raises(ConfigError, match="has number 1"):
        device().fail_next("copy", number=0)


def test_room_that_is_free_is_taken_before_room_that_is_read():
    room = BusyRoom()
    room.give(30, free_at_ns=100, now_ns=0)
    room.give(30, free_at_ns=50, now_ns=0)
    assert room.take(40, 100, 0) == 0  # 40 of 100 were never used
    assert room.take(40, 60, 0) == 100  # all of the earlier piece and some of the later
    assert room.busy_nbytes == 20
    assert room.take(20, 20, 200) == 0
    assert room.busy_nbytes == 0


def test_more_than_may_be_waits_for_all_that_is_read():
    room = BusyRoom()
    room.give(30, free_at_ns=100, now_ns=0)
    assert room.take(10, -50, 0) == 100
    assert (room.busy_nbytes, room.take(10, -60, 0)) == (0, 0)


def test_room_beyond_the_limit_waits_and_is_not_refused():
    def filled(capacity_nbytes, limit_nbytes=None):
        """When the copy into the room of a base that is on its way home may begin."""
        sim = device(capacity_nbytes)
        if limit_nbytes is not None:
            assert not sim.limit(limit_nbytes)
        base = sim.allocate(60)
        home = sim.copy_out(base, torch.zeros(60, dtype=torch.uint8))
        sim.empty(base)
        room = sim.available(sim.allocate(60))
        return room is not None and room.end_ns == home.end_ns

    assert [filled(100), filled(200), filled(200, 100)] == [True, False, True]
    sim = device(200)
    sim.limit(100)
    kept = [sim.allocate(90), sim.allocate(90)]
    assert sim.resident_nbytes == sum(base.nbytes for base in kept)
    with pytest.raises(torch.OutOfMemoryError, match="180 of 200 are in use"):
        sim.allocate(21)


def test_a_result_beyond_the_limit_waits():
    sim = device(200)
    sim.limit(100)
    base = sim.allocate(60)
    home = sim.copy_out(base, torch.zeros(60, dtype=torch.uint8))
    sim.empty(base)
    result = kernel_result(60)
    sim.account(result)
    assert sim.record().end_ns == home.end_ns
    sim.limit(10**9)
    assert sim.limit_nbytes == 200


def test_threads_do_not_lose_bytes():
    sim = device(10**9)
    torch.set_num_threads(1)

    def work():
        for _ in range(300):
            base = sim.allocate(8)
            sim.account(kernel_result(16))
            sim.charge(1, 1, "float32")
            sim.empty(base)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sim.resident_nbytes, sim.alloc_count) == (0, 4 * 600)
