"""What is learned of operators' times: from whom, how often, and what one measurement changes."""

from __future__ import annotations

import pytest

from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory.op_times import OpCost, OpKey, OpTimes


class Accelerator:
    """Measures what it is told to, and knows it when it is told to."""

    name = "late:0"
    is_host = False
    has_virtual_clock = True

    def __init__(self):
        self.watches = []

    def now_ns(self):
        return 0

    def stopwatch(self):
        watch = Watch()
        self.watches.append(watch)
        return watch


class Watch:
    known_ns = None

    def stop(self):
        """Nobody waits."""

    def took_ns(self):
        return self.known_ns


COST = OpCost(0, 1000, "float32")


def test_what_has_not_ended_is_looked_at_later():
    times, device = OpTimes(), Accelerator()
    key = OpKey.of(7, COST, device)
    times.begin(7, None, device, device).end(7, COST)
    assert times.expected_ns(key, 1000) is None
    device.watches[0].known_ns = 5000
    times.begin(7, COST, device, device)
    assert times.expected_ns(key, 1000) == pytest.approx(5000, abs=1)
    assert times.expected_ns(key, 500) == pytest.approx(2500, abs=1)


def test_what_is_known_is_measured_ever_more_rarely():
    times, device = OpTimes(), Accelerator()
    for _ in range(2000):
        timing = times.begin(7, COST, device, device)
        if timing is not None:
            device.watches[-1].known_ns = 100
            timing.end(7, COST)
    assert 2000 // 64 <= len(device.watches) < 60


def test_what_was_measured_for_long_is_asked_for_its_turn_as_fast():
    """A number of as many bits as there were measurements was made: here an OverflowError."""
    times, device = OpTimes(), Accelerator()
    key = OpKey.of(7, COST, device)
    times.note(key, 1000, 100)
    times._learned[key].count = 1 << 62
    for _ in range(64):
        times.begin(7, COST, device, device)
    assert len(device.watches) == 1


def test_one_measurement_moves_little():
    times, device = OpTimes(), Accelerator()
    key = OpKey.of(7, COST, device)
    times.note(key, 1000, 1000)
    times.note(key, 1000, 1_000_000)
    assert 1000 < times.expected_ns(key, 1000) < 1400


def test_dtypes_and_amounts_of_work_are_told_apart():
    device = Accelerator()
    one_row, many_rows = OpCost(1000, 1000, "float32"), OpCost(64_000, 1000, "float32")
    half = OpCost(1000, 1000, "float16")
    assert len({OpKey.of(7, cost, device) for cost in (one_row, many_rows, half)}) == 3


def test_a_simulated_device_knows_at_once():
    times, device = OpTimes(), SimDevice(DeviceSpec("one", 1000, launch_ns=50, dispatch_ns=0))
    timing = times.begin(7, None, device, device)
    device.charge(0, 0, "float32")
    timing.end(7, COST)
    assert times.expected_ns(OpKey.of(7, COST, device), 1000) == pytest.approx(50, abs=1)


def test_the_host_is_refused_by_kind_and_dtype():
    times = OpTimes()
    times.refuse(7, "float16")
    assert times.is_refused(7, "float16")
    assert not times.is_refused(7, "float32")
