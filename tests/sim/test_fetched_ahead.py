"""What was fetched ahead of need, and is not used after all."""

from __future__ import annotations

from typing import Any

import torch

from torchTensorRef import tensorsManager
from torchTensorRef.memory.resident import Candidates
from torchTensorRef.memory.states import CLEAN, FILLING, INVALID
from torchTensorRef.memory.transfer import ATTEMPTS
from torchTensorRef.strategy import Prefetch

from ..support.over_host import adapters

ROOM = 1 << 16


def test_nobody_passes_what_is_being_filled_to_find_what_can_go(manage: Any) -> None:
    manager = manage("lru", ROOM)
    residency, books = manager.residency, manager.residency.books
    ahead = [manager.adopt(torch.rand(64)).toGPU().toCPU() for _ in range(20)]
    residency.evictor.evict_all()
    used = manager.adopt(torch.rand(64)).toGPU()
    _ = used + 1
    for ref in ahead:
        books.known[ref._ttr_block.block_id] = ref._ttr_block
        assert residency.prefetcher.prefetch(books.main, [Prefetch(ref._ttr_block.block_id, ())])
    replicas = [ref._ttr_block.replicas[books.main] for ref in ahead]
    assert all(replica.state is FILLING for replica in replicas)
    ledger = books.ledgers[books.main]
    assert not set(replicas) & set(ledger.oldest(100))
    assert set(replicas) < set(ledger.replicas())
    with books.lock:
        residency.copier.arrive(replicas[3])
    assert ledger.oldest(1) == [replicas[3]]  # used before the others
    assert residency.evictor.evict(replicas[3], "a test") == replicas[3].nbytes
    manager.check()


def test_what_is_being_filled_can_go_where_nothing_else_can(manage: Any) -> None:
    manager = manage("lru", ROOM)
    residency, books = manager.residency, manager.residency.books
    ref = manager.adopt(torch.rand(ROOM // 8)).toGPU().toCPU()
    residency.evictor.evict_all()
    books.known[ref._ttr_block.block_id] = ref._ttr_block
    assert residency.prefetcher.prefetch(books.main, [Prefetch(ref._ttr_block.block_id, ())])
    replica = ref._ttr_block.replicas[books.main]
    assert replica.state is FILLING
    assert ref._ttr_block.block_id not in [
        block.block_id for block in Candidates(books, residency.holds, books.main)
    ]
    plain = torch.rand(ROOM * 3 // 16)
    assert torch.equal(manager.adopt(plain.clone(), sole=True).toGPU().toCPU(), plain)
    assert replica.state is not FILLING
    assert replica.state is not CLEAN  # it is gone
    manager.check()


def at_home(manager: Any, count: int) -> list[Any]:
    """Tensors that have been on the accelerator, and are at home."""
    plain = [torch.full((64,), float(at)) for at in range(count)]
    refs = [manager.adopt(tensor, sole=True).toGPU().toCPU() for tensor in plain]
    manager.residency.evictor.evict_all()
    know(manager, refs)
    return refs


def know(manager: Any, refs: list[Any]) -> None:
    """Let blocks be named, as if the strategy had been told of them."""
    for ref in refs:
        manager.residency.books.known[ref._ttr_block.block_id] = ref._ttr_block


def test_one_that_cannot_be_copied_ends_it_and_those_before_it_come(manage: Any) -> None:
    manager = manage("lru", ROOM)
    residency, books = manager.residency, manager.residency.books
    refs = at_home(manager, 5)
    device = books.main
    for number in range(3, 3 + ATTEMPTS):  # the third, each time that it is tried
        device.fail_next("copy", number)
    wishes = [Prefetch(ref._ttr_block.block_id, ()) for ref in refs]
    coming = residency.prefetcher.prefetch(device, wishes)
    assert coming == [ref._ttr_block for ref in refs[:2]]
    states = [ref._ttr_block.replicas[device].state for ref in refs]
    assert states == [FILLING, FILLING, INVALID, INVALID, INVALID]
    assert not residency.holds.issuing
    manager.check()
    assert [float((ref + 1)[3]) for ref in refs] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_small_ones_are_issued_together_on_a_real_accelerator(monkeypatch: Any) -> None:
    (device,) = adapters(1, 1 << 26)
    manager = tensorsManager
    manager.device, manager.strategy, manager.budget = device, "lru", 4096
    refs = at_home(manager, 4)
    resident = [manager.adopt(torch.rand(256), sole=True).toGPU() for _ in range(3)]
    know(manager, resident)
    counts: list[int] = []
    copy_in_all = device.copy_in_all

    def counted(copies: Any) -> Any:
        counts.append(len(copies))
        return copy_in_all(copies)

    monkeypatch.setattr(device, "copy_in_all", counted)
    victims = tuple(ref._ttr_block.block_id for ref in resident)
    wishes = [Prefetch(ref._ttr_block.block_id, victims[at:]) for at, ref in enumerate(refs)]
    coming = manager.residency.prefetcher.prefetch(device, wishes)
    assert coming == [ref._ttr_block for ref in refs]
    assert counts == [4]
    monkeypatch.setattr(device, "decision_nbytes", 400)
    manager.residency.evictor.evict_all()
    manager.residency.prefetcher.prefetch(device, wishes)
    assert counts == [4, 2, 2]
    assert [float((ref + 1)[3]) for ref in refs] == [1.0, 2.0, 3.0, 4.0]
    manager.check()
