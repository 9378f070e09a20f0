"""Finalizers that compute: the collector may run them anywhere, also under a lock of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchTensorRef.devices.sim.events import SimEvent
from torchTensorRef.memory.recency import Recency
from torchTensorRef.strategy import Strategy


class Collected(Strategy):
    """While it thinks, the collector runs a finalizer that computes."""

    name = "collected"
    watches_accesses = True

    def __init__(self) -> None:
        self.finalize: Callable[[], Any] | None = None
        self.asked: list[str] = []
        self.within: list[str] = []

    def _think(self, question: str) -> None:
        self.asked.append(question)
        if self.finalize is not None:
            finalize, self.finalize = self.finalize, None
            count = len(self.asked)
            finalize()
            self.within += self.asked[count:]
            self.finalize = finalize

    def place(self, op):
        self._think("place")
        return super().place(op)

    def on_access(self, access):
        self._think("on_access")

    def on_birth(self, block_id, nbytes, place):
        self._think("on_birth")
        return super().on_birth(block_id, nbytes, place)

    def victims(self, device, candidates, need_nbytes):
        self._think("victims")
        return []

    def after_operator(self, device, used):
        self._think("after_operator")
        return []

    def prefetch(self, device, resident):
        self._think("prefetch")
        return []


@pytest.fixture
def short(manage):
    """A manager with room for a few of these tensors, and its strategy."""
    strategy = Collected()
    manager = manage(strategy, nbytes=2_000)
    tensors = [manager.adopt(torch.full((100,), float(n))) for n in range(12)]
    for x in tensors:
        _ = x + 1
    assert {"place", "on_access", "victims", "after_operator"} <= set(strategy.asked)
    return manager, strategy, tensors


def test_a_strategy_is_not_asked_while_it_thinks(short):
    _, strategy, tensors = short
    own, found = torch.ones(100), []
    strategy.finalize = lambda: found.append((tensors[0] + own)[0].item())
    for n, x in enumerate(tensors):
        assert (x + 1)[0].item() == n + 1
    assert len(found) > 12
    assert set(found) == {1.0}
    assert not strategy.within
    strategy.finalize = None


def test_a_strategy_is_not_asked_under_the_lock_of_the_books(short):
    manager, strategy, tensors = short
    residency, thinks, is_over = manager.residency, threading.Event(), threading.Event()

    def think() -> None:
        with residency.feed.lock:  # and would want the other one next
            thinks.set()
            is_over.wait(10)

    other = threading.Thread(target=think)
    strategy.asked.clear()
    with residency.books.lock:
        other.start()
        assert thinks.wait(10)
        found = [(x + 1)[0].item() for x in tensors]
        assert not is_over.is_set()
        assert other.is_alive(), "the strategy's lock was waited for"
        is_over.set()
    other.join()
    assert found == [n + 1.0 for n in range(12)]
    assert not strategy.asked


def test_no_lock_is_taken_in_two_orders(short):
    """Under that of a ledger or a simulated device a finalizer may want that of the books."""
    manager = short[0]
    books = manager.residency.books
    device, ledger = books.main, books.ledgers[books.main]
    for lock, use in ((ledger._lock, lambda: ledger.oldest(1)), (device._lock, device.clocks)):
        is_inside, is_waiting = threading.Event(), threading.Event()

        def other_uses(use: Any = use, is_inside: Any = is_inside, is_waiting: Any = is_waiting):
            is_inside.wait(10)
            with books.lock:
                is_waiting.set()
                use()

        other = threading.Thread(target=other_uses)
        other.start()
        with lock:
            is_inside.set()
            is_waiting.wait(0.2)
            is_taken = books.lock.acquire(timeout=5)
            if is_taken:
                books.lock.release()
        other.join()
        assert is_taken, "two threads wait for each other"


def test_what_was_evicted_while_the_oldest_are_looked_for_is_passed_over(short, monkeypatch):
    books = short[0].residency.books
    ledger, oldest = books.ledgers[books.main], Recency.oldest
    before = [replica.number for replica in ledger.oldest(100)]
    assert len(before) > 2
    removed = []

    def oldest_and_collected(recency):
        for number in oldest(recency):
            if not removed:  # it is out of the ledger only: its bytes are counted again below
                removed.append((number, ledger._replicas.pop(number)))
            yield number

    with monkeypatch.context() as patch:
        patch.setattr(Recency, "oldest", oldest_and_collected)
        found = [replica.number for replica in ledger.oldest(100)]
    ledger._replicas.update(removed)
    assert found == before[1:]


def test_what_has_arrived_meanwhile_does_not_arrive_again(short, monkeypatch):
    manager, _, tensors = short
    copier, synchronize, counts = manager.residency.copier, SimEvent.synchronize, [0, 0]

    def synchronize_and_be_finalized(event):
        synchronize(event)
        if not counts[0] and manager.residency.books.lock._is_owned():
            counts[0] += 1
            copier.note_arrivals()
            counts[0] -= 1
            counts[1] += 1

    monkeypatch.setattr(SimEvent, "synchronize", synchronize_and_be_finalized)
    for _ in range(5):
        for x in tensors:
            x.add_(1)
    assert counts[1]
    assert [x[0].item() for x in tensors] == [n + 5.0 for n in range(12)]
