"""The adapter of real accelerators, driven without one: a module made of lists."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchTensorRef.base.errors import TransferError
from torchTensorRef.devices import registry
from torchTensorRef.devices.accelerator import vendor
from torchTensorRef.devices.accelerator.copies import LinkCopier
from torchTensorRef.devices.accelerator.device import AcceleratorDevice
from torchTensorRef.devices.accelerator.events import AcceleratorEvent
from torchTensorRef.devices.accelerator.vendor import can_refill
from torchTensorRef.devices.host import page_lock
from torchTensorRef.devices.storages import bytes_of, storage_nbytes
from torchTensorRef.memory.budget import resolve_budget

from ....support.device_double import ExchangingDevice, LateDevice, LateModule


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

    def max_memory_allocated(self, index):
        return 60

    def reset_peak_memory_stats(self, index):
        self.calls.append(("peak", index))

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


def test_a_stopwatch_waits_for_nothing(device, module):
    class TimedEvent(FakeEvent):
        def elapsed_time(self, other):
            return 0.25  # milliseconds

    assert device.stopwatch() is None  # its events keep no time
    module.Event = lambda enable_timing=False: TimedEvent(module.calls)
    watch = device.stopwatch()
    watch.stop()
    assert module.calls == [("record", "compute")] * 2
    assert watch.took_ns() is None
    watch._ended.fired = True
    assert watch.took_ns() == 250_000


def test_some_large_copies_say_how_fast_the_link_is(device, module, monkeypatch):
    class TimedEvent(FakeEvent):
        def elapsed_time(self, other):
            return 1.0  # milliseconds

    monkeypatch.setattr(LinkCopier, "is_page_locked", lambda copier, memory: True)
    module.Event = lambda **options: TimedEvent(module.calls)
    nbytes = 8 << 20
    source, base = torch.zeros(nbytes, dtype=torch.uint8), device.allocate(nbytes)
    before = device.clocks().h2d_bytes_per_s

    def copies(count):
        first = len(module.calls)
        for _ in range(count):
            device.copy_in(source, base)
        return sum(what == "record" for what, *_ in module.calls[first:])

    assert copies(1) == 1 + 2  # it is measured
    assert device.clocks().h2d_bytes_per_s == before  # nobody has waited for it
    device._copier.rate_in._waiting[1]._ended.fired = True
    assert copies(15) == 15
    assert device.clocks().h2d_bytes_per_s == nbytes / 1e-3
    assert device.clocks().d2h_bytes_per_s == before
    assert copies(1) == 1 + 2


def test_its_clock_is_the_hosts_without_what_was_waited_for(device):
    first = device.clocks().host_ns
    device._copier.stall_ns += 10**12
    assert device.clocks().host_ns < first
    assert device.clocks().compute_ns == 0


def test_a_copy_in_runs_aside_and_after(device, module):
    base = device.allocate(4)
    arrival = device.copy_in(torch.ones(4, dtype=torch.uint8), base, after=device.available(base))
    assert module.calls == [
        ("record", "compute"),
        ("wait", "side 3"),
        ("on", "side 3"),
        ("record", "side 3"),
    ]
    arrival.wait()
    assert module.calls[-1] == ("wait", "compute")
    assert base.tolist() == [1] * 4


def test_what_is_fetched_is_allocated_on_the_copy_stream(device, module):
    base = device.allocate(0)
    device.empty(base)
    device.refill(base, 4096)
    assert module.calls == [("on", "side 1")]
    assert base.untyped_storage().nbytes() == 4096


def test_a_copy_out_waits_for_compute_by_itself(device, module):
    base, home = device.allocate(4), torch.zeros(4, dtype=torch.uint8)
    base.fill_(9)
    device.copy_out(base, home).synchronize()
    assert module.calls[:2] == [("record", "compute"), ("wait", "side 2")]
    assert home.tolist() == [9] * 4


@pytest.mark.parametrize("nbytes", [3, 200_000])
def test_a_part_is_copied_out_alone(device, nbytes):
    base, home = device.allocate(300_000), torch.zeros(nbytes, dtype=torch.uint8)
    base.copy_(torch.arange(300_000).to(torch.uint8))
    staged = device.staged_nbytes
    device.copy_out(base, home, start=1001).synchronize()
    assert torch.equal(home, base[1001 : 1001 + nbytes].cpu())
    assert device.staged_nbytes - staged in (0, nbytes)
    with pytest.raises(TransferError, match="1 bytes to give"):
        device.copy_out(base, home, start=299_999)


def test_room_of_kernels_waits_for_the_copies_home(device, module):
    base = device.allocate(4)
    event = device.copy_out(base, torch.zeros(4, dtype=torch.uint8))
    device.empty(base)
    assert module.calls[-1] == ("wait", "compute")
    event.synchronize()
    kernels = device.allocate(4)
    module.calls.clear()
    device.empty(kernels)
    assert module.calls == []


def fetched(device, nbytes=4096):
    base = device.allocate(0)
    device.empty(base)
    device.refill(base, nbytes)
    return base


def same_room(device, base, monkeypatch):
    """Empty a base and fetch another one into its room, as the card's allocator would."""
    start = base.untyped_storage().data_ptr()
    device.empty(base)
    take = device._rooms.freed.take
    monkeypatch.setattr(device._rooms.freed, "take", lambda _, nbytes: take(start, nbytes))
    other = fetched(device)
    monkeypatch.undo()
    return other


def test_room_that_nobody_is_known_to_have_left_waits_for_all_of_compute(device, module):
    base = fetched(device)
    module.calls.clear()
    assert len(device.available(base).events) == 1
    assert module.calls == [("record", "compute")]


def test_a_copy_waits_for_the_last_reader_of_its_room_and_not_for_later_operators(
    device, module, monkeypatch
):
    base = fetched(device)
    device.note_uses([base])  # an operator has read it
    device.record()
    later = device._rooms.marks.now()  # the first event after that
    device._rooms.marks.now()  # and much more work
    other = same_room(device, base, monkeypatch)
    module.calls.clear()
    assert device.available(other).events == (later,)
    assert module.calls == []
    later.fired = True
    assert device.available(other) is None


def test_a_use_nobody_noted_counts_as_the_last_of_all(device, module, monkeypatch):
    base = fetched(device)
    device.note_uses([base])
    device.forget_uses([base])  # the ready path is open
    device._rooms.marks.now()
    module.calls.clear()
    other = same_room(device, base, monkeypatch)
    assert module.calls[0] == ("record", "compute")  # at the time it was given up
    assert len(device.available(other).events) == 1


def test_room_under_way_home_is_free_for_copies_that_wait(device, module, monkeypatch):
    monkeypatch.setattr(device._copier, "is_page_locked", lambda _: True)  # so it is issued at once
    base = fetched(device)
    device.note_uses([base])
    home = device.copy_out(base, torch.zeros(4096, dtype=torch.uint8))
    (leaves,) = home.events
    module.calls.clear()
    monkeypatch.undo()
    other = same_room(device, base, monkeypatch)
    assert ("wait", "compute") not in module.calls  # compute goes on
    assert leaves in device.available(other).events


def test_room_of_a_replica_that_died_has_unknown_readers(device, module):
    base = fetched(device)
    device.note_uses([base])
    del base
    other = fetched(device)
    module.calls.clear()
    assert len(device.available(other).events) == 1
    assert module.calls == [("record", "compute")]


def test_ends_of_a_copy_live_until_it_has_fired(device):
    base = device.allocate(4)
    event = device.copy_in(torch.ones(4, dtype=torch.uint8), base)
    assert not event.is_done()
    assert len(device._copier._in_flight) == 1
    event.event.fired = True
    assert event.is_done()
    assert not device._copier.copies_of(base)
    assert not len(device._copier._in_flight)


def test_what_the_allocator_says_is_what_is_resident(device, module):
    device.allocate(10)
    assert (device.resident_nbytes, device.peak_nbytes) == (50, 60)
    device.reset_peak()
    assert module.calls == [("peak", 0)]


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
    device.give_up_caches()
    assert device.random_state() is None


def test_without_counters_the_replicas_are_counted():
    device = FakeAccelerator("mps", 0, module=BareModule())
    base = device.allocate(10)
    device.empty(base)
    device.refill(base, 20)
    device.empty(base)
    assert (device.resident_nbytes, device.peak_nbytes) == (0, 20)
    device.reset_peak()
    assert device.peak_nbytes == 0


def test_an_allocator_that_shares_room_between_streams_keeps_to_compute(module):
    module.get_allocator_backend = lambda: "cudaMallocAsync"
    device = FakeAccelerator("cuda", 0, module=module)
    base = fetched(device)
    assert module.calls == []
    assert len(device.available(base).events) == 1


def test_a_backend_without_an_error_of_its_own_says_out_of_memory(device, monkeypatch):
    def refuse(*_):
        raise RuntimeError("MPS backend out of memory")

    monkeypatch.setattr("torchTensorRef.devices.accelerator.device.empty_bytes", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="MPS"):
        device.allocate(5)


def test_it_works_over_torchs_own_host_module():
    device = FakeAccelerator("cpu", 0, module=torch.cpu)
    base, home = fetched(device, 100_000), torch.zeros(100_000, dtype=torch.uint8)
    device.copy_in(torch.full((100_000,), 7, dtype=torch.uint8), base).wait()
    device.copy_out(base, home, after=device.record()).synchronize()
    assert home.unique().tolist() == [7]


def test_a_device_must_be_able_to_empty_storages():
    assert can_refill(torch.device("cpu"))
    assert can_refill(torch.device("meta"))


@pytest.fixture
def mps(monkeypatch):
    """A machine whose accelerator is of a kind that cannot."""
    refused = torch.device("mps")
    module = BareModule()
    module.is_available = lambda: True
    module.device_count = lambda: 1
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: refused
    )
    return module


@pytest.mark.parametrize("can", [True, False])
def test_one_that_cannot_empty_storages_exchanges_them(mps, monkeypatch, can):
    monkeypatch.setattr(vendor, "can_refill", lambda device: can)
    device = AcceleratorDevice("mps")
    assert device.capacity_nbytes == 500
    assert device.exchanges_storages == (not can)
    assert registry.default_name() == "mps"


def test_a_storage_that_was_exchanged_is_gone_and_the_base_is_the_same():
    device = ExchangingDevice(LateModule())
    for inference in (False, True):
        with torch.inference_mode(inference):
            base = torch.ones(3, 5)
        device.empty(base)
        assert (storage_nbytes(base), device.held_nbytes()) == (0, 0)
        device.refill(base, 60)
        device.copy_in(torch.full((60,), 7, dtype=torch.uint8), base).synchronize()
        assert bytes_of(base).unique().tolist() == [7]


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_memory_that_a_program_has_locked_in_part_is_staged(monkeypatch, part):
    device = LateDevice(LateModule())
    runtime = device.double.runtime
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: runtime.is_locked(memory))
    memory = page_lock.own_pages(1 << 20)
    source = torch.frombuffer(memory, dtype=torch.uint8)
    runtime.cudaHostRegister(source.data_ptr(), int(part * source.numel()), 1)
    source.fill_(5)
    base = device.allocate(source.numel())
    event = device.copy_in(source, base)  # the double refuses a copy of what is locked in part
    assert isinstance(event, AcceleratorEvent) == (part == 1.0)
    event.synchronize()
    assert base.unique().tolist() == [5]
    home = torch.zeros_like(source)
    device.copy_out(base, source).synchronize()
    device.copy_out(base, home).synchronize()
    assert home.unique().tolist() == [5]


@pytest.mark.parametrize("release", ["6.8.0-generic", "5.15.153.1-microsoft-standard-WSL2"])
def test_where_the_driver_spills_not_all_that_is_free_is_taken(
    device, module, monkeypatch, release
):
    real = vendor.platform.uname()
    monkeypatch.setattr(vendor.platform, "uname", lambda: real._replace(release=release))
    device.limit(1000)  # 400 are free, and 70 are reserved by us
    device.limit(100)
    spills = "microsoft" in release
    assert module.calls == [("cap", 0.423 if spills else 1.0, 0), ("cap", 0.1, 0)]


def test_without_a_budget_plain_tensors_of_the_program_are_not_ours(device, module):
    module.mem_get_info = lambda index: (300, 1000)
    module.memory_allocated = lambda index: 600  # of which we count 200
    module.memory_reserved = lambda index: 600
    device.ledger = SimpleNamespace(resident_nbytes=200)
    assert resolve_budget(None, device).limit_nbytes == int((300 + 200) * 0.9)
    device.ledger = None
    assert resolve_budget(None, device).limit_nbytes == int(300 * 0.9)


def test_what_an_ended_copy_has_held_of_a_dead_tensor_is_room_again(device):
    base, other = device.allocate(8), device.allocate(0)
    storage = StorageWeakRef(base.untyped_storage())
    event = device.copy_in(torch.ones(8, dtype=torch.uint8), base)
    event.event.fired = True
    del base, event
    assert not storage.expired(), "else nothing is shown"
    device.refill(other, 8)
    assert storage.expired()


def test_no_limit_of_zero_is_set(device, module):
    """A driver refuses it (xpu), or takes it for none at all (mps)."""
    device.limit(0)
    ((_, fraction, _),) = module.calls
    assert 0 < fraction < 0.01


def test_copies_in_flight_are_not_asked_one_by_one(device, module, monkeypatch):
    asked = []
    query = FakeEvent.query
    monkeypatch.setattr(FakeEvent, "query", lambda event: asked.append(event) or query(event))
    bases = [device.allocate(8) for _ in range(200)]
    events = [device.copy_in(torch.ones(8, dtype=torch.uint8), base) for base in bases]
    assert len(asked) <= 3 * len(bases), "each copy looks at the oldest one"
    asked.clear()
    assert device._copier.copies_of(bases[150]) == [events[150]]
    assert device._copier.copies_of(device.allocate(8)) == []
    assert len(asked) <= 2
    for event in events[:100]:
        event.event.fired = True
    assert device._copier.copies_of(bases[50]) == []
    assert len(device._copier._in_flight) == 100


def test_threads_that_wait_for_copies_sleep(module):
    made = []

    def event(enable_timing=False, blocking=False):
        made.append(blocking)
        return FakeEvent(module.calls)

    module.Event = event
    device = FakeAccelerator("cuda", 0, module=module)
    base = device.allocate(4)
    device.record()
    assert made == [False], "nobody waits for it on the host"
    device.copy_in(torch.ones(4, dtype=torch.uint8), base)
    assert made[-1]
