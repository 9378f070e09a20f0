"""Promised random numbers: to everybody else a generator stands where it would without promises."""

import contextlib
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchTensorRef
from torchTensorRef import disabled, promising
from torchTensorRef.inject import hooks
from torchTensorRef.operators.plan import ReadyWay, plan_of
from torchTensorRef.promises.draws import Draws
from torchTensorRef.promises.recording import promise_like

from ..support.differential import differences
from ..support.promised import asked_on_both

dropout = torch.nn.functional.dropout


@pytest.fixture(autouse=True)
def injected(manage):
    with hooks.is_disabled.entered(False):
        yield


def then_for_real(scope):
    with scope():
        promised = torch.randn(3)
        weight = torch.nn.Linear(3, 2).weight.detach()
    return promised, weight, torch.randn(3), torch.randperm(5), dropout(torch.ones(8))


def then_in_place(scope):
    with scope():
        promised = dropout(torch.ones(8))
    return promised, torch.empty(3).normal_(), torch.nn.init.xavier_uniform_(torch.empty(2, 2))


def beside_a_fork(scope):
    with scope():
        before = torch.randn(3)
        with torch.random.fork_rng(devices=[]):
            inside = torch.randn(3)
        return before, inside, torch.randn(3)


def by_a_state(scope):
    with scope():
        before, state = torch.randn(3), torch.get_rng_state()
        after = torch.randn(3)
        torch.set_rng_state(state)
        return before, after, torch.randn(3)


def with_the_seed_of_before(scope):
    with scope():
        numbers = [torch.randn(3)]
        torch.manual_seed(3)
        numbers.append(torch.randn(3))
        torch.seed()
        torch.manual_seed(3)
        return *numbers, torch.rand(3)


def in_checkpoints(scope):
    with scope():
        x = torch.ones(4, 4, requires_grad=True)
        y = checkpoint(lambda x: dropout(x * 2), x, use_reentrant=False)
        z = checkpoint(dropout, y, use_reentrant=True)
        z.sum().backward()
    return y.detach(), z.detach(), x.grad, torch.rand(2)


def by_generators_of_their_own(scope):
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    with scope():
        first, second = torch.randn(3, generator=one), torch.randn(3, generator=one)
        of_other = torch.empty(3).normal_(generator=other)
        one.manual_seed(1)
        again = torch.randn(3, generator=one)
        copied = torch.Generator()
        copied.set_state(one.get_state())
    return second, again, first, of_other, torch.rand(2, generator=copied), torch.rand(2)


def by_operators_that_are_given_a_generator(scope):
    """They are given another object for it than the program has."""
    mine, x = torch.Generator().manual_seed(1), torch.ones(3)
    with scope():
        x.normal_(generator=mine)
        other = torch.rand(2, generator=torch.default_generator)
        y = torch.ones(3).uniform_(generator=torch.default_generator)
        z = dropout(torch.ones(8))
    return torch.rand(2, generator=mine), torch.rand(2), x, other, y, z


def by_dropout_of_its_own(scope):
    """Without an answer it trains; where it does not, what comes of it has memory of its own."""
    results = []
    with scope():
        for train in (None, True, False):
            x = torch.arange(8.0) + 1
            kept, mask = torch.native_dropout(x, 0.5, train)
            kept.add_(1)
            results += [x, kept, mask, *torch.native_dropout(torch.ones(0, 2) + 1, 0.5, train)]
    return *results, torch.rand(2)


def where_nothing_is_ours(scope):
    with scope():
        promised = torch.randn(3)
    with disabled():
        return promised, torch.randn(3)


PROGRAMS = (
    then_for_real,
    then_in_place,
    beside_a_fork,
    by_a_state,
    with_the_seed_of_before,
    in_checkpoints,
    by_generators_of_their_own,
    by_operators_that_are_given_a_generator,
    by_dropout_of_its_own,
    where_nothing_is_ours,
)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_numbers_are_those_of_the_program_at_once(program, order):
    with disabled():
        torch.manual_seed(3)
        plain = program(contextlib.nullcontext)
    torch.manual_seed(3)
    ours = program(promising)
    for one in ours[::order]:
        if isinstance(one, torchTensorRef.TensorRef):
            one.fulfil()
    assert differences(plain, ours) == []


def test_what_a_forecast_draws_is_never_drawn():
    torch.manual_seed(3)
    torchTensorRef.forecast(lambda: dropout(torch.ones(10**13)), device="rtx4060")  # 40 TB
    ours = dropout(torch.ones(8)), torch.randn(3)
    with disabled():
        torch.manual_seed(3)
        plain = dropout(torch.ones(8)), torch.randn(3)
    assert differences(plain, ours) == []


def test_what_never_has_values_is_left():
    """A promise made by hand: no state is refused because of it."""
    with promising():
        dropout(promise_like(torch.ones(4)))
    assert torch.get_rng_state().numel()


def draws_held() -> int:
    return sum(type(x) is Draws for x in gc.get_objects())


def test_nothing_is_kept_of_a_generator_for_which_nothing_waits():
    before = draws_held()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        with promising():
            x = torch.rand(3, generator=generator)
            y = torch.empty(3).normal_(generator=generator)
        y.fulfil()
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(x.fulfil(), expected)
    assert draws_held() <= before + 1, "the last one's promises are there"


def test_what_is_promised_after_all_was_drawn_goes_on_from_there():
    def program() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        found = []
        for _ in range(3):
            found.append(torch.rand(3, generator=generator))
            if isinstance(found[-1], torchTensorRef.TensorRef):
                found[-1].fulfil()
        return [*found, torch.rand(2, generator=generator)]

    plain, ours = asked_on_both(program)
    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found.fulfil())


MINE = torch.Generator()


def shuffled() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(4, 3))
    for (x,) in torch.utils.data.DataLoader(data, shuffle=True):
        x + 1


FORETOLD = {
    "asked for": lambda: torch.rand(3).sum().item() + torch.rand(2),
    "shuffled": shuffled,
    "set": lambda: (torch.manual_seed(1), torch.rand(3) + 1),
    "set, its own": lambda: (MINE.manual_seed(1), torch.ones(3) + 1),
    "drawn, its own": lambda: torch.rand(3, generator=MINE).sum().item(),
    "forked": lambda: torch.random.fork_rng(devices=[]).__enter__(),
    "plain": lambda: torch.normal(torch.Tensor([1.0, 2.0]), 1.0) + 1,
}


@pytest.mark.parametrize("name", FORETOLD)
def test_a_forecast_leaves_generators_where_they_were(name):
    """What was drawn after it were other numbers than without it."""

    def program(ask):
        torch.manual_seed(5)
        MINE.manual_seed(5)
        with promising():
            waiting = torch.rand(3), torch.rand(3, generator=MINE)
        ask()
        return [*waiting, torch.rand(2), torch.rand(2, generator=MINE)]

    with disabled():
        plain = program(lambda: None)
    ours = program(lambda: torchTensorRef.forecast(FORETOLD[name]))
    for one in reversed(ours[:2]):
        one.fulfil()
    assert differences(plain, ours) == []


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_waited_and_a_forecast_has_drawn_is_drawn(is_alone):
    def program(ask):
        torch.manual_seed(5)
        with promising():
            waiting = [torch.rand(3), torch.rand(3)]
        ask(waiting[0])
        return [torch.rand(2), *waiting, torch.rand(2)]

    def ask(first):
        def foretold():
            if not is_alone:
                torch.rand(3).sum().item()
            assert first.sum().item() == first.sum().item()

        torchTensorRef.forecast(foretold)

    with disabled():
        plain = program(lambda first: None)
    ours = program(ask)
    for one in ours[1:3]:
        one.fulfil()
    assert differences(plain, ours) == []


@pytest.mark.parametrize("train", [None, True, False])
def test_dropout_without_an_answer_draws_where_the_program_draws(train):
    """On an accelerator that has numbers of its own: no path may take it for what draws none."""
    plan = plan_of(torch.ops.aten.native_dropout.default)
    assert plan.ready_way == ReadyWay.NONE
    assert plan.draws_random((torch.ones(8), 0.5, train), {}) == (train is not False)
