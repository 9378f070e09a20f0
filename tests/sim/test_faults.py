"""Whatever fails, and whenever: results are right, nothing leaks, and the next step is right.

Each test lets the n-th of something fail, for n = 1, 2, ... until a run meets no fault; in a usual
run for one n in three, and each case for others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.memory.transfer import ATTEMPTS
from torchTensorRef.operators.plan import OpPlan

from ..support.programs import Adversary, InTurn, RandomEviction, Scatter, assert_same, unchanged
from ..support.sweeps import WHOLE, by_pairs, in_turn, one_in

#: Everything fits; little more than one operator does; less than the largest operator needs. Then
#: the same for two accelerators: they share the program, or its operators are scattered.
CASES = [
    ("lru", 1 << 20, 1),
    ("lru", 1_200, 1),
    ("genoa", 1_200, 1),
    ("flow", 1_200, 1),
    ("flow", 500, 1),
    ("scatter", 1 << 20, 2),
    ("in turn", 1_200, 2),
    ("scatter", 500, 2),
    ("scatter", 1_200, 2),
]
MADE: dict[str, Callable[[], Any]] = {
    "in turn": InTurn,
    "random": lambda: RandomEviction(1),
    "adversary": lambda: Adversary(1),
    "scatter": lambda: Scatter(1),
}


def made(strategy: str) -> Any:
    return MADE.get(strategy, lambda: strategy)()


def numbers(turn: int) -> Iterator[int]:
    """Which one is to fail, without end: each in turn, or one in three, beginning as told."""
    return itertools.count(1) if WHOLE else itertools.count(1 + turn % 3, 3)


def accelerators(manager: Any) -> tuple[Any, ...]:
    return tuple(manager.residency.books.accelerators)


class Step:
    """A training step, forward, backward and optimizer, of a model with state of every kind."""

    def __init__(self, bring: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = bring(nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)))
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        self.x, self.y = bring(torch.rand(7, 6)), bring(torch.rand(7, 8))

    def run(self) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> Any:
        moments = [self.optimizer.state[p] for p in self.model.parameters()]
        return [
            [p.detach() for p in self.model.parameters()],
            [p.grad for p in self.model.parameters()],
            list(self.model.buffers()),
            [[m[name] for name in sorted(m)] for m in moments],
        ]


def plain_states(count: int) -> list[Any]:
    """What plain torch has after each step."""
    step = Step(unchanged)
    states = []
    for _ in range(count):
        loss = step.run()
        clones = [[t.clone() for t in flat(part)] for part in step.state()]
        states.append([loss, clones])
    return states


def flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from flat(value)


def state_of(step: Step, loss: Any) -> Any:
    return [loss, [list(flat(part)) for part in step.state()]]


def assert_nothing_leaks(manager: Any) -> None:
    """No pins, no copies in flight, and the allocator agrees with the ledger and with itself."""
    residency = manager.residency
    manager.check()
    assert not residency.holds.pins_by_thread
    assert not residency.holds.announced
    for device in accelerators(manager):
        ledger = residency.books.ledgers[device]
        assert not [r for r in ledger.replicas() if r.pins]
        assert device.resident_nbytes == device.recount_nbytes() == ledger.resident_nbytes
        assert ledger.resident_nbytes == sum(r.nbytes for r in ledger.replicas())


@pytest.fixture
def plain(manage):
    """What plain torch has after one step, and after two."""
    return plain_states(2)


@pytest.mark.parametrize(
    ("strategy", "nbytes", "count", "kind"),
    [(*case, kind) for case, kind in in_turn(CASES, ["alloc", "copy", "late"], each=1)],
)
def test_the_nth_allocation_or_copy_fails(manage, plain, kind, strategy, nbytes, count):
    for number in numbers(CASES.index((strategy, nbytes, count))):
        manager = manage(made(strategy), nbytes=nbytes, count=count)
        device = accelerators(manager)[-1]
        step = Step(manager.adopt)
        device.fail_next(kind, number)
        first = state_of(step, step.run())
        fired = faults_left(device, kind) == 0
        assert_same(plain[0], first)
        del first
        assert_nothing_leaks(manager)
        assert_same(plain[1], state_of(step, step.run()))
        assert_nothing_leaks(manager)
        if not fired:
            break
    assert number > 5


def faults_left(device: Any, kind: str) -> int:
    return len(device._faults._numbers[kind])


@pytest.mark.parametrize(
    ("strategy", "nbytes", "count"),
    one_in(2, [*CASES, ("random", 1_200, 1), ("adversary", 1_200, 1)]),
)
def test_a_link_that_stays_broken_for_a_while(manage, plain, strategy, nbytes, count):
    """The n-th copy and all further attempts at it fail: the host must help, or patience."""
    number = 0
    while True:
        number += 3
        manager = manage(made(strategy), nbytes=nbytes, count=count)
        device = accelerators(manager)[-1]
        step = Step(manager.adopt)
        for attempt in range(ATTEMPTS):
            device.fail_next("copy", number + attempt)
        first = state_of(step, step.run())
        left = faults_left(device, "copy")
        device._faults._numbers["copy"].clear()  # the comparison is no part of the program
        assert_same(plain[0], first)
        del first
        assert_nothing_leaks(manager)
        assert_same(plain[1], state_of(step, step.run()))
        if left:
            break


class KernelFailedError(Exception):
    """No RuntimeError: a view that torch refuses on the ready path is asked for again."""


class Bomb:
    """Raises on the n-th call of any operator's kernel: before it, or after it has written."""

    def __init__(self, monkeypatch: Any, error: BaseException, *, after: bool) -> None:
        self.error, self.after = error, after
        self.countdown = 0
        for slot in ("op", "binding"):
            monkeypatch.setattr(OpPlan, slot, _BombedOp(getattr(OpPlan, slot), self))

    def explode(self) -> bool:
        self.countdown -= 1
        return self.countdown == 0


class _BombedOp:
    """Stands for the slot `op` of a plan: what it gives counts its calls."""

    def __init__(self, slot: Any, bomb: Bomb) -> None:
        self.slot, self.bomb = slot, bomb

    def __set__(self, plan: Any, op: Any) -> None:
        self.slot.__set__(plan, op)

    def __get__(self, plan: Any, kind: Any = None) -> Any:
        op, bomb = self.slot.__get__(plan, kind), self.bomb
        if bomb.countdown <= 0:
            return op

        def call(*args: Any, **kwargs: Any) -> Any:
            explodes = bomb.explode()
            if explodes and not bomb.after:
                raise bomb.error
            result = op(*args, **kwargs)
            if explodes:
                raise bomb.error
            return result

        return _Callable(op, call)


class _Callable:
    """The operator in all but its call."""

    def __init__(self, op: Any, call: Any) -> None:
        self._op, self._call = op, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __hash__(self) -> int:
        return hash(self._op)

    def __eq__(self, other: object) -> bool:
        return other is self._op


RAISED_IN = [
    ("lru", 1 << 20, 1),
    ("genoa", 1_200, 1),
    ("in turn", 1_200, 2),
    ("scatter", 1 << 20, 2),
]
RAISED = {"kernel": KernelFailedError("kernel"), "ctrl-c": KeyboardInterrupt()}


@pytest.mark.parametrize(
    ("strategy", "nbytes", "count", "name", "when"),
    [(*case, *others) for case, *others in by_pairs(RAISED_IN, RAISED, ["before", "after"])],
)
def test_the_nth_operator_raises(manage, plain, monkeypatch, strategy, nbytes, count, name, when):
    error, after = RAISED[name], when == "after"
    manager = manage(made(strategy), nbytes=nbytes, count=count)
    bomb = Bomb(monkeypatch, error, after=after)
    for number in numbers(CASES.index((strategy, nbytes, count)) + after):
        step = Step(manager.adopt)
        bomb.countdown = number
        try:
            step.run()
        except type(error):
            error.__traceback__ = error.__context__ = None
        else:
            break
        finally:
            fired, bomb.countdown = bomb.countdown <= 0, 0
        assert fired
        assert_nothing_leaks(manager)
        # What a half-run step leaves is what plain torch would have: start from a known state.
        step = Step(manager.adopt)
        assert_same(plain[0], state_of(step, step.run()))
    assert number > 20
