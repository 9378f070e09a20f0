"""A budget caps what torch's allocator reserves, and what is reserved is more than what is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchTensorRef.memory.external_pressure import LOOK_EVERY, ReleaseWatch

from ..support.allocator_double import CachingAllocator, CachingDevice
from ..support.sweeps import usual

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MIB = 1 << 20

#: Llama's 7 B: its layers, and the widths of their matrices.
LAYERS, WIDTH, INNER, WORDS = 32, 4096, 11008, 32000
MATRICES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
NBYTES = 2 * (LAYERS * sum(a * b for a, b in MATRICES) + 2 * WORDS * WIDTH)


@pytest.fixture
def manager() -> Any:
    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager

    with torchTensorRef.disabled():
        yield tensorsManager
    tensorsManager.check()
    tensorsManager.residency.books.ledgers.clear()  # there are no bytes to bring home
    tensorsManager.budget = None
    tensorsManager.device = "sim"


class Model:
    """Matrices of the sizes of a 7 B, and tokens that go through them."""

    def __init__(self, manager: Any) -> None:
        def weight(rows: int, columns: int) -> Any:
            empty = torch.empty((rows, columns), dtype=torch.float16)  # never touched: no pages
            return manager.adopt(empty, sole=True)

        self._manager = manager
        self.layers = [[weight(*shape) for shape in MATRICES] for _ in range(LAYERS)]
        self.head = weight(WORDS, WIDTH)
        self.norms = [manager.adopt(torch.empty(WIDTH, dtype=torch.float16)) for _ in range(65)]

    def token(self) -> None:
        x = self._manager.adopt(torch.empty((1, WIDTH), dtype=torch.float16))
        with torch.no_grad():
            for number, (q, k, v, o, gate, up, down) in enumerate(self.layers):
                y = x * self.norms[2 * number]
                y = (y @ q.T) + (y @ k.T) + (y @ v.T)
                x = x + y @ o.T
                y = x * self.norms[2 * number + 1]
                x = x + (torch.sigmoid(y @ gate.T) * (y @ up.T)) @ down.T
            x @ self.head.T


@pytest.mark.parametrize(
    ("percent", "strategy", "first_count"),
    # The slack grows with each shortage, until there is none. How many tokens LRU needs for that
    # depends on where small tensors came to lie: ten or eleven have been seen.
    usual([(25, "flow", 4)], [(25, "lru", 12), (50, "flow", 4), (75, "flow", 4)]),
)
def test_a_7b_streams_without_a_release_of_the_cache(manager, strategy, percent, first_count):
    device = CachingDevice()
    manager.device = device
    manager.budget = NBYTES * percent // 100
    manager.strategy = strategy
    manager.reset_stats()
    model = Model(manager)
    for _ in range(first_count):
        model.token()
    allocator = device.double.allocator
    released, refused = allocator.released, allocator.refused
    for _ in range(3):
        model.token()
    # In the steady state each allocation succeeds.
    assert (allocator.refused, allocator.released) == (refused, released)
    stats = manager.stats()
    assert stats["alloc_retry_count"] == allocator.released
    assert stats["fetched_nbytes"] + stats["prefetched_nbytes"] > NBYTES
    assert stats["host_fallback_count"] == 0
    assert allocator.reserved <= manager.budget
    assert allocator.peak > 0.8 * manager.budget, "and the budget is filled"


def test_the_double_splits_and_joins_as_torchs_does():
    allocator = CachingAllocator(100 * MIB)
    first = allocator.allocate(12 * MIB, "copies")
    second = allocator.allocate(13 * MIB, "copies")
    assert allocator.reserved == (12 + 14) * MIB, "segments of their own, in steps of 2 MiB"
    allocator.free(second)
    part = allocator.allocate(11 * MIB, "copies")
    rest = allocator.allocate(3 * MIB, "copies")
    assert (part, rest) == (second, second + 11 * MIB), "cut out of what was free"
    assert allocator.allocate(100, "compute") != allocator.allocate(100, "copies")
    for place in (first, part, rest):
        allocator.free(place)
    assert allocator.allocate(14 * MIB, "copies") == second, "joined again"
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(90 * MIB, "copies")
    assert (allocator.released, allocator.refused) == (1, 1)
    assert allocator.reserved == (14 + 2 + 2) * MIB, "what nobody uses went back to the driver"


def test_a_budget_leaves_slack_and_a_shortage_more(manager):
    device = CachingDevice()
    manager.device = device
    ledger = manager.residency.books.ledgers[device]
    for budget, slack in [
        (40 << 30, int((40 << 30) * 0.03)),
        (1 << 30, 64 << 20),
        (64 << 20, 8 << 20),
    ]:
        manager.budget = budget
        assert ledger_of(manager, device).scratch_nbytes == slack
        assert manager.budget == budget, "what the user has said stays"
    manager.budget = None
    assert ledger_of(manager, device).scratch_nbytes == 0, "nothing caps the allocator"
    manager.budget = 10 << 30
    ledger = ledger_of(manager, device)
    before = ledger.budget.limit_nbytes
    watch = ReleaseWatch()
    for released in (5, 6, 7, 8):
        device.double.allocator.released = released
        for _ in range(LOOK_EVERY):
            watch.note_fetch(ledger)
    assert before - ledger.budget.limit_nbytes == (10 << 30) // 256, "for two of the three"


def ledger_of(manager: Any, device: Any) -> Any:
    return manager.residency.books.ledgers[device]
