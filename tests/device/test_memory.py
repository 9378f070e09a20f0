"""The budget by the allocator's own counter, kernels without memory, and other programs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.interception import fallback, slow_path
from torchTensorRef.memory import external_pressure as headroom
from torchTensorRef.memory.budget import Budget

from .test_promises import (
    SMALL,
    WIDTH,
    assert_same_at_home,
    home,
    inference_of,
    layers,
    on,
    ours,
    settle,
)

MIB = 1 << 20


@pytest.mark.parametrize("strategy", ["lru", "genoa", "flow"])
def test_the_peak_is_within_the_budget_by_the_allocators_counter(manage, device, scale, strategy):
    width, budget = scale.width(WIDTH), scale.nbytes(SMALL)
    manager = manage(strategy, budget)
    model = manager.adopt(layers(width, 6))
    device.reset_peak()
    for count in (2, 2, 300, 2):
        inference_of(model, [manager.adopt(torch.rand(count, width))])
        settle(device)
    stats = manager.stats()
    assert device.peak_nbytes <= budget
    assert stats["peak_resident_nbytes"] <= budget
    assert strategy == "genoa" or device.peak_nbytes > budget * 0.7, "and it is filled"
    assert stats["host_fallback_count"] == 0


def test_one_after_the_other_a_budget_is_lowered_and_raised(manage, device, scale):
    width = scale.width(WIDTH)
    x = torch.rand(3, width)
    manager = manage("flow", scale.nbytes(30 * MIB))
    model = manager.adopt(layers(width, 6))
    expected = ours(manager, inference_of(model, [manager.adopt(x)]))
    for size in (9, 20, 6, 30):
        manager.budget = scale.nbytes(size * MIB)
        assert_same_at_home(expected, ours(manager, inference_of(model, [manager.adopt(x)])))
        assert manager.residency.books.ledgers[device].resident_nbytes <= manager.budget


class StarvedKernels:
    """Kernels that find no memory, as often as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.calls = 0
        run_kernel = slow_path.run_kernel

        def starved(staged: Any) -> Any:
            on_device = not staged.device.is_host
            self.calls += 1
            if on_device and self.left:
                self.left -= 1
                torch.rand(3, device=staged.device.torch_device)  # it had begun to draw
                raise torch.OutOfMemoryError("a kernel found no memory")
            return run_kernel(staged)

        monkeypatch.setattr(slow_path, "run_kernel", starved)


def test_a_kernel_without_memory_is_run_again_there(manage, device, scale, monkeypatch):
    width = scale.width(WIDTH)
    x = torch.rand(3, width)
    plain = home(on(device, layers(width, 4))(on(device, x)))
    manager = manage("lru", scale.nbytes(SMALL))
    model = manager.adopt(layers(width, 4))
    monkeypatch.setattr(fallback, "LEAST_NBYTES", 1)
    budget = manager.budget
    StarvedKernels(monkeypatch, 1)
    with torch.no_grad():
        result = model(manager.adopt(x))
    assert_same_at_home([plain], ours(manager, [result]))
    assert manager.stats()["host_fallback_count"] == 0
    assert manager.budget == budget, "what the user said stays"
    ledger = manager.residency.books.ledgers[device]
    assert ledger.budget.limit_nbytes < budget, "and more is left to kernels"


def test_a_kernel_that_never_finds_memory_runs_on_the_host(manage, device, monkeypatch):
    manager = manage("lru", 64 * MIB)
    StarvedKernels(monkeypatch, 1000)  # nor does a block of it
    result = manager.adopt(torch.ones(1000)) + 1
    assert manager.release(result).sum() == 2000
    assert manager.stats()["host_fallback_reasons"] == {"the device was out of memory": 1}


def test_a_second_try_draws_the_same_numbers(manage, device, monkeypatch):
    manager = manage("lru", 64 * MIB)
    # On the device although it is random, as with a label of the device.
    monkeypatch.setattr(slow_path, "place", lambda operands, *_: operands.accelerator)
    x = manager.adopt(torch.ones(4000))
    seed = lambda: (torch.manual_seed(5), device.synchronize())  # noqa: E731
    seed()
    expected = manager.release(torch.bernoulli(x * 0.5)).clone()
    starved = StarvedKernels(monkeypatch, 0)
    seed()
    half = x * 0.5
    starved.left = 1
    assert torch.equal(manager.release(torch.bernoulli(half)), expected)


def test_a_factory_that_finds_no_room_gets_what_can_be_evicted(manage, device):
    from torchTensorRef.inject import factories

    manager = manage("lru", 64 * MIB)
    x = manager.adopt(torch.ones(500_000))
    assert (x + 1)._ttr_block.readable_on(device)
    calls = []

    def factory(size: int) -> torch.Tensor:
        manager.stats()  # takes the dead off the books
        calls.append(manager.residency.books.ledgers[device].resident_nbytes)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(size, device=device.torch_device)

    assert factories._with_room(factory, (7,), {}).sum() == 0
    assert calls[0] > 0
    assert calls[1] == 0, "everything that nobody held was evicted"

    def hopeless() -> torch.Tensor:
        raise torch.OutOfMemoryError("no room, whatever is evicted")

    with pytest.raises(torch.OutOfMemoryError, match="whatever"):
        factories._with_room(hopeless, (), {})


# -- other programs -----------------------------------------------------------------------------


def test_what_others_take_is_given_up_and_taken_again(manage, device, scale, monkeypatch):
    """By the double, whose others do as they are told."""
    if not hasattr(device, "double"):
        pytest.skip("another process does it on a real accelerator: see the next test")
    monkeypatch.setattr(headroom, "PERIOD_S", 0.01)
    device.double.total_nbytes = device.capacity_nbytes = 32 * MIB
    x = torch.rand(3, WIDTH)
    manager = manage("lru", None)
    manager.budget = None
    model = manager.adopt(layers(WIDTH, 6))
    expected = ours(manager, inference_of(model, [manager.adopt(x)]))
    alone = manager.budget
    emptied_before = device.double.emptied_count
    device.double.others_nbytes = 16 * MIB
    assert until(lambda: manager.budget <= alone - 10 * MIB)
    ledger = manager.residency.books.ledgers[device]
    assert until(lambda: ledger.resident_nbytes <= ledger.budget.limit_nbytes)
    assert until(lambda: device.double.emptied_count > emptied_before), "also what was only cached"
    assert_same_at_home(expected, ours(manager, inference_of(model, [manager.adopt(x)])))
    device.double.others_nbytes = 0
    assert until(lambda: manager.budget >= alone - 3 * MIB)
    assert_same_at_home(expected, ours(manager, inference_of(model, [manager.adopt(x)])))
    manager.budget = 20 * MIB
    device.double.others_nbytes = 16 * MIB
    time.sleep(0.1)
    assert manager.budget == 20 * MIB, "what the user has said is not ours to change"


def test_a_look_that_has_begun_does_not_undo_what_the_user_says(manage, device, monkeypatch):
    """The watching thread has seen what others take; meanwhile the user sets a budget."""
    manager = manage("lru", None)
    manager.budget = None
    residency, ledger = manager.residency, manager.residency.books.ledgers[device]

    def resolve(setting: Any, of: Any) -> Any:
        manager.budget = device.capacity_nbytes // 2
        return Budget(device.capacity_nbytes // 4)

    monkeypatch.setattr(headroom, "resolve_budget", resolve)
    manager._others.look(residency, device)
    said = device.capacity_nbytes // 2
    assert ledger.budget.limit_nbytes == said - device.slack_nbytes(said)


def until(condition: Any, timeout_s: float = 20) -> bool:
    """Whether something comes true in time."""
    ends = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


OTHER_PROGRAM = """
import sys, time, torch
kind, nbytes = sys.argv[1], int(sys.argv[2])
for _ in range(2):
    taken = torch.ones(nbytes, dtype=torch.uint8, device=kind)
    getattr(torch, kind).synchronize()
    print("taken", flush=True)
    time.sleep(2)
    del taken
    getattr(torch, kind).empty_cache()
    print("freed", flush=True)
    time.sleep(1)
"""


@pytest.mark.device
def test_another_process_takes_and_frees_memory_meanwhile(accelerator, manage_real):
    """2 GB, or a tenth of a large device: neither program fails, and the results are right."""
    device = accelerator
    nbytes = max(2_000_000_000, device.capacity_nbytes // 10)
    if device.free_nbytes() < 2 * nbytes:
        pytest.skip(f"less than {2 * nbytes:,} bytes are free on {device.name}")
    manager = manage_real("flow", None)
    model = manager.adopt(layers(4096, 8))
    x = torch.rand(8, 4096)
    expected = ours(manager, inference_of(model, [manager.adopt(x)]))
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROGRAM, device.kind, str(nbytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = threading.Event()
    threading.Thread(target=lambda: (other.wait(120), done.set()), daemon=True).start()
    rounds, ends = 0, time.monotonic() + 120
    while not done.is_set() and time.monotonic() < ends:
        assert_same_at_home(expected, ours(manager, inference_of(model, [manager.adopt(x)])))
        rounds += 1
    out, err = other.communicate(timeout=10)
    assert other.returncode == 0, err
    assert out.split() == ["taken", "freed"] * 2
    assert rounds > 1
    assert manager.stats()["host_fallback_count"] == 0


def test_activations_come_and_go_between_weights(manage, device, scale):
    """Room moves between what is fetched and what kernels make, both ways, again and again."""
    width = scale.width(512)
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    plain = on(device, model)
    batches = [torch.rand(n, width) for n in (1, 1500, 1, 1500)]
    expected = [home(y) for y in inference_of(plain, [on(device, x) for x in batches])]
    del plain
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    manager = manage("flow", scale.nbytes(8 * MIB))
    managed = manager.adopt(model)
    for _ in range(3):
        assert_same_at_home(
            expected, ours(manager, inference_of(managed, [manager.adopt(x) for x in batches]))
        )
