"""Who may wait for whom: no strategy is asked, and no copy waited for, while the lock is held."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torchTensorRef.strategy import Strategy


class Curious(Strategy):
    """Whenever it is asked, another thread has to be able to take the lock of the books."""

    name = "curious"
    watches_accesses = True

    def __init__(self) -> None:
        self.take_lock: Callable[[], None] = lambda: None
        self.asked: list[str] = []

    def _look(self, question: str) -> None:
        self.asked.append(question)
        other = threading.Thread(target=self.take_lock, daemon=True)
        other.start()
        other.join(10)
        if other.is_alive():
            raise AssertionError(f"{question}: the lock is held while the strategy is asked")

    def place(self, op):
        self._look("place")
        return super().place(op)

    def victims(self, device, candidates, need_nbytes):
        self._look("victims")
        return []

    def after_operator(self, device, used):
        self._look("after_operator")
        return []

    def prefetch(self, device, resident):
        self._look("prefetch")
        return []

    def write_back(self, device, resident):
        self._look("write_back")
        return []


@pytest.fixture
def curious(manage):
    """The manager, with room for a few tensors of 400 bytes."""
    strategy = Curious()
    manager = manage(strategy, nbytes=2_000)

    def take_lock() -> None:
        with manager.residency.books.lock:
            pass

    strategy.take_lock = take_lock
    return manager, strategy


def test_when_memory_is_short(curious):
    manager, strategy = curious
    tensors = [manager.adopt(torch.full((100,), float(n))) for n in range(12)]
    for _ in range(2):
        tensors = [x + 1 for x in tensors]
        tensors[0].mul_(2)
    assert [x[0].item() for x in tensors[1:]] == [n + 2.0 for n in range(1, 12)]
    manager.budget = 900
    assert torch.stack(tensors).sum().item() == 100 * (sum(range(1, 12)) + 22 + 6)
    assert {"place", "victims", "after_operator"} <= set(strategy.asked)


def test_when_the_device_refuses_a_result(curious):
    """Found by the soak: a result that the device had no room for was made room for with the lock
    held, while another thread told the strategy of an access and waited for the lock."""
    manager, strategy = curious
    device = manager.residency.books.main
    x, y = manager.adopt(torch.rand(100)), manager.adopt(torch.ones(100))
    _ = y + 1
    for number in (1, 1, 1, 2, 2, 3, 3):
        device.fail_next("alloc", number)
        expected = (torch.tensor(x.tolist()) + 1).tolist()
        x = x + y
        assert x.tolist() == expected
    assert "victims" in strategy.asked


def test_when_the_device_refuses_a_fetch(curious):
    manager, strategy = curious
    device = manager.residency.books.main
    x, y = manager.adopt(torch.rand(100)), manager.adopt(torch.ones(100))
    _ = y + 1
    for number in range(1, 5):
        device.fail_next("alloc", number)
        assert torch.equal(manager.release(x.toCPU() * 1), manager.release(x))
    assert "victims" in strategy.asked


def test_no_copy_is_waited_for_with_the_lock_held(manage, monkeypatch):
    """Other threads count results, and change blocks, while the host waits for a copy."""
    from torchTensorRef.devices.sim.events import SimEvent

    manager = manage("lru", nbytes=2_000)
    books = manager.residency.books
    wait, waits = SimEvent.synchronize, []

    def is_free() -> bool:
        taken = []

        def take() -> None:
            if books.lock.acquire(timeout=10):
                taken.append(True)
                books.lock.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()
        return bool(taken)

    def synchronize(event):
        if not event.is_done():
            waits.append(is_free())
        wait(event)

    monkeypatch.setattr(SimEvent, "synchronize", synchronize)
    tensors = [manager.adopt(torch.full((100,), float(n))) for n in range(8)]
    for _ in range(2):
        tensors = [x + 1 for x in tensors]
    tensors[0].mul_(2)
    arrays = [x.numpy() for x in tensors[:3]]
    targets = [x.toGPU().target for x in tensors[3:5]]
    twins = [x.clone() for x in tensors]
    for x in tensors:
        x.add_(1)
    assert [x[0].item() for x in tensors] == [5.0, *(n + 3.0 for n in range(1, 8))]
    assert [x[0].item() for x in twins] == [4.0, *(n + 2.0 for n in range(1, 8))]
    assert len(waits) > 3
    assert all(waits)
    del arrays, targets
