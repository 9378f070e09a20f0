"""What an operator at home overwrites as a whole is not copied home before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.devices.host.readers import host_readers
from torchTensorRef.interception import slow_path
from torchTensorRef.operators.random_numbers import RANDOM

from .test_home_guards import Reading

BUDGET = 2**20
SHAPE = (6, 7)

DRAWS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "bernoulli of each": lambda x: x.bernoulli_(torch.full(SHAPE, 0.3)),
    "cauchy": lambda x: x.cauchy_(),
    "exponential": lambda x: x.exponential_(),
    "geometric": lambda x: x.geometric_(0.3),
    "log_normal": lambda x: x.log_normal_(),
    "normal": lambda x: x.normal_(),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(9),
    "random from": lambda x: x.random_(3, 9),
    "uniform": lambda x: x.uniform_(),
}


def written_back_nbytes(manager: Any) -> int:
    nbytes: int = manager.stats()["written_back_nbytes"]
    return nbytes


def made_there(manager: Any) -> Any:
    """Return numbers that only the accelerator has."""
    made = manager.adopt(torch.ones(SHAPE)).toGPU() * 3
    assert written_back_nbytes(manager) == 0
    return made


def test_there_is_a_draw_for_each_row() -> None:
    assert len(DRAWS) == sum(row.overwrites for row in RANDOM)


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_overwritten_is_not_read(name: str) -> None:
    drawn = []
    for before in (0.0, float("nan")):
        torch.manual_seed(0)
        drawn.append(DRAWS[name](torch.full(SHAPE, before)))
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].isnan().any()


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_overwritten_is_not_copied_home(manage: Any, name: str) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    torch.manual_seed(0)
    expected = DRAWS[name](torch.ones(SHAPE))
    torch.manual_seed(0)
    DRAWS[name](made)
    assert written_back_nbytes(manager) == 0
    assert (made * 2).tolist() == (expected * 2).tolist()
    assert made._version == 1


def test_dropout_copies_nothing_home(manage: Any) -> None:
    manager = manage("flow", BUDGET)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1))
    ours, batch = manager.adopt(copy.deepcopy(plain)), torch.rand(3, 8)
    for net, x in ((plain, batch), (ours, manager.adopt(batch.clone()))):
        torch.manual_seed(0)
        for _ in range(3):
            net(x).sum().backward()
    assert written_back_nbytes(manager) == 0
    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        assert parameter.grad.tolist() == expected.grad.tolist()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[1:].uniform_(),
        lambda x: x.t()[2].uniform_(),
        lambda x: x.bernoulli_(x / 9),
        lambda x: x.mul_(0.1).bernoulli_(x),
        lambda x: x.expand(2, *SHAPE)[0].uniform_(),
    ],
    ids=["a part", "a column", "by itself", "by itself in place", "all of it through a view"],
)
def test_what_is_left_stays(manage: Any, draw: Callable[[Any], Any]) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    expected = torch.full(SHAPE, 3.0)
    for x in (expected, made):
        torch.manual_seed(0)
        draw(x)
    assert made.tolist() == expected.tolist()


def test_a_copy_that_shares_its_bytes_keeps_them(manage: Any) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    copied = made.clone()
    made.uniform_()
    assert (copied == 3).all()
    assert not (made == 3).any()


def test_an_array_sees_what_is_drawn(manage: Any) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    array = made.numpy()
    made.uniform_()
    assert array.tolist() == made.tolist()
    assert (array < 1).all()


def test_an_operator_that_refuses_loses_nothing(manage: Any) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    with pytest.raises(RuntimeError, match="bernoulli_"):
        made.bernoulli_(2.0)
    assert (made == 3).all()
    made.uniform_()
    assert (made < 1).all()


def test_an_error_halfway_loses_nothing(manage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    run = slow_path.run_kernel

    def half_run(staged: Any) -> Any:
        run(staged)
        raise KeyboardInterrupt

    monkeypatch.setattr(slow_path, "run_kernel", half_run)
    with pytest.raises(KeyboardInterrupt):
        made.uniform_()
    monkeypatch.undo()
    assert (made == 3).all()


def test_nothing_is_copied_over_what_is_being_drawn(
    manage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manage("lru", BUDGET)
    made = made_there(manager)
    run = slow_path.run_kernel

    def run_and_evict(staged: Any) -> Any:
        out = run(staged)
        manager.residency.evictor.evict_all()
        return out

    monkeypatch.setattr(slow_path, "run_kernel", run_and_evict)
    made.uniform_()
    monkeypatch.undo()
    assert written_back_nbytes(manager) == 0
    assert (made < 1).all()


def test_a_copy_that_still_reads_home_is_waited_for(manage: Any) -> None:
    manager = manage("lru", BUDGET)
    x = manager.adopt(torch.ones(SHAPE), sole=True)
    home = x._ttr_block.replicas[manager.residency.books.host]
    x.toGPU().mul_(3)
    reading = Reading(home.base)
    host_readers.note_reader(home.base, reading)
    x.uniform_()
    assert reading.was_finished
    assert written_back_nbytes(manager) == 0


def test_two_threads_that_overwrite_what_the_other_reads_do_not_wait_for_each_other(
    manage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manage("lru", BUDGET)
    one, other = made_there(manager) / 9, made_there(manager) / 9
    acquire, both, has_waited = manager.residency.acquire, threading.Barrier(2), set[int]()

    def acquire_together(*args: Any) -> Any:
        held = acquire(*args)
        if threading.get_ident() not in has_waited:
            has_waited.add(threading.get_ident())
            both.wait(timeout=60)
        return held

    monkeypatch.setattr(manager.residency, "acquire", acquire_together)
    pairs = ((one, other), (other, one))
    threads = [
        threading.Thread(target=target.bernoulli_, args=(p,), daemon=True) for target, p in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    monkeypatch.undo()
    for target in (one, other):
        assert ((target == 0) | (target == 1)).all()
