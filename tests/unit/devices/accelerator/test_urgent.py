"""Small copies to the device pass large ones, and still write nothing that is in use."""

from __future__ import annotations

import random

import pytest
import torch

from torchTensorRef.devices.accelerator import own_stream
from torchTensorRef.devices.host.readers import host_readers

from ....support.device_double import LateDevice
from ....support.ordered_double import OrderedDevice, comes_before

SMALL, LARGE = 1 << 10, 128 << 10


def copy(device, nbytes, value=1):
    base = device.allocate(nbytes)
    source = torch.full((nbytes,), value, dtype=torch.uint8)
    return base, device.copy_in(source, base, after=device.available(base))


@pytest.fixture
def locked(monkeypatch):
    """All memory of the host is page-locked: nothing is staged by a thread."""
    # Of copies that never end nothing may be left behind.
    monkeypatch.setattr(host_readers, "_readers", {})

    def lock(device):
        monkeypatch.setattr(device._copier, "is_page_locked", lambda memory: True)
        return device

    return lock


def test_a_small_copy_passes_those_that_are_queued(locked):
    device = locked(LateDevice())
    device.double.random.random = lambda: 1.0  # the link does nothing by itself
    large = [copy(device, LARGE) for _ in range(3)]
    base, small = copy(device, SMALL, value=7)
    small.wait()
    assert small.is_done()
    assert base.unique().tolist() == [7]
    assert not any(event.is_done() for _, event in large)
    assert not device._copier.copies_of(base), "it ends before those that were noted earlier"
    assert len(device._copier._in_flight) == len(large)


def test_small_ones_arrive_in_their_order():
    device = OrderedDevice()
    arrivals = []
    for _ in range(3):
        device.copy_into(device.allocate(SMALL))
        arrivals.append(device.arrived)
    assert comes_before(arrivals[0], arrivals[1])
    assert comes_before(arrivals[1], arrivals[2])


class Slots:
    """Rooms that are given out again and again, and who has used each of them when."""

    def __init__(self, device, monkeypatch, count, seed):
        self.device, self.random = device, random.Random(seed)
        self.used = [[] for _ in range(count)]  # (when, whether it was written)
        self.bases = [None] * count
        self.at = 0
        take, free = device._rooms.freed.take, device._rooms.freed.free
        monkeypatch.setattr(device._rooms.freed, "take", lambda _, n: take(self.start, n))
        monkeypatch.setattr(device._rooms.freed, "free", lambda _, n, e: free(self.start, n, e))
        # Fresh memory is anyone's, and waits for all of compute; from now on each user is known.
        for self.at in range(count):
            free(self.start, LARGE, ())

    @property
    def start(self):
        return (1 + self.at) * LARGE

    def fetch(self):
        base = self.device.allocate(0)
        self.device.empty(base)
        self.device.refill(base, self.random.choice((SMALL, LARGE)))
        event = self.device.copy_into(base)
        self.bases[self.at] = [base, event]
        self.note(self.device.arrived, writes=True)

    def read(self):
        base = self.arrived()
        self.note(self.device.kernel(base))
        self.device.note_uses([base])

    def copy_home(self):
        base = self.arrived()
        home = torch.zeros(base.untyped_storage().nbytes(), dtype=torch.uint8)
        self.device.copy_out(base, home, after=self.device.record())
        self.note(self.device._copier.out_lane.last)

    def evict(self):
        self.device.empty(self.bases[self.at][0])
        self.bases[self.at] = None

    def arrived(self):
        base, event = self.bases[self.at]
        if event is not None:
            event.wait()
            self.bases[self.at][1] = None
        return base

    def note(self, when, *, writes=False):
        for earlier, wrote in self.used[self.at]:
            if writes or wrote:
                assert comes_before(earlier, when), f"two in slot {self.at}: a race"
        self.used[self.at].append((when, writes))

    def step(self):
        self.at = self.random.randrange(len(self.used))
        if self.bases[self.at] is None:
            self.fetch()
        else:
            self.random.choice((self.read, self.read, self.copy_home, self.evict, self.evict))()


@pytest.mark.parametrize("seed", range(4))
def test_room_that_changes_lanes_is_never_in_use(locked, monkeypatch, seed):
    """What was prefetched and goes unread is evicted, too: only its copy's event says when."""
    slots = Slots(locked(OrderedDevice()), monkeypatch, 3, seed)
    for _ in range(200):
        slots.step()
    copier = slots.device._copier
    assert copier.in_lane.stream.clock[copier.in_lane.stream] > 10
    assert copier.urgent_lane.stream.clock[copier.urgent_lane.stream] > 10


def test_the_lanes_wait_for_nothing_else(locked):
    """Else a small copy would come after the large one it should pass."""
    device = locked(OrderedDevice())
    _, _ = copy(device, LARGE)
    large = device.arrived
    copy(device, SMALL)
    assert not comes_before(large, device.arrived)
    assert not comes_before(device.arrived, large)


class Module:
    """Has streams with priorities, or without."""

    def __init__(self, *, has_priorities):
        self.asked = []
        if has_priorities:
            self.Stream = lambda device, priority=0: self.asked.append(priority) or "stream"
        else:
            self.Stream = lambda device: self.asked.append(None) or "stream"


@pytest.mark.parametrize(("has_priorities", "asked"), [(True, [-1, 0]), (False, [None, None])])
def test_priorities_are_asked_for_where_there_are_some(has_priorities, asked):
    module = Module(has_priorities=has_priorities)
    for is_urgent in (True, False):
        assert own_stream.new_stream(module, "xpu:0", "xpu", is_urgent=is_urgent) == "stream"
    assert module.asked == asked


def test_the_driver_is_asked_for_a_priority(monkeypatch):
    asked = []
    monkeypatch.setattr(own_stream, "from_driver", lambda *say: asked.append(say[-1]) or 5)
    module = Module(has_priorities=True)
    module.ExternalStream = lambda handle, device: handle
    for is_urgent in (True, False):
        assert own_stream.new_stream(module, "cuda:0", "cuda", is_urgent=is_urgent) == 5
    assert asked == [-1, 0]
