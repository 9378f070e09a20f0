"""Several cards: every call of a helper thread goes to the right one, and the default is chosen."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from torchTensorRef.devices import registry
from torchTensorRef.devices.accelerator.driver_memory import default_index

from ....support.ordered_double import OrderedDevice, OrderedModule


class SeveralCards(OrderedModule):
    """Three of them; a fresh thread is on the first, and whoever calls there opens it."""

    def __init__(self):
        super().__init__()
        self.opened_by = {}
        self._on = threading.local()
        runtime = self.runtime
        for name in ("cudaHostRegister", "cudaHostUnregister"):
            setattr(runtime, name, self._noting(getattr(runtime, name)))

    def _noting(self, call):
        def noted(*args):
            self.touch()
            return call(*args)

        return noted

    def touch(self):
        index = getattr(self._on, "index", 0)
        self.opened_by.setdefault(index, []).append(threading.current_thread().name)

    @contextlib.contextmanager
    def device(self, index):
        was = getattr(self._on, "index", 0)
        self._on.index = index
        try:
            yield
        finally:
            self._on.index = was

    @contextlib.contextmanager
    def stream(self, stream):
        self.touch()
        with super().stream(stream):
            yield

    def empty_cache(self):
        self.touch()


@pytest.fixture
def cards():
    return SeveralCards()


def test_helper_threads_call_the_right_card(cards):
    device = OrderedDevice(cards, index=1)
    for _ in range(3):
        base = device.allocate(1 << 20)
        source = torch.zeros(1 << 20, dtype=torch.uint8)
        device.copy_in(source, base).synchronize()  # through the ring's thread
        device.copy_out(base, source).synchronize()
    piece = device.page_locks.allocate(1 << 20)
    later = threading.Event()
    device.page_locks.later(lambda: (device.page_locks.allocate(1 << 20), later.set()))
    assert later.wait(10)
    del piece
    assert device.page_locks.settle(10)
    device.give_up_caches()
    assert set(cards.opened_by) == {1}
    assert len(set(cards.opened_by[1])) > 2, "and there were threads"


@pytest.mark.parametrize("has_library", [True, False])
def test_the_roomiest_is_found(has_library):
    free = [3, 9, 9, 4]
    opened = []

    def mem_get_info(index):
        opened.append(index)
        return free[index], 10

    module = SimpleNamespace(device_count=lambda: 4, mem_get_info=mem_get_info)
    if has_library:
        module.device_memory_used = lambda index: 10 - free[index]
        module.get_device_properties = lambda index: SimpleNamespace(total_memory=10)
    assert default_index(module, 0) == 1
    assert opened == ([] if has_library else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("current", "rank", "index"), [(0, "", 1), (2, "", 2), (2, "3", 3), (0, "6", 2)]
)
def test_who_has_a_card_of_its_own_uses_that(monkeypatch, current, rank, index):
    """By `set_device`, or because a launcher has started one process for each card."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    module = SimpleNamespace(device_count=lambda: 4, mem_get_info=lambda index: (-(index != 1), 10))
    assert default_index(module, current) == index


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_driver_need_not_say_what_is_free(cards, error):
    """As xpu's of small cards does not: what the device has in all is known all the same."""
    cards.mem_get_info = mock.Mock(side_effect=error("doesn't support querying free memory"))
    cards.get_device_properties = lambda index: SimpleNamespace(total_memory=1 << 30)
    cards.device_count = lambda: 3
    device = OrderedDevice(cards, index=1)
    assert device.capacity_nbytes == 1 << 30
    base = device.allocate(1 << 20)
    assert device.free_nbytes() == (1 << 30) - base.nbytes
    assert default_index(cards, 0) == 0


@pytest.mark.parametrize(("count", "name"), [(1, "cuda"), (3, "cuda:2")])
def test_the_default_is_the_roomiest(monkeypatch, count, name):
    module = SimpleNamespace(device_count=lambda: count, mem_get_info=lambda index: (index, 10))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device("cuda"),
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert registry.default_name() == name
