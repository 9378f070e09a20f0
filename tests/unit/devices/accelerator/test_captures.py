"""Graphs of kernels that a program captures: nothing of ours has a part in them."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
import torch

from torchTensorRef.devices import background
from torchTensorRef.devices.accelerator import captures, streams
from torchTensorRef.devices.accelerator.streams import note_streams
from torchTensorRef.devices.background import Background, ask_aside

from ....support.ordered_double import OrderedDevice, OrderedStream, comes_before
from ....support.threads import in_thread


@pytest.fixture
def device():
    return OrderedDevice()


def go_to(device, stream):
    device.double.set_stream(stream)
    note_streams()  # what the patch of `set_stream` does


@contextlib.contextmanager
def captured(device, stream, *others):
    """As `torch.cuda.graph` does it; other streams join the capture."""
    before = device.double.current_stream()
    go_to(device, stream)
    streams.begin_capture()
    for each in (stream, *others):
        each.is_capturing = True
    yield
    for each in (stream, *others):
        each.is_capturing = False
    streams.end_capture()
    go_to(device, before)


def fetch_and_evict(device):
    base = device.fetched()
    record = device.record()
    record.wait()
    device.empty(base)
    return record.event.clock


def test_another_thread_has_no_part_in_a_capture(device):
    """It records no event on the stream that captures, and has it wait for none."""
    device.double.set_stream(OrderedStream("the program's"))
    device.kernel(device.fetched())
    stream = OrderedStream("captures")
    with captured(device, stream):
        in_thread(lambda: fetch_and_evict(device))
    assert not streams.captures_under_way


def test_what_was_given_before_is_known(device):
    stream, joins = OrderedStream("captures"), OrderedStream("joins it")
    kernels = []
    for each in (joins, stream):
        go_to(device, each)
        kernels.append(device.kernel())
    with captured(device, stream, joins):
        assert all(
            comes_before(kernel, in_thread(lambda: fetch_and_evict(device))) for kernel in kernels
        )


def test_afterwards_its_stream_is_followed_as_others(device):
    stream = OrderedStream("captures")
    with captured(device, stream):
        in_thread(device.fetched)
        arrived = device.arrived
    go_to(device, stream)
    assert comes_before(arrived, device.kernel_unseen())
    in_thread(device.fetched)
    kernel = device.kernel_unseen()
    assert comes_before(device.arrived, kernel)
    assert comes_before(kernel, in_thread(lambda: fetch_and_evict(device)))


def test_streams_within_a_capture_are_not_seen(device):
    stream, joins = OrderedStream("captures"), OrderedStream("joins it")
    with captured(device, stream):
        joins.is_capturing = True
        go_to(device, joins)
        go_to(device, stream)
        in_thread(lambda: fetch_and_evict(device))
        joins.is_capturing = False
    assert joins not in device._compute._seen


def test_no_event_is_asked_while_one_is_captured(device, monkeypatch):
    """Whether one has fired is a question that spoils it."""
    with captured(device, OrderedStream("captures")):
        monkeypatch.setattr(device._compute, "_left", [None])
        assert device._compute._unfired() == [None]
        monkeypatch.undo()


def test_torchs_cache_is_not_emptied_meanwhile(device):
    """Torch refuses: it would have to wait for the device."""
    emptied = []
    device.double.empty_cache = lambda: emptied.append(None)
    with captured(device, OrderedStream("captures")):
        device.give_up_caches()
    assert not emptied
    device.give_up_caches()
    assert emptied


def test_an_end_without_a_beginning_counts_for_nothing():
    streams.end_capture()
    streams.begin_capture()
    assert streams.captures_under_way
    streams.end_capture()
    assert not streams.captures_under_way


def test_one_that_does_not_begin_is_not_under_way():
    with pytest.raises((AttributeError, TypeError)):
        torch.cuda.graphs.CUDAGraph.capture_begin(object())
    assert not streams.captures_under_way


def test_its_end_is_seen():
    streams.begin_capture()
    with pytest.raises((AttributeError, TypeError)):
        torch.cuda.graphs.CUDAGraph.capture_end(object())
    assert not streams.captures_under_way


@pytest.fixture
def at_start():
    """What threads of ours do first: nothing that other tests have asked for."""
    before = dict(background.at_start)
    background.at_start.clear()
    yield background.at_start
    background.at_start.clear()
    background.at_start.update(before)


class Driver:
    """Knows the mode of each thread."""

    def __init__(self):
        self.modes = {}

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.modes[threading.current_thread().name] = mode._obj.value
        return 0


def test_threads_of_ours_spoil_no_capture(at_start, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(captures.ctypes, "CDLL", lambda name: driver)
    OrderedDevice()
    driver.modes.clear()
    worker, done = Background("torchTensorRef-a worker"), threading.Event()
    worker.submit(done.set)
    assert done.wait(10)
    assert ask_aside(lambda: 3) == 3
    assert driver.modes == {"torchTensorRef-a worker": 2, "torchTensorRef-ask": 2}


def test_the_thread_that_follows_others_spoils_none(at_start):
    from torchTensorRef.memory.external_pressure import OthersWatch

    begun = []
    at_start["cuda"] = lambda: begun.append(None)
    watch = OthersWatch()
    watch._is_over.set()
    in_thread(watch._serve)
    assert len(begun) == 1


def test_a_thread_of_the_programs_is_left_as_it_is(at_start, monkeypatch):
    """Where no thread can be started the caller asks itself."""
    begun = []
    at_start["cuda"] = lambda: begun.append(None)

    def fails(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert ask_aside(lambda: 3) == 3
    assert not begun


@pytest.mark.parametrize("kind", ["hip", "cuda", "xpu", "cpu"])
def test_a_driver_without_such_modes_is_not_asked(at_start, monkeypatch, kind):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    captures.relax_threads(kind)
    assert not at_start


def test_on_a_stream_of_ours_no_other_device_is_looked_at():
    """It would take that one's lock under this one's, and another thread the other way round."""
    one, other = OrderedDevice(), OrderedDevice(index=1)
    stream = OrderedStream("ours")
    with one.vendor.on(stream):
        note_streams()
    assert stream not in other._compute._seen
