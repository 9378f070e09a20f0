"""What was fetched ahead of need, and is not used after all."""

from __future__ import annotations

from typing import Any

import torch

from torchTensorRef import promising
from torchTensorRef.memory.resident import Candidates
from torchTensorRef.memory.states import CLEAN, FILLING
from torchTensorRef.strategy import Prefetch

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
        residency.copier.arrivals.arrive(replicas[3])
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


def test_what_becomes_a_promise_while_room_is_made_for_it_is_not_fetched(manage, monkeypatch):
    manager = manage("lru", ROOM)
    residency, books = manager.residency, manager.residency.books
    x = manager.adopt(torch.rand(64)).toGPU().toCPU()
    residency.evictor.evict_all()
    victim = manager.adopt(torch.rand(64)).toGPU()
    books.known[x._ttr_block.block_id] = x._ttr_block
    books.known[victim._ttr_block.block_id] = victim._ttr_block
    before, evict = x.tolist(), residency.evictor.evict

    def evicted_late(*args: Any) -> Any:
        """Evict when another thread, say, has promised to write what is to be fetched."""
        with promising():
            x.mul_(2)
        return evict(*args)

    monkeypatch.setattr(residency.evictor, "evict", evicted_late)
    wish = Prefetch(x._ttr_block.block_id, (victim._ttr_block.block_id,))
    assert not residency.prefetcher.prefetch(books.main, [wish])
    monkeypatch.undo()
    assert x.fulfil().tolist() == [2 * value for value in before]
