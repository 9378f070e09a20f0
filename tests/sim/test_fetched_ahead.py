"""What was fetched ahead of need, and is not used after all."""

from __future__ import annotations

from typing import Any

import torch

from torchTensorRef.memory.copies import UNUSED_AFTER
from torchTensorRef.memory.resident import Candidates
from torchTensorRef.memory.states import CLEAN, FILLING

ROOM = 1 << 16


def test_it_can_go_once_it_has_arrived(manage: Any) -> None:
    manager = manage("lru", ROOM)
    residency, books = manager.residency, manager.residency.books
    ref = manager.adopt(torch.rand(1024)).toGPU()
    residency.evictor.evict_all()
    number = ref._ttr_block.block_id
    books.known[number] = ref._ttr_block
    assert residency.prefetcher.prefetch(books.main, number, ())
    replica = ref._ttr_block.replicas[books.main]

    def may_go() -> bool:
        with books.lock:
            residency.feed.device_snapshot(books.main)
            residency.copier.note_arrivals()
        candidates = Candidates(books, residency.holds, books.main)
        return number in [block.block_id for block in candidates]

    replica.arrival.synchronize()  # the copy ends
    assert not may_go()  # it is kept for its use
    assert replica.state is FILLING
    books.tick += UNUSED_AFTER + 1
    held = (replica.pins, ref._ttr_block.users, residency.holds.announced_blocks())
    assert may_go(), f"{replica.state}, held by {held}, {vars(residency.copier.in_flight)}"
    assert replica.state is CLEAN
    residency.evictor.evict_all()
    assert manager.stats()["resident_nbytes"] == 0


def test_a_program_that_leaves_its_flow_again_and_again_is_not_slowed_down_by_it(
    manage: Any,
) -> None:
    """Blocks that Flow fetches in vain do not fill the budget: they are given back like others."""
    manager = manage("flow", ROOM)
    blocks = [manager.adopt(torch.rand(512)).toGPU().toCPU() for _ in range(96)]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(80):
            chosen = torch.randperm(96, generator=draw)[:24].tolist()
            for index in (*range(8), *sorted(chosen)):
                _ = blocks[index].sum()
    books = manager.residency.books
    with books.lock:
        manager.residency.copier.note_arrivals()
        left = [r for r in books.ledgers[books.main].replicas() if r.state is FILLING]
    assert len(left) <= 32
