"""The host as a device, and what every device gets from the base."""

from __future__ import annotations

import time

import torch

from torchTensorRef.devices import DONE, HostDevice
from torchTensorRef.devices.storages import bytes_of, fill_bytes, move_bytes


def test_host_memory_can_be_taken_away_and_given_back():
    host = HostDevice()
    base = host.allocate(100)
    view = base[:10]
    assert (host.resident_nbytes, host.peak_nbytes, base.dtype) == (100, 100, torch.uint8)
    host.empty(base)
    assert (host.resident_nbytes, base.untyped_storage().nbytes()) == (0, 0)
    host.refill(base, 100)
    base.fill_(3)
    assert view.tolist() == [3] * 10
    del base, view
    assert host.resident_nbytes == 0
    host.reset_peak()
    assert host.peak_nbytes == 0


def test_the_host_takes_tensors_it_never_saw():
    host = HostDevice()
    foreign = torch.ones(10)
    host.account(foreign)
    host.empty(foreign)
    host.refill(foreign, 40)
    host.before_operator([foreign], [foreign])
    host.after_operator([foreign], [], flops=1, nbytes=1, dtype_name="float32")
    assert host.resident_nbytes == 0


def test_host_copies_are_done_when_they_return():
    host = HostDevice()
    base = host.allocate(4)
    event = host.copy_in(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), base)
    destination = torch.zeros(4, dtype=torch.uint8)
    host.copy_out(base, destination, after=event).wait()
    assert event.is_done()
    assert destination.tolist() == [1, 2, 3, 4]
    host.copy_out(base, destination[:2], start=1).wait()
    assert destination.tolist() == [2, 3, 3, 4]
    assert (host.available(base), host.record()) == (None, DONE)


def test_host_facts():
    host = HostDevice()
    before_ns = time.perf_counter_ns()
    assert before_ns <= host.now_ns() <= time.perf_counter_ns()
    assert (host.name, host.is_host, host.has_virtual_clock) == ("cpu", True, False)
    assert 0 < host.free_nbytes() <= host.capacity_nbytes
    assert host.torch_device == torch.device("cpu")
    assert repr(host) == "<HostDevice cpu>"


def test_bytes_are_those_of_the_whole_storage():
    base = torch.zeros(3, requires_grad=True)
    assert bytes_of(base.detach()[1:]).shape == (12,)
    fill_bytes(bytes_of(base), 0xFF)
    assert base.isnan().all()


def test_moving_bytes_keeps_to_the_range_of_a_view():
    source = torch.arange(6, dtype=torch.uint8)
    destination = torch.zeros(6, dtype=torch.uint8)
    move_bytes(source[1:3], destination[4:])
    assert destination.tolist() == [0, 0, 0, 0, 1, 2]
