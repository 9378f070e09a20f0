"""Copies through staging buffers: the right bytes, in the right order, and nothing kept alive."""

from __future__ import annotations

import threading

import pytest
import torch

from torchTensorRef.base.errors import TransferError
from torchTensorRef.devices.accelerator.events import StagedEvent
from torchTensorRef.devices.accelerator.staging import HostCopier, StagedCopy, StagingRing
from torchTensorRef.devices.host.mirrors import Mirror

SLOT = 1000


class Happened:
    """An event of a copy that a double of a lane has made; it fires when somebody waits for it."""

    def __init__(self, lane):
        self.lane = lane
        self.fired = False

    def query(self):
        return self.fired

    def synchronize(self):
        self.lane.run_until(self)


class LateLane:
    """Copies only when somebody waits for them, so that a slot used too early spoils the bytes."""

    def __init__(self):
        self.work = []
        self.log = []
        self.lock = threading.Lock()
        self.fails = 0

    def hold_back(self, event):
        self.log.append(("hold back", event))

    def issue(self, source, destination):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the link hiccups")
        event = Happened(self)
        with self.lock:
            self.work.append((source, destination, event))
            self.log.append(("issue", source.numel()))
        return event

    def run_until(self, event):
        with self.lock:
            while not event.fired:
                source, destination, done = self.work.pop(0)
                destination.copy_(source)
                done.fired = True


class Device:
    stall_ns = 0

    def __init__(self):
        self.waited = []

    def hold_compute_back(self, event):
        self.waited.append(event)


@pytest.fixture
def lane():
    return LateLane()


def ring(lane, *, into, slots=2, make_slot=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)):
    return StagingRing(
        lane,
        into=into,
        make_slot=make_slot,
        copier=HostCopier(2),
        slot_nbytes=SLOT,
        slot_count=slots,
    )


def noise(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, SLOT, SLOT + 1, 7 * SLOT + 3])
def test_every_byte_arrives(lane, into, nbytes):
    source, target = noise(nbytes), noise(nbytes)
    event = StagedEvent(ring(lane, into=into).submit(StagedCopy(source, target, ["e"])), Device())
    event.synchronize()
    assert torch.equal(source, target)
    assert event.is_done()
    assert event.events == ()


def test_copies_keep_their_order_and_wait_for_what_they_were_told(lane):
    ring_in = ring(lane, into=True)
    copies = [ring_in.submit(StagedCopy(noise(SLOT * 2), noise(SLOT * 2), [n])) for n in range(3)]
    for copy in copies:
        copy.join()
    assert [entry for entry in lane.log if entry[0] == "hold back"] == [
        ("hold back", n) for n in range(3)
    ]
    first = lane.log.index(("hold back", 1))
    assert lane.log[:first] == [("hold back", 0), ("issue", SLOT), ("issue", SLOT)]


def test_compute_waits_for_the_last_slice_and_the_host_does_not(lane):
    device, source = Device(), noise(SLOT * 2)
    target = torch.zeros_like(source)
    event = StagedEvent(ring(lane, into=True).submit(StagedCopy(source, target, ())), device)
    event.wait()
    assert len(device.waited) == 1
    assert not device.waited[0].fired, "issued, not arrived"
    assert event.has_read()
    source.zero_()  # the source may change now
    event.synchronize()
    assert target.any()


def test_out_of_the_device_compute_may_go_on_when_the_last_slice_has_left(lane):
    device = Device()
    source, target = noise(SLOT * 5), torch.zeros(SLOT * 5, dtype=torch.uint8)
    kept = source.clone()
    event = StagedEvent(ring(lane, into=False).submit(StagedCopy(source, target, ())), device)
    event.wait()
    lane.run_until(device.waited[0])  # compute waits for this before it writes the source
    source.zero_()
    event.synchronize()
    assert torch.equal(target, kept)


def test_a_mirror_is_filled_on_the_way(lane):
    source, target = noise(3 * SLOT), noise(3 * SLOT)
    mirror = Mirror(source, torch.zeros(3 * SLOT, dtype=torch.uint8))
    copy = StagedCopy(source, target, (), mirror=mirror)
    StagedEvent(ring(lane, into=True).submit(copy), Device()).synchronize()
    assert torch.equal(mirror.memory, source)
    assert torch.equal(target, source)
    assert mirror.is_filled


def test_without_page_locked_memory_slots_are_pageable(lane):
    source, target = noise(3 * SLOT), noise(3 * SLOT)
    copy = ring(lane, into=True, make_slot=lambda _: None).submit(StagedCopy(source, target, ()))
    StagedEvent(copy, Device()).synchronize()
    assert torch.equal(source, target)


def test_a_hiccup_is_tried_again(lane):
    lane.fails = 1
    source, target = noise(3 * SLOT), noise(3 * SLOT)
    copy = ring(lane, into=True).submit(StagedCopy(source, target, ()))
    StagedEvent(copy, Device()).synchronize()
    assert torch.equal(source, target)


@pytest.mark.parametrize("into", [True, False])
def test_a_copy_that_fails_tells_whoever_waits_and_the_next_one_works(lane, into):
    lane.fails = 2
    staging = ring(lane, into=into)
    event = StagedEvent(staging.submit(StagedCopy(noise(SLOT), noise(SLOT), ())), Device())
    with pytest.raises(TransferError, match="the link hiccups"):
        event.wait()
    with pytest.raises(TransferError):
        event.synchronize()
    assert event.is_done()
    source, target = noise(SLOT), noise(SLOT)
    StagedEvent(staging.submit(StagedCopy(source, target, ())), Device()).synchronize()
    assert torch.equal(source, target)


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 1, (5 << 20) + 13])
def test_threads_copy_every_byte(nbytes):
    source, target = noise(nbytes), noise(nbytes)
    HostCopier(4).copy(source, target)
    assert torch.equal(source, target)


def test_the_tensors_of_a_copy_are_let_go(lane):
    import gc
    import weakref

    source, target = noise(SLOT), noise(SLOT)
    dead = weakref.ref(source)
    event = StagedEvent(ring(lane, into=True).submit(StagedCopy(source, target, ())), Device())
    event.synchronize()
    del source
    for _ in range(100):
        if dead() is None:
            break
        gc.collect()
        threading.Event().wait(0.01)
    assert dead() is None


class BreakingLane(LateLane):
    """A link that fails at each second slice of a copy, for good."""

    def issue(self, source, destination):
        if sum(what == "issue" for what, _ in self.log) % 2:
            self.log.append(("issue", 0))
            raise RuntimeError("the link breaks")
        return super().issue(source, destination)


def test_a_copy_that_fails_halfway_is_over_before_its_ends_are_given_away():
    lane = BreakingLane()
    source = torch.ones(3 * SLOT, dtype=torch.uint8)
    target = torch.zeros(3 * SLOT, dtype=torch.uint8)
    copy = ring(lane, into=True).submit(StagedCopy(source, target, ()))
    with pytest.raises(TransferError):
        copy.join()
    assert not lane.work, "slices are still under way into memory that others get"


def test_a_mirror_that_was_not_filled_is_left_to_the_next_copy():
    source, target = (torch.ones(SLOT, dtype=torch.uint8) for _ in range(2))
    mirror = Mirror(source, torch.zeros(SLOT, dtype=torch.uint8))
    mirror.is_taken = True
    lane = LateLane()
    lane.fails = 2
    with pytest.raises(TransferError):
        ring(lane, into=True).submit(StagedCopy(source, target, (), mirror=mirror)).join()
    assert not mirror.is_taken
    assert not mirror.is_filled


def test_one_whose_slices_cannot_even_be_waited_for_tells_whoever_waits(monkeypatch):
    """They waited for ever: what came up while a failed copy was seen out, nobody had expected."""

    class Gone(BreakingLane):
        def run_until(self, event):
            raise KeyError("no such event")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    target, device = torch.zeros(2 * SLOT, dtype=torch.uint8), Device()
    copy = ring(Gone(), into=True).submit(StagedCopy(noise(2 * SLOT), target, ()))
    assert copy.landed.wait(20)
    with pytest.raises(TransferError, match="failed"):
        StagedEvent(copy, device).synchronize()
