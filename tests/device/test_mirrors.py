"""Page-locked copies of mapped memory never outlive what they are copies of."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchTensorRef
from torchTensorRef.devices.accelerator import staging
from torchTensorRef.devices.host.mirrors import Mirror
from torchTensorRef.devices.host.page_lock import WORTH_IT_AFTER
from torchTensorRef.devices.host.readers import host_readers
from torchTensorRef.devices.storages import bytes_of
from torchTensorRef.interception import slow_path

from ..support.device_double import LateDevice, LateModule
from .test_promises import settle

N = 1 << 20


def mapped(buffer: bytearray) -> torch.Tensor:
    """Memory that torch did not allocate, as of a mapped file."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def fetched(device: Any, source: torch.Tensor) -> torch.Tensor:
    base = device.allocate(source.numel())
    device.copy_in(bytes_of(source), base, after=device.available(base)).synchronize()
    device.synchronize()
    return base


def recurs(device: Any, source: torch.Tensor) -> None:
    """Copy it so often that room for a mirror is made."""
    for _ in range(WORTH_IT_AFTER):
        fetched(device, source)
        device.wish_page_locked(source, may_mirror=True)
    settle(device)


class Gate:
    """Stops the thread that fills a mirror, halfway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        copy = staging.HostCopier.copy

        def stopped(copier: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
            copy(copier, source, destination)
            self.reached.set()
            assert self.opened.wait(20)

        monkeypatch.setattr(staging.HostCopier, "copy", stopped)


@pytest.fixture
def late() -> Iterator[LateDevice]:
    with torchTensorRef.disabled():
        yield LateDevice(LateModule(seed=3))


def test_a_mirror_dies_with_its_block_also_while_it_is_filled(late, monkeypatch):
    buffer = bytearray(N)
    weight = mapped(buffer)
    weight.fill_(1)
    recurs(late, weight)
    gate = Gate(monkeypatch)
    replica = late.allocate(N)
    event = late.copy_in(bytes_of(weight), replica)
    assert gate.reached.wait(20)
    del weight  # the program lets go of the model
    gc.collect()
    gate.opened.set()
    event.synchronize()
    following = mapped(buffer)  # the next one is mapped where it was
    following.fill_(2)
    assert fetched(late, following).unique().tolist() == [2]


def test_a_mirror_that_is_being_filled_ends_with_a_write(late, monkeypatch):
    weight = mapped(bytearray(N))
    weight.fill_(1)
    recurs(late, weight)
    gate = Gate(monkeypatch)
    replica = late.allocate(N)
    event = late.copy_in(bytes_of(weight), replica)
    assert gate.reached.wait(20)
    writer = threading.Thread(target=host_readers.about_to_change, args=(weight,))
    writer.start()
    gate.opened.set()
    writer.join(20)
    event.synchronize()
    weight.fill_(2)
    assert fetched(late, weight).unique().tolist() == [2]


def test_room_for_a_mirror_is_for_one_base_and_not_for_an_address(late):
    buffer = bytearray(N)
    weight = mapped(buffer)
    weight.fill_(1)
    recurs(late, weight)
    following = mapped(buffer)  # at the same place, as after an exchange of memory
    fetched(late, following)
    del weight
    gc.collect()
    following.fill_(3)
    host_readers.about_to_change(following)
    assert fetched(late, following).unique().tolist() == [3]


def mapped_ref(manager: Any) -> Any:
    """A weight in mapped memory that nobody outside holds."""
    return manager.adopt(mapped(bytearray(4 * N)).view(torch.float32), sole=True)


def used(manager: Any, device: Any, x: Any, count: int = 1) -> list[float]:
    for _ in range(count):
        manager.bring_all_home()
        total = x + 1
        settle(device)
    return manager.release(total).unique().tolist()


def test_what_is_prefetched_while_the_host_writes_leaves_no_mirror(
    manage, device, scale, monkeypatch
):
    manager = manage("lru", scale.nbytes(64 * N))
    x = mapped_ref(manager)
    used(manager, device, x, WORTH_IT_AFTER)  # room for a mirror is made
    run_kernel = slow_path.run_kernel
    copier = manager.residency.copier

    def prefetching(staged: Any) -> Any:
        is_ours = x._ttr_block in staged.operands.written and staged.device.is_host
        if is_ours:
            copier.fetch(x._ttr_block, device, ahead=True)
            copier.arrivals.wait_for(x._ttr_block.replicas[device])
            device.synchronize()
        return run_kernel(staged)

    monkeypatch.setattr(slow_path, "run_kernel", prefetching)
    manager.bring_all_home()
    x.random_(3, 4)  # on the host: random, and without a label
    monkeypatch.undo()
    for _ in range(3):
        assert used(manager, device, x) == [4.0]


def test_what_an_array_is_over_gets_no_mirror(manage, device, scale):
    manager = manage("lru", scale.nbytes(64 * N))
    x = mapped_ref(manager)
    used(manager, device, x, WORTH_IT_AFTER)  # room for a mirror is made
    array = x.numpy()
    for turn in range(4):
        array[:] = turn
        assert used(manager, device, x) == [turn + 1.0]
    del array
    for _ in range(4):
        assert used(manager, device, x) == [4.0]


# -- at home in page-locked memory ----------------------------------------------------------------


def own_ref(manager: Any, value: float = 0.0) -> Any:
    return manager.adopt(torch.full((N + 100,), value), sole=True)


def is_at_home_in_locked_pages(device: Any, x: Any) -> bool:
    home = x._ttr_block.replicas[host_of(x)]
    return bool(device.page_locks.is_locked(bytes_of(home.base)))


def host_of(x: Any) -> Any:
    return next(device for device in x._ttr_block.replicas if device.is_host)


def test_what_recurs_moves_to_page_locked_memory_and_leaves_the_heap(manage, device, scale):
    manager = manage("lru", scale.nbytes(64 * N))
    x, y = own_ref(manager, 3.0), own_ref(manager, 4.0)
    view = x[7:]
    old = weakref.ref(x._ttr_block.replicas[host_of(x)].base)
    for _ in range(5):
        manager.bring_all_home()
        assert manager.release(x + y).unique().tolist() == [7.0]
        settle(device)
    assert is_at_home_in_locked_pages(device, x)
    gc.collect()
    assert old() is None, "the heap has its memory back"
    assert not host_readers.mirrors.of(bytes_of(x._ttr_block.replicas[host_of(x)].base))
    view.add_(1)  # views, and what is written through them, go with it
    manager.bring_all_home()
    assert x[:9].tolist() == [3.0] * 7 + [4.0] * 2
    x.random_(5, 6)
    assert manager.release(view * 1).unique().tolist() == [5.0]
    x.resize_(2 * N)
    assert x[: N + 100].unique().tolist() == [5.0]
    manager.check()


def test_what_an_array_is_over_stays_where_it_is(manage, device, scale):
    manager = manage("lru", scale.nbytes(64 * N))
    x, y = own_ref(manager, 3.0), own_ref(manager, 4.0)
    for _ in range(WORTH_IT_AFTER):
        manager.bring_all_home()
        x + y
        settle(device)
    array = x.numpy()
    for turn in range(4):
        array[:] = turn
        manager.bring_all_home()
        assert manager.release(x + y).unique().tolist() == [4.0 + turn]
        settle(device)
    assert not is_at_home_in_locked_pages(device, x)
    x.fill_(9)
    manager.bring_all_home()
    assert array[0] == 9


def test_what_was_handed_out_once_stays_where_it_is(manage, device, scale):
    """The next storage object could get the address of the one that was given up: two as one."""
    manager = manage("lru", scale.nbytes(64 * N))
    x, y = own_ref(manager, 3.0), own_ref(manager, 4.0)
    seen = weakref.ref(x.untyped_storage())
    for _ in range(5):
        manager.bring_all_home()
        assert manager.release(x + y).unique().tolist() == [7.0]
        settle(device)
    assert is_at_home_in_locked_pages(device, y)
    assert not is_at_home_in_locked_pages(device, x)
    assert x.untyped_storage() is seen()


def test_a_storage_at_home_in_locked_pages_can_be_shared(manage, device, scale):
    manager = manage("lru", scale.nbytes(64 * N))
    x, y = own_ref(manager, 3.0), own_ref(manager, 4.0)
    for _ in range(5):
        manager.bring_all_home()
        x + y
        settle(device)
    assert is_at_home_in_locked_pages(device, x)
    x.share_memory_()
    x.add_(1)
    assert manager.release(x + y).unique().tolist() == [8.0]
    assert x.is_shared()


def test_weights_of_neighbours_in_a_heap_are_copied_whole(manage, device, scale):
    """The double refuses a copy of memory that is locked in part, as a card does."""
    manager = manage("lru", scale.nbytes(4 * N))
    heap = torch.zeros(30 * N)
    del heap
    weights = [manager.adopt(torch.full((N // 4 + 300,), float(n)), sole=True) for n in range(16)]
    for turn in range(6):
        for n, w in enumerate(weights):
            assert manager.release(w[:5] * 1).unique().tolist() == [n]
            if turn % 3 == 2 and n % 2:
                w.mul_(1.0)
        settle(device)


@pytest.fixture
def plain() -> Iterator[None]:
    """Tensors stay plain."""
    with torchTensorRef.disabled():
        yield


@pytest.mark.usefixtures("plain")
def test_a_write_ends_the_mirrors_of_all_parts():
    """A part that was moved alone had one, and the write was of the block around it."""
    whole = torch.zeros(4 * N, dtype=torch.uint8)
    part = torch.empty(0, dtype=torch.uint8)
    part.set_(whole.untyped_storage()[N : 2 * N], 0, (N,), (1,))  # type: ignore[call-overload]
    host_readers.mirrors.offer(part, Mirror(part, torch.zeros(N, dtype=torch.uint8)))
    host_readers.about_to_change(whole[2 * N :].clone())
    assert host_readers.mirrors
    host_readers.about_to_change(whole)
    assert not host_readers.mirrors


@pytest.mark.usefixtures("plain")
def test_who_writes_a_mirror_waits_for_the_copy_that_goes_out_of_it():
    """A block can be at home there as soon as it is full."""
    device = LateDevice(LateModule(seed=3, refuses=True))
    device.double.random.random = lambda: 1.0  # the link does nothing by itself
    source, memory = torch.full((N,), 3, dtype=torch.uint8), torch.zeros(N, dtype=torch.uint8)
    mirror = Mirror(source, memory)
    host_readers.mirrors.offer(source, mirror)
    base = device.allocate(N)
    for _ in range(2):  # the first copy fills it, the second goes out of it
        event = device.copy_in(source, base)
        event.wait()
        assert mirror.is_filled
        again = LateDevice.copy_in(device, source, base)
        assert not again.is_done()
        host_readers.about_to_change(memory)
        assert again.is_done()
    assert base.unique().tolist() == [3]
