"""The adapter of real accelerators, driven without one: a module made of lists."""

from __future__ import annotations

import contextlib

import pytest
import torch

from torchTensorRef.devices.accelerator import AcceleratorDevice
from torchTensorRef.errors import TransferError


class FakeEvent:
    def __init__(self, calls):
        self.calls = calls
        self.fired = False

    def record(self, stream):
        self.calls.append(("record", stream.name))

    def query(self):
        return self.fired

    def synchronize(self):
        self.fired = True


class FakeStream:
    def __init__(self, name, calls):
        self.name = name
        self.calls = calls

    def wait_event(self, event):
        self.calls.append(("wait", self.name))


class FakeModule:
    """Says what `torch.cuda` would say, and writes down what it was asked."""

    def __init__(self):
        self.calls = []
        self.compute = FakeStream("compute", self.calls)
        self.streams = 0

    def Stream(self, device):
        self.streams += 1
        return FakeStream(f"side {self.streams}", self.calls)

    def Event(self):
        return FakeEvent(self.calls)

    def current_stream(self, device):
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append(("on", stream.name))
        yield

    def mem_get_info(self, index):
        return 400, 1000

    def memory_reserved(self, index):
        return 70

    def memory_allocated(self, index):
        return 50

    def set_per_process_memory_fraction(self, fraction, index):
        self.calls.append(("cap", fraction, index))

    def synchronize(self, device):
        self.calls.append(("synchronize", str(device)))


class FakeAccelerator(AcceleratorDevice):
    """Keeps its bytes on the host, because there is nowhere else."""

    torch_device = torch.device("cpu")


class BareModule:
    """A module without streams, as mps has it."""

    def __init__(self):
        self.synchronized = 0

    def recommended_max_memory(self):
        return 500

    def synchronize(self):
        self.synchronized += 1


@pytest.fixture
def module():
    return FakeModule()


@pytest.fixture
def device(module):
    return FakeAccelerator("cuda", 0, module=module)


def test_a_copy_in_runs_aside_and_after(device, module):
    base = device.allocate(4)
    arrival = device.copy_in(torch.ones(4, dtype=torch.uint8), base, after=device.available(base))
    assert module.calls == [
        ("record", "compute"),
        ("wait", "side 1"),
        ("on", "side 1"),
        ("record", "side 1"),
    ]
    arrival.wait()
    assert module.calls[-1] == ("wait", "compute")
    assert base.tolist() == [1] * 4


def test_a_copy_out_waits_for_compute_by_itself(device, module):
    base, home = device.allocate(4), torch.zeros(4, dtype=torch.uint8)
    base.fill_(9)
    device.copy_out(base, home).synchronize()
    assert module.calls[:2] == [("record", "compute"), ("wait", "side 1")]
    assert home.tolist() == [9] * 4


def test_freed_room_waits_for_the_copies_in_flight(device, module):
    base = device.allocate(4)
    event = device.copy_out(base, torch.zeros(4, dtype=torch.uint8))
    device.empty(base)
    assert module.calls[-1] == ("wait", "compute")
    event.synchronize()
    device.refill(base, 4)
    module.calls.clear()
    device.empty(base)
    assert module.calls == []


def test_ends_of_a_copy_live_until_it_has_fired(device):
    base = device.allocate(4)
    event = device.copy_in(torch.ones(4, dtype=torch.uint8), base)
    assert not event.is_done()
    assert len(device._in_flight) == 1
    event.event.fired = True
    assert event.is_done()
    device._retire()
    assert not device._in_flight


def test_books_of_the_replicas(device):
    base = device.allocate(10)
    result = torch.zeros(5, dtype=torch.uint8)
    device.account(result)
    assert (device.resident_nbytes, device.peak_nbytes) == (15, 15)
    device.empty(base)
    device.refill(base, 20)
    del result
    assert (device.resident_nbytes, device.peak_nbytes) == (20, 25)
    device.reset_peak()
    assert device.peak_nbytes == 20


def test_what_the_driver_says(device, module):
    assert (device.capacity_nbytes, device.free_nbytes()) == (1000, 420)
    assert device.limit(250)
    assert module.calls == [("cap", 0.25, 0)]
    device.synchronize()
    assert module.calls[-1] == ("synchronize", "cpu")
    assert device.now_ns() > 0


def test_both_ends_of_a_copy_have_one_size(device):
    base = device.allocate(4)
    with pytest.raises(TransferError, match="3 bytes to give and room for 4"):
        device.copy_in(torch.ones(3, dtype=torch.uint8), base)


def test_without_streams_copies_are_done_at_once():
    module = BareModule()
    device = FakeAccelerator("mps", 0, module=module)
    base, home = device.allocate(3), torch.zeros(3, dtype=torch.uint8)
    assert device.copy_in(torch.ones(3, dtype=torch.uint8), base).is_done()
    device.copy_out(base, home, after=device.record()).wait()
    device.synchronize()
    assert home.tolist() == [1, 1, 1]
    assert (device.available(base), device.capacity_nbytes, module.synchronized) == (None, 500, 1)
    assert device.free_nbytes() == 497
    assert not device.limit(100)
