"""The rule for what strategies answer, told with integers: used, exchanged, or the end."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from torchTensorRef import ConfigError, StrategyError
from torchTensorRef.base.listeners import listeners
from torchTensorRef.strategies import AVAILABLE
from torchTensorRef.strategy import (
    PERSISTENT_AFTER,
    Access,
    BlockSnapshot,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
    choice,
)
from torchTensorRef.strategy.answers import CheckedStrategy
from torchTensorRef.strategy.choice import make_strategy, validate

DEVICE = DeviceSnapshot("sim:0", 100, 100, 0, 0, 0, 0, 1e10, 1e10)
BLOCKS = [BlockSnapshot(n, 10, n, False, True) for n in range(1, 6)]
ASKED: dict[str, tuple[Any, ...]] = {
    "place": (OpSnapshot("aten::add", 10, 0, 0, "sim:0"), ("cpu", "sim:0")),
    "victims": (DEVICE, BLOCKS, 20),
    "after_operator": (DEVICE, BLOCKS),
    "write_back": (DEVICE, BLOCKS, 5),
    "prefetch": (DEVICE, BLOCKS, 5),
    "on_birth": (1, 10, 0, "sim:0"),
}
TOLD: dict[str, tuple[Any, ...]] = {
    "on_access": (Access(1, 10, 0, True, False, True),),
    "on_death": (1,),
    "on_prefetch": (1, 10),
}
BUILT_IN = {"place": "sim:0", "on_birth": PERSISTENT_AFTER}
BEFORE = ("place", "victims", "on_access", "on_birth")


def nbytes_of(block_id: int) -> int:
    return 10 if 1 <= block_id <= 5 else 0


def answering(method: str, answer: Callable[[], Any]) -> CheckedStrategy:
    """A strategy that gives one answer in one method."""

    class Answering(Strategy):
        name = "answering"

        def victims(self, device, candidates, need_nbytes):
            return ()

    strategy = Answering()
    setattr(strategy, method, lambda *_: answer())
    return CheckedStrategy(strategy)


def asked(checked: CheckedStrategy, method: str, *, may_fail: bool = True) -> Any:
    arguments = {**ASKED, **TOLD}[method]
    if method == "victims":
        answer = checked.victims(*arguments, 10, nbytes_of, may_fail=may_fail)
    else:
        answer = getattr(checked, method)(*arguments)
    listeners.deliver()  # as when an operator has ended
    return answer


class Hostile:
    """Raises whatever it is asked."""

    def __iter__(self):
        raise OSError("no iterator")

    def __index__(self):
        raise OSError("no number")

    def __repr__(self):
        raise OSError("no text")


def generator(*items: Any, error: Exception | None = None) -> Any:
    yield from items
    if error is not None:
        raise error


USED = [
    ("place", "cpu", "cpu"),
    ("place", "sim:0", "sim:0"),
    ("victims", [2, 1, 3], [2, 1]),
    ("victims", [2, 2, 2, 4], [2, 4]),
    ("victims", generator(3, 4, error=ValueError("not reached")), [3, 4]),
    ("victims", itertools.count(), [0, 1, 2]),
    ("victims", [99, -1, 10**18, 5], [99, -1, 10**18, 5]),
    ("victims", (), []),
    ("victims", np.array([5, 4, 3]), [5, 4]),
    ("after_operator", {3: "a", 1: "b"}, [3, 1]),
    ("write_back", range(3), [0, 1, 2]),
    ("prefetch", [Prefetch(9), Prefetch(8, [1, 2])], [Prefetch(9), Prefetch(8, (1, 2))]),  # type: ignore[arg-type]
    ("on_birth", 0, 0),
    ("on_birth", True, 1),
    ("on_birth", np.int32(7), 7),
]


@pytest.mark.parametrize(("method", "answer", "expected"), USED)
def test_what_can_be_used_is_used(method, answer, expected):
    found = asked(answering(method, lambda: answer), method)
    assert found == expected
    if isinstance(found, list):
        assert all(type(item) in (int, Prefetch) for item in found)


def never_ending() -> Any:
    return itertools.repeat(10**18)


WRONG: list[tuple[str, Callable[[], Any]]] = [
    *((method, lambda: None) for method in ASKED),
    *((method, lambda: 1.5) for method in ASKED),
    *((method, object) for method in ASKED),
    *((method, lambda: [None]) for method in ASKED),
    *((method, lambda: [[1]]) for method in ASKED),
    *((method, lambda: "gpu:7") for method in ASKED),
    *((method, lambda: [0.5, 2.0]) for method in ASKED),
    *((method, never_ending) for method in ("victims", "after_operator", "write_back")),
    ("place", lambda: 1),
    ("prefetch", lambda: [1, 2]),
    ("prefetch", lambda: [Prefetch("one")]),  # type: ignore[arg-type]
    ("prefetch", lambda: [Prefetch(1, None)]),  # type: ignore[arg-type]
    ("prefetch", lambda: itertools.repeat(Prefetch(1))),
    ("prefetch", lambda: [Prefetch(1, never_ending())]),
    ("on_birth", lambda: np.float32(1)),
]


@pytest.mark.parametrize(("method", "answer"), WRONG)
def test_what_cannot_be_used_gives_the_built_in_answer_and_one_warning(method, answer):
    checked = answering(method, answer)
    shown = rf"'answering' answered .* to `{method}`.*has to answer "
    with pytest.warns(RuntimeWarning, match=shown) as said:
        assert asked(checked, method) == BUILT_IN.get(method, [])
    assert len(said) == 1
    assert said[0].filename == __file__
    assert asked(checked, method) == BUILT_IN.get(method, [])  # a second warning were an error


def test_an_unknown_device_is_answered_with_the_nearest():
    with pytest.warns(RuntimeWarning, match=r"'sim:1' to `place` \(Did you mean 'sim:0'\? Known:"):
        asked(answering("place", lambda: "sim:1"), "place")


def raising() -> Any:
    raise ZeroDivisionError("a bug of the strategy's")


RAISES: list[Callable[[], Any]] = [
    raising,
    lambda: generator(1, error=ZeroDivisionError("late")),
    Hostile,
    lambda: [Hostile()],
]


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (method, answer)
        for method in (*ASKED, *TOLD)
        for answer in (RAISES if method in ("victims", "after_operator") else [raising])
    ],
)
def test_what_raises_ends_the_operator_or_is_said_once(method, answer):
    checked = answering(method, answer)
    if method in BEFORE:
        for _ in range(2):
            with pytest.raises(StrategyError, match=rf"'answering' .* in `{method}`") as ended:
                asked(checked, method)
            assert ended.value.method == method
            assert ended.value.where == __file__
            assert isinstance(ended.value.__cause__, ZeroDivisionError | OSError)
    if method not in ("place", "on_access", "on_birth"):
        with pytest.warns(RuntimeWarning, match=rf"'answering' raised .* in `{method}`") as said:
            asked(checked, method, may_fail=False)
        assert len(said) == 1
        assert f"{__file__}:" in str(said[0].message)
        assert asked(checked, method, may_fail=False) in ([], None)


def test_what_interrupts_the_program_is_no_answer():
    def interrupted() -> Any:
        raise KeyboardInterrupt

    for method in (*ASKED, *TOLD):
        with pytest.raises(KeyboardInterrupt):
            asked(answering(method, interrupted), method, may_fail=False)


def test_each_method_is_warned_of_once():
    checked = answering("victims", lambda: None)
    checked.strategy.after_operator = lambda *_: 5  # type: ignore[assignment, method-assign]
    for method in ("victims", "after_operator"):
        with pytest.warns(RuntimeWarning, match=f"`{method}`"):
            asked(checked, method)
    for method in ("victims", "after_operator"):
        asked(checked, method)  # a warning were an error


def test_a_generator_that_is_not_read_to_its_end_is_closed():
    closed = []

    def naming() -> Any:
        try:
            yield from (1, 2, 3, 4)
        finally:
            closed.append(True)

    assert asked(answering("victims", naming), "victims") == [1, 2]
    assert closed


# -- when it is chosen ---------------------------------------------------------------------------


def kind_with(**own: Any) -> type[Strategy]:
    return type("Own", (Strategy,), {"name": "own", "victims": lambda_victims, **own})


def lambda_victims(self, device, candidates, need_nbytes):
    return ()


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("on_acces", "on_access"),
        ("onAccess", "on_access"),
        ("afterOperator", "after_operator"),
        ("writeback", "write_back"),
        ("prefetches", "prefetch"),
        ("on_deaths", "on_death"),
        ("watch_accesses", "watches_accesses"),
        ("allow_compiled", "allows_compiled"),
    ],
)
def test_a_name_that_nearly_is_one_of_the_contract_is_warned_of(slip, meant):
    text = rf"'own' has `{slip}`, which nobody asks for. Did you mean `{meant}`\?"
    with pytest.warns(RuntimeWarning, match=text):
        make_strategy(kind_with(**{slip: lambda self: None}))


@pytest.mark.parametrize("name", ["_on_acces", "history", "forecast", "on_return", "places_of"])
def test_a_name_of_its_own_is_its_own_business(name):
    make_strategy(kind_with(**{name: lambda self: None}))


def test_a_helper_beside_the_method_it_is_named_like_is_no_slip():
    make_strategy(kind_with(victims_of=lambda self: None))


@pytest.mark.parametrize("name", AVAILABLE)
def test_ours_are_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(make_strategy(name))


def needs_arguments(self, seed):
    """Nobody gives it one."""


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"place": None}, r"`place = None`"),
        ({"on_prefetch": lambda self: None}, r"`on_prefetch\('self',\)`; it is called with"),
        ({"__init__": needs_arguments}, r"cannot be made: Own\(\) raised TypeError"),
        ({"name": 7}, "has no name"),
        ({"name": ""}, "has no name: give its class an attribute `name`"),
        ({"name": "lru"}, "has the name of a built-in one: call it other than genoa, lru, flow"),
        ({"name": "Flow"}, "has the name of a built-in one"),
    ],
)
def test_what_cannot_keep_the_contract_is_refused(own, says):
    with pytest.raises(StrategyError, match=says):
        make_strategy(kind_with(**own))


def test_what_is_derived_from_a_built_in_one_may_keep_its_name():
    kind = type("Own", (type(make_strategy("lru")),), {})
    assert make_strategy(kind).name == "lru"


def test_a_package_whose_strategy_cannot_be_loaded_is_named(monkeypatch):
    broken = metadata.EntryPoint("theirs", "no_such_package.strategies:Theirs", "any")
    monkeypatch.setattr(choice.metadata, "entry_points", lambda group: [broken])
    with pytest.raises(ConfigError, match="'theirs' cannot be loaded from 'no_such_package"):
        make_strategy("theirs")


def test_a_slip_in_the_one_that_is_needed_is_named_where_it_is_refused():
    kind = type("Own", (Strategy,), {"name": "own", "victim": lambda_victims})
    with pytest.raises(StrategyError, match="Was `victim` meant to be it"):
        make_strategy(kind)


def test_one_that_is_offered_under_a_name_with_capitals_is_found(monkeypatch):
    point = choice.metadata.EntryPoint(
        "MyOwn", "torchTensorRef.strategies.lru:LeastRecentlyUsed", choice.ENTRY_POINTS
    )
    monkeypatch.setattr(choice.metadata, "entry_points", lambda group: [point])
    for name in ("MyOwn", "myown", " MYOWN "):
        assert type(choice.make_strategy(name)).__name__ == "LeastRecentlyUsed"
