"""Programs with streams of their own, and threads that evict: copies keep clear of all compute."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from torchTensorRef.devices.accelerator import own_stream, vendor
from torchTensorRef.devices.accelerator.streams import note_streams

from ....support.ordered_double import (
    OrderedDevice,
    OrderedEvent,
    OrderedModule,
    OrderedStream,
    OthersStream,
    comes_before,
)
from ....support.threads import in_thread


@pytest.fixture
def device():
    return OrderedDevice()


def evict_and_fetch_there(device, base, monkeypatch):
    """Empty a base and fetch another one into its room, as the card's allocator would."""
    start = base.untyped_storage().data_ptr()
    device.empty(base)
    take = device._rooms.freed.take
    monkeypatch.setattr(device._rooms.freed, "take", lambda _, nbytes: take(start, nbytes))
    device.fetched()
    monkeypatch.undo()
    return device.arrived


def test_who_evicts_need_not_be_who_computes(device, monkeypatch):
    device.double.set_stream(OrderedStream("the program's own"))
    base = device.fetched()
    read = device.kernel(base)
    copied = in_thread(lambda: evict_and_fetch_there(device, base, monkeypatch))
    assert comes_before(read, copied)


def test_what_arrives_is_there_for_every_stream(device):
    first, second = OrderedStream("first"), OrderedStream("second")
    device.double.set_stream(first)
    device.kernel()
    device.fetched()
    one = device.arrived
    device.double.set_stream(second)
    assert comes_before(one, device.kernel()), "it came when this stream was not known"
    in_thread(device.fetched)  # by a thread with another stream
    assert comes_before(device.arrived, device.kernel_unseen())
    device.double.set_stream(first)
    assert comes_before(device.arrived, device.kernel_unseen())


def test_a_stream_is_seen_before_the_ready_path_uses_it(device, monkeypatch):
    device.double.set_stream(OrderedStream("first"))
    base = device.fetched()
    device.kernel(base)
    device.double.set_stream(OrderedStream("second"))
    note_streams()  # what the patch of `set_stream` does
    read = device.kernel_unseen()
    copied = in_thread(lambda: evict_and_fetch_there(device, base, monkeypatch))
    assert comes_before(read, copied)


def test_what_one_stream_frees_another_has_done_with(device):
    """Results of kernels: the allocator gives their room out again in the order of their stream."""
    first, second = OrderedStream("first"), OrderedStream("second")
    device.double.set_stream(first)
    result = device.allocate(4096)
    device.kernel()
    device.double.set_stream(second)
    read = device.kernel(result)
    in_thread(lambda: device.empty(result))
    device.double.set_stream(first)
    assert comes_before(read, device.kernel()), "it may be given the same room"


def test_copies_home_come_after_all_that_has_written(device):
    first, second = OrderedStream("first"), OrderedStream("second")
    base = device.fetched()
    written = []
    for stream in (first, second):
        device.double.set_stream(stream)
        written.append(device.kernel(base))
    home = torch.zeros(4096, dtype=torch.uint8)
    in_thread(lambda: device.copy_out(base, home, after=device.record()).synchronize())
    in_thread(lambda: device.copy_out(base, home).synchronize())
    stream = device._copier.out_lane.stream
    assert all(comes_before(kernel, stream.work()) for kernel in written)


def test_one_stream_costs_no_wait(device):
    waits = []
    device.double.default.wait_event = waits.append
    base = device.fetched()
    waits.clear()
    for _ in range(3):
        device.kernel(base)
    assert waits == []


def go_to(device, stream):
    device.double.set_stream(stream)
    note_streams()  # what the patch of `set_stream` does


def test_a_stream_of_others_is_used_no_more_once_it_was_left(device, monkeypatch):
    """Its owner destroys it then; what it was given still runs."""
    theirs = OthersStream("of a library")
    base = device.fetched()
    device.kernel(base)
    go_to(device, theirs)
    read = device.kernel(base)
    go_to(device, device.double.default)
    theirs.is_alive = False
    copied = evict_and_fetch_there(device, base, monkeypatch)
    assert comes_before(read, copied)
    result = device.allocate(4096)
    device.empty(result)  # into the default stream's pool
    assert comes_before(read, device.kernel())


def test_who_leaves_a_stream_of_others_does_not_wait_for_it(device):
    theirs = OthersStream("of a library")
    device.kernel()
    go_to(device, theirs)
    read = device.kernel()
    go_to(device, device.double.default)
    assert not comes_before(read, device.kernel())
    assert comes_before(read, device.record().event.clock)


def test_a_stream_of_others_is_followed_until_the_last_thread_leaves_it(device):
    theirs = OthersStream("of a library")
    go_to(device, theirs)

    def pass_by():
        go_to(device, theirs)
        go_to(device, device.double.default)

    in_thread(pass_by)
    device.fetched()
    assert comes_before(device.arrived, device.kernel_unseen())
    kernel = device.kernel_unseen()
    assert comes_before(kernel, device.record().event.clock)


def test_who_comes_back_to_a_stream_of_others_finds_what_arrived_meanwhile(device):
    theirs = OthersStream("of a library")
    go_to(device, theirs)
    go_to(device, device.double.default)
    device.fetched()
    go_to(device, theirs)
    assert comes_before(device.arrived, device.kernel_unseen())


def test_a_stream_for_each_request_is_not_kept(device, monkeypatch):
    device.kernel()
    for number in range(1, 20):
        go_to(device, OthersStream("of a request", handle=number * 512))
        device.kernel()
    go_to(device, device.double.default)
    assert len(device._compute._seen) == 1
    monkeypatch.setattr(OrderedEvent, "query", lambda _: True)
    device.record()
    assert not device._compute.are_several


def test_a_stream_that_was_destroyed_under_a_thread_is_dropped(device, caplog):
    theirs = OthersStream("of a library")
    in_thread(lambda: go_to(device, theirs))  # the thread ends on it
    waits = []
    device.double.synchronize = waits.append
    theirs.is_alive = False
    device.fetched()
    assert len(waits) == 1, "nobody else knows when its kernels end"
    assert "invalid resource handle" in caplog.text
    assert theirs not in device._compute._seen
    device.empty(device.fetched())
    assert len(caplog.records) == 1


def test_an_error_on_a_stream_of_torchs_own_is_raised(device, monkeypatch):
    go_to(device, OrderedStream("second"))

    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(OrderedEvent, "record", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        device.record()


class TellsNoDefault(OrderedModule):
    """As torch.xpu, which has no `default_stream`."""

    @property
    def default_stream(self):
        raise AttributeError("default_stream")


def test_threads_that_name_no_stream_are_followed_where_the_default_is_not_told():
    device = OrderedDevice(TellsNoDefault())
    device.double.set_stream(OrderedStream("the main thread's own"))
    note_streams()
    device.fetched()
    kernel = in_thread(device.kernel_unseen)
    assert comes_before(device.arrived, kernel)
    assert comes_before(kernel, device.record().event.clock)


def test_our_streams_are_not_those_of_the_pool(monkeypatch):
    handles = iter(range(100, 200))
    monkeypatch.setattr(own_stream, "from_driver", lambda *_: next(handles))
    device = OrderedDevice()
    ours = {device._copier.in_lane.stream, device._copier.out_lane.stream}
    assert ours.isdisjoint(device.double.Stream() for _ in range(40))


def test_where_a_program_has_one_of_ours_it_is_followed_as_any_other(monkeypatch):
    """No driver to ask: then torch's 32 are handed out to us as to the program."""
    module = OrderedModule(has_own_streams=False)
    device = OrderedDevice(module)
    lane = device._copier.in_lane.stream
    theirs = next(s for s in iter(module.Stream, None) if s is lane)
    module.set_stream(theirs)
    base = device.fetched()
    read = device.kernel(base)
    module.set_stream(module.default)
    copied = in_thread(lambda: evict_and_fetch_there(device, base, monkeypatch))
    assert comes_before(read, copied)


def test_a_driver_that_is_not_there_makes_no_stream():
    assert own_stream.from_driver(torch.cuda, torch.device("cuda:0"), "nothing we know") is None


def test_a_refused_stream_is_remembered_for_no_thread_that_runs_kernels(monkeypatch):
    asked_by = []
    module = SimpleNamespace(device=contextlib.nullcontext, synchronize=lambda device: None)

    class Driver:
        def hipStreamCreateWithPriority(self, *arguments):
            asked_by.append(threading.current_thread())
            return 2

    monkeypatch.setattr(own_stream.ctypes, "CDLL", lambda name: Driver())
    assert own_stream.from_driver(module, torch.device("cuda:0"), "hip") is None
    assert asked_by
    assert not any(thread.is_alive() for thread in asked_by)


@pytest.mark.parametrize(
    ("said", "is_on"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:true", True),
        ("expandable_segments:False", False),
    ],
)
@pytest.mark.parametrize("can_ask", [True, False])
def test_expandable_segments_are_found_out(monkeypatch, said, is_on, can_ask):
    name = "_accelerator_getAllocatorSettings"
    if can_ask:
        monkeypatch.setattr(torch._C, name, lambda: said, raising=False)
    else:
        monkeypatch.delattr(torch._C, name, raising=False)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    assert vendor.has_expandable_segments() == is_on


class UnmappingDevice(OrderedDevice):
    """Its allocator unmaps what is freed, when the stream that it was allocated on is done."""

    def __init__(self):
        super().__init__()
        self.streams, self.readers = {}, {}

    def refill(self, base, nbytes):
        super().refill(base, nbytes)
        self.streams[id(base)] = self.at_refill

    def kernel(self, *bases):
        when = super().kernel(*bases)
        for base in bases:
            self.readers.setdefault(id(base), []).append(when)
        return when

    def empty(self, base):
        super().empty(base)
        stream = self.streams.get(id(base))
        if stream is not None:
            for read in self.readers.get(id(base), ()):
                assert comes_before(read, stream.work()), "unmapped under a kernel"


def test_nothing_is_unmapped_under_a_kernel(monkeypatch):
    device = UnmappingDevice()
    on = device.vendor.on
    device.at_refill = device.double.default

    def noted_on(stream):
        device.at_refill = stream
        return on(stream)

    monkeypatch.setattr(device.vendor, "on", noted_on)
    monkeypatch.setattr(
        torch._C,
        "_accelerator_getAllocatorSettings",
        lambda: "expandable_segments:True",
        raising=False,
    )
    for _ in range(3):
        base = device.fetched()
        device.kernel(base)
        device.empty(base)


@pytest.fixture
def uses(device, monkeypatch):
    """Which streams torch is told to keep freed bytes for, where copies have no own pool."""
    monkeypatch.setattr(vendor, "has_expandable_segments", lambda: True)
    told = []
    device.vendor.record_use = lambda base, stream: told.append((base.data_ptr(), stream))
    return told


def test_a_replica_in_computes_pool_is_kept_for_all_streams(device, uses):
    """It is of the stream of whoever has fetched it, who need not be the one that reads it."""
    first, second = OrderedStream("first"), OrderedStream("second")
    in_thread(lambda: go_to(device, second))
    go_to(device, first)
    base = device.fetched()
    assert {stream for where, stream in uses if where == base.data_ptr()} == {
        second,
        device.double.default,
    }


def test_and_for_those_that_come_later(device, uses):
    base = device.fetched()
    assert uses == []
    later = OrderedStream("later")
    in_thread(lambda: go_to(device, later))
    assert uses == [(base.data_ptr(), later)]
    del base
    in_thread(lambda: go_to(device, OrderedStream("still later")))
    assert len(uses) == 1


def test_a_stream_of_others_may_be_gone_by_then_and_is_waited_for_when_it_is_left(device, uses):
    base = device.fetched()
    go_to(device, OthersStream("of a library"))
    read = device.kernel(base)
    other = in_thread(device.fetched)
    go_to(device, device.double.default)
    assert comes_before(read, device.kernel()), "it may be given the room of a replica that died"
    assert all(not isinstance(stream, OthersStream) for _, stream in uses)
    del base, other


def test_in_a_pool_of_copies_nothing_is_kept(device, uses, monkeypatch):
    monkeypatch.setattr(vendor, "has_expandable_segments", lambda: False)
    in_thread(lambda: go_to(device, OrderedStream("second")))
    device.fetched()
    assert uses == []


def test_a_thread_that_names_no_stream_is_on_the_default_one():
    """Its operators may all take the ready path, of which no device is told."""
    device = OrderedDevice()
    device.double.set_stream(OrderedStream("the main thread's own"))
    note_streams()
    base = device.fetched()
    arrived = device.arrived
    kernel = in_thread(device.kernel_unseen)
    assert comes_before(arrived, kernel), "it has arrived before the kernel reads it"
    event = device.record()
    assert comes_before(kernel, event.event.clock), "compute's end is the other thread's, too"
    device.empty(base)
