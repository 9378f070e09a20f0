"""The tree of errors: what is caught by what, what survives, what is suggested."""

import pickle

import pytest

from torchTensorRef.base import errors
from torchTensorRef.base.errors import ConfigError, InvariantError, TensorRefError, TransferError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TensorRefError)
]


class WithOwnConstructor(TensorRefError):
    """As `OutOfBudgetError` is: it makes its own sentence out of numbers."""

    def __init__(self, need_nbytes: int, limit_nbytes: int) -> None:
        self.need_nbytes = need_nbytes
        self.limit_nbytes = limit_nbytes
        super().__init__(f"{need_nbytes} bytes are needed, {limit_nbytes} are allowed.")


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_pickles_with_its_facts(kind):
    error = kind("what, how much, what next", device="sim:0", nbytes=7)
    error.add_note("seen while loading")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.__dict__) == (str(error), error.__dict__)


def test_an_error_with_another_constructor_pickles_too():
    again = pickle.loads(pickle.dumps(WithOwnConstructor(3, 2)))
    assert str(again) == "3 bytes are needed, 2 are allowed."
    assert (again.need_nbytes, again.limit_nbytes) == (3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_flat(kind):
    assert kind is TensorRefError or TensorRefError in kind.__bases__


def test_facts_have_defaults():
    assert ConfigError("x").known == ()
    assert InvariantError("x").story == ()
    assert TransferError("x", nbytes=3).nbytes == 3


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_says_cause_and_cure(kind):
    """docs/errors.md is made of it."""
    assert "Cause:" in kind.__doc__
    assert "Cure:" in kind.__doc__


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedOpError, NotImplementedError),
        (errors.TransferError, RuntimeError),
        (errors.ExposedError, RuntimeError),
    ],
)
def test_handlers_that_know_nothing_of_us_catch_them(kind, usual):
    assert issubclass(kind, usual)


@pytest.mark.parametrize(
    ("name", "close"), [("lru", "lru"), ("LRU", "lru"), ("flwo", "flow"), ("qqqqqq", None)]
)
def test_the_nearest_name_is_found(name, close):
    assert errors.nearest(name, ["genoa", "lru", "flow"]) == close


def test_what_is_known_is_told():
    known = {"lru": 1, "genoa": 2}
    assert errors.did_you_mean("genova", known) == "Did you mean 'genoa'? Known: genoa, lru."
    assert errors.did_you_mean("qqqqqq", known) == "Known: genoa, lru."
    assert errors.did_you_mean("x", ()) == "None is known."


def test_of_many_names_the_nearest_are_listed():
    known = [f"variable_{number}" for number in range(40)]
    said = errors.did_you_mean("variable_7x", known)
    assert said.startswith("Did you mean 'variable_7'? Known: ")
    assert "variable_7," in said
    assert said.endswith(", and 36 more.")


def test_a_known_name_is_listed_once():
    assert (
        errors.did_you_mean("cup", ["cpu", "sim", "cpu"]) == "Did you mean 'cpu'? Known: cpu, sim."
    )
