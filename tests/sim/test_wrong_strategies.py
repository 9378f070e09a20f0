"""Strategies that answer anything at all: the numbers stay plain torch's, and the books whole.

Each step of the program is one operator, or changes nothing that is there before. So a step that
ends with `StrategyError` can be done again under another strategy, and the results tell whether
something had been done by halves.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from torchTensorRef import StrategyError
from torchTensorRef.strategy import BlockSnapshot, Prefetch, Strategy

from ..support.programs import assert_same

pytestmark = pytest.mark.timeout(120)

METHODS = (
    "place", "victims", "after_operator", "prefetch", "write_back",
    "on_access", "on_birth", "on_death", "on_prefetch",
)  # fmt: skip


# -- answers ---------------------------------------------------------------------------------------


class Hostile:
    """Raises whatever it is asked."""

    def __iter__(self) -> Any:
        raise OSError("no iterator")

    def __index__(self) -> int:
        raise OSError("no number")

    def __eq__(self, other: object) -> bool:
        raise OSError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise OSError("no text")


def raising(numbers: list[int]) -> Any:
    raise ZeroDivisionError("a bug of the strategy's")


def breaking_off(numbers: list[int]) -> Any:
    yield from numbers[:1]
    raise LookupError("half way")


def holding_on(numbers: list[int]) -> Any:
    """A generator that does not let itself be closed."""
    for number in [*numbers, *numbers]:
        try:
            yield number
        except GeneratorExit:
            yield -1


#: What a strategy may come up with, made of the numbers of the blocks that it was shown.
ANSWERS: list[Callable[[list[int]], Any]] = [
    lambda numbers: None,
    lambda numbers: numbers,
    lambda numbers: numbers[::-1],
    lambda numbers: iter(numbers[:2]),
    lambda numbers: set(numbers),
    lambda numbers: dict.fromkeys(numbers),
    lambda numbers: [*numbers, None],
    lambda numbers: [float(number) for number in numbers],
    lambda numbers: [str(number) for number in numbers],
    lambda numbers: [[number] for number in numbers],
    lambda numbers: [True, False, *numbers],
    lambda numbers: torch.tensor(numbers),
    lambda numbers: [Prefetch(number, tuple(numbers)) for number in numbers],
    lambda numbers: [Prefetch(number, (None,)) for number in numbers],  # type: ignore[arg-type]
    lambda numbers: [(number, ()) for number in numbers],
    lambda numbers: Prefetch(1),
    lambda numbers: itertools.repeat(numbers[0] if numbers else 0),
    lambda numbers: itertools.repeat(Prefetch(10**18)),
    lambda numbers: map(raising, [numbers]),
    lambda numbers: [Hostile()],
    lambda numbers: Hostile(),
    lambda numbers: Strategy,
    lambda numbers: range(10**18),
    breaking_off,
    holding_on,
    raising,
]

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(["cpu", "sim:test", "sim:tset"]),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=6,
)
answers = st.sampled_from(ANSWERS) | plain_values.map(lambda value: lambda numbers: value)


class Wrong(Strategy):
    """Answers from a list of its own for each method, in turn; notes what it has raised."""

    name = "wrong"
    watches_accesses = True

    def __init__(self, answers: dict[str, list[Callable[[list[int]], Any]]]) -> None:
        self._answers = {method: itertools.cycle(given) for method, given in answers.items()}
        self.asked: Counter[str] = Counter()
        self._used: dict[int, None] = {}

    def _answer(self, method: str, blocks: Any, otherwise: Any) -> Any:
        self.asked[method] += 1
        if method not in self._answers:
            return otherwise
        return next(self._answers[method])([block.block_id for block in blocks])

    def place(self, op):
        return self._answer("place", [], op.default_device)

    def victims(self, device, candidates, need_nbytes):
        return self._answer("victims", candidates, [])

    def after_operator(self, device, used):
        return self._answer("after_operator", used, ())

    def prefetch(self, device, resident):
        away = [number for number in self._used if resident.get(number) is None]
        return self._answer("prefetch", resident, [Prefetch(number) for number in away[-2:]])

    def write_back(self, device, resident):
        return self._answer("write_back", resident, ())

    def on_access(self, access):
        self._used[access.block_id] = None
        self._answer("on_access", [access], None)

    def on_birth(self, block_id, nbytes, place):
        block = BlockSnapshot(block_id, nbytes, 0, False, False)
        return self._answer("on_birth", [block], 0)

    def on_death(self, block_id):
        self._answer("on_death", [], None)

    def on_prefetch(self, block_id, nbytes):
        self._answer("on_prefetch", [], None)


# -- a program in steps ----------------------------------------------------------------------------

State = dict[str, Any]
Step = Callable[[State], Any]


def beginning(bring: Callable[[Any], Any]) -> State:
    generator = torch.Generator().manual_seed(1)
    state = {name: bring(torch.rand(12, 12, generator=generator)) for name in "abcdef"}
    state["mean"], state["var"] = bring(torch.zeros(12)), bring(torch.ones(12))
    state["w"] = bring(torch.rand(12, 12, generator=generator)).requires_grad_()
    return state


def set_to(name: str, make: Callable[[State], Any]) -> Step:
    def step(state: State) -> None:
        state[name] = make(state)

    return step


def gradient(state: State) -> Any:
    loss = (state["a"] @ state["w"]).tanh().square().mean()
    return torch.autograd.grad(loss, state["w"])[0]


def normed(state: State) -> Any:
    """Writes the running statistics, and makes results."""
    return torch.nn.functional.batch_norm(
        state["a"].detach(), state["mean"], state["var"], training=True
    )


STEPS: list[Step] = [
    set_to("g", lambda s: s["a"] @ s["b"]),
    lambda s: s["c"].add_(s["d"]),
    set_to("h", lambda s: s["g"].t()[2:9]),
    lambda s: s["h"].mul_(0.5),
    set_to("a", normed),
    set_to("grad", gradient),
    lambda s: s["w"].detach().sub_(s["grad"]),
    set_to("b", lambda s: s["e"].sort(dim=1)[0]),
    lambda s: s["h"].zero_(),
    lambda s: s.pop("h"),
    lambda s: s["f"].copy_(s["c"]),
    set_to("d", lambda s: torch.cat([s["g"], s["f"]])[3:15]),
    set_to("e", lambda s: s["e"].exp() / s["e"].exp().sum()),
]
ROUNDS = 3
NBYTES = 6 * 12 * 12 * 4


def take(steps: list[Step], state: State, ended: Callable[[int], None] | None = None) -> State:
    """Do the steps; one that ends with `StrategyError` is told to `ended` and done again."""
    for number, step in enumerate(steps):
        try:
            step(state)
        except StrategyError:
            assert ended is not None
            ended(number)
            step(state)
    return state


def assert_right(manager: Any, state: State, expected: State) -> None:
    manager.check()
    residency = manager.residency
    device = residency.books.main
    assert not residency.holds.pins_by_thread
    assert device.peak_nbytes <= manager.budget
    assert device.recount_nbytes() == device.resident_nbytes
    assert state.keys() == expected.keys()
    assert_same([*expected.values()], [state[name] for name in expected])


def warned_methods(said: list[warnings.WarningMessage]) -> Counter[str]:
    """How often each method was warned of, by all that Wrong has said."""
    texts = [str(w.message) for w in said if "The strategy 'wrong'" in str(w.message)]
    return Counter(next(m for m in METHODS if f"`{m}`" in text) for text in texts)


# -- the suite -------------------------------------------------------------------------------------


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(
    said_by=st.dictionaries(
        st.sampled_from(METHODS), st.lists(answers, min_size=1, max_size=4), min_size=1
    ),
    nbytes=st.sampled_from([NBYTES, 2 * NBYTES, 3 * NBYTES // 2]),
)
def test_whatever_a_strategy_answers_the_results_are_right(manage, said_by, nbytes):
    manager = manage(nbytes=nbytes)
    wrong = Wrong(said_by)
    ends: list[int] = []

    def ended(number: int) -> None:
        ends.append(number)
        manager.check()
        manager.strategy = "lru"

    def and_again(state: State) -> None:
        manager.strategy = wrong

    steps = [part for step in STEPS * ROUNDS for part in (and_again, step)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = take(steps, beginning(manager.adopt), ended)
        manager.strategy = "lru"
    assert_right(manager, state, take(STEPS * ROUNDS, beginning(lambda x: x)))
    assert wrong.asked["place"]
    assert set(warned_methods(said)) <= set(said_by)


@pytest.mark.parametrize("method", METHODS)
def test_each_answer_of_each_method(manage, method):
    """It ends with `StrategyError` that names the method, or is said once; if need be, neither."""
    manager = manage(nbytes=NBYTES)
    state = beginning(manager.adopt)
    asked_count = 0
    steps = itertools.cycle(STEPS)
    for answer in ANSWERS:
        manager.strategy = wrong = Wrong({method: [answer]})
        errors: list[StrategyError] = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in itertools.islice(steps, 8):
                try:
                    step(state)
                except StrategyError as error:
                    errors.append(error)
                    manager.check()
                    manager.strategy = "lru"
                    step(state)
                    manager.strategy = wrong
        assert {(e.strategy, e.method) for e in errors} <= {("wrong", method)}
        said_of = warned_methods(said)
        assert set(said_of) <= {method}
        assert said_of[method] <= len(errors) + 1  # to set a strategy again is to begin again
        if answer is raising and wrong.asked[method]:
            assert bool(errors) == (method in ("place", "victims", "on_access", "on_birth"))
            assert errors or said_of[method]
        asked_count += wrong.asked[method]
    assert asked_count > len(ANSWERS)
    done = list(itertools.islice(itertools.cycle(STEPS), 8 * len(ANSWERS)))
    assert_right(manager, state, take(done, beginning(lambda x: x)))


# -- single cases ----------------------------------------------------------------------------------


def test_victims_that_raise_do_not_undo_what_a_kernel_has_written(manage):
    """Batch norm has written its statistics when its result needs room: it cannot be refused."""
    manager = manage(nbytes=4 * 12 * 12 * 4)
    plain = beginning(lambda x: x)
    expected = [normed(plain), plain["mean"], plain["var"]]
    state = beginning(manager.adopt)
    for name in ("a", "b", "c", "mean", "var"):
        state[name].toGPU()  # there is no room left for the result, which nobody expects yet
    manager.residency.times.forget()
    manager.strategy = Wrong({"victims": [raising]})
    with pytest.warns(RuntimeWarning, match="'wrong' raised ZeroDivisionError") as said:
        found = normed(state)
    assert len(said) == 1
    assert_same(expected, [found, state["mean"], state["var"]])


def test_a_lowered_budget_holds_though_the_strategy_raises(manage):
    manager = manage(nbytes=2 * NBYTES)
    state = beginning(manager.adopt)
    for name in "abcdef":
        state[name].add_(1)
    manager.strategy = Wrong({"victims": [raising]})
    with pytest.warns(RuntimeWarning, match="'wrong' raised ZeroDivisionError"):
        manager.budget = NBYTES // 3
    assert manager.stats()["resident_nbytes"] <= manager.budget == NBYTES // 3


@pytest.mark.parametrize("method", ["victims", "after_operator", "prefetch", "write_back"])
def test_a_warning_that_is_an_error_comes_when_all_is_done(manage, method):
    manager = manage(Wrong({method: [lambda numbers: 5]}), nbytes=1 << 14)
    refs = [manager.adopt(torch.zeros(1024)) for _ in range(8)]
    said = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The strategy", RuntimeWarning)
        for ref in refs * 3:
            try:
                ref.add_(1)
            except RuntimeWarning as warning:
                said.append(str(warning))
        manager.strategy = Wrong({"victims": [lambda numbers: 5]})
        with pytest.raises(RuntimeWarning, match="`victims`"):
            manager.budget = 1 << 12
    assert manager.stats()["resident_nbytes"] <= 1 << 12
    assert len(said) == 1
    assert f"`{method}`" in said[0]
    assert [ref.tolist() for ref in refs] == [[3.0] * 1024] * 8


def test_the_books_are_right_while_a_lowered_budget_is_not_kept_yet(manage):
    """What another thread's `check()`, or `TTR_CHECK=2`, finds between two evictions."""
    manager = manage(nbytes=2 * NBYTES)
    state = beginning(manager.adopt)
    for name in "abcdef":
        state[name].add_(1)
    found = []

    def look(numbers: list[int]) -> Any:
        found.append(manager.violations())
        return numbers[:1]

    manager.strategy = Wrong({"victims": [look]})
    manager.budget = NBYTES // 3
    assert found
    assert not any(found)
    ledger = manager.residency.books.ledgers[manager.residency.books.main]
    ledger.counted_nbytes += NBYTES  # once it is kept it has to be
    try:
        assert any("budgeted" in line for line in manager.violations())
    finally:
        ledger.counted_nbytes -= NBYTES


def test_a_device_that_is_not_there_is_named_with_the_nearest(manage):
    manager = manage(nbytes=2 * NBYTES)
    manager.strategy = Wrong({"place": [lambda numbers: "sim:tset"]})
    ref = manager.adopt(torch.ones(3))
    with pytest.warns(RuntimeWarning, match=r"to `place` \(Did you mean 'sim:test'\?"):
        found = ref + 1
    assert_same(torch.ones(3) + 1, found)


def test_the_host_is_an_answer(manage):
    manager = manage(nbytes=2 * NBYTES)
    manager.strategy = Wrong({"place": [lambda numbers: "cpu"]})
    ref = manager.adopt(torch.ones(3))
    assert_same(torch.ones(3) + 1, ref + 1, on_host_because="the strategy says so")
    assert manager.stats()["host_op_count"] == 1


def test_an_interrupt_inside_a_strategy_reaches_the_program(manage):
    def interrupted(numbers: list[int]) -> Any:
        raise KeyboardInterrupt

    manager = manage(nbytes=NBYTES)
    for method in ("place", "victims", "after_operator", "write_back"):
        state = beginning(manager.adopt)
        manager.strategy = Wrong({method: [interrupted]})
        with pytest.raises(KeyboardInterrupt):
            take(STEPS, state)
        manager.check()
        manager.strategy = "lru"
