"""Experts that the data chooses: left to their age, and no reason to lose the place."""

from __future__ import annotations

import random

import pytest

from torchTensorRef.strategies.flow.history import NEVER, History
from torchTensorRef.strategies.flow.routing import TRUSTED_COUNT, Routing

DENSE, EXPERT, SECOND = 1, 2, 3
LAYERS, EXPERTS, DENSE_COUNT = 16, 64, 5
WARM_UP = 12


class Mixture:
    """Layers of some matrices of every token and of experts that are drawn.

    Parameters
    ----------
    counts : sequence of int
        How many experts may work for a token.
    dense_struct : int
        The kind of operator that uses the matrices of every token.
    """

    def __init__(self, counts=(4,), dense_struct: int = DENSE, seed: int = 0) -> None:
        self.history = History()
        self._counts, self._dense_struct = counts, dense_struct
        self._draw = random.Random(seed)

    def dense(self, layer: int) -> list[int]:
        return [layer * 1_000 + number for number in range(DENSE_COUNT)]

    def expert(self, layer: int, number: int) -> int:
        return layer * 1_000 + 100 + number

    def token(self, chosen: list[int] | None = None) -> None:
        """Use each layer; with given experts the same ones in each."""
        for layer in range(LAYERS):
            for block_id in self.dense(layer):
                self.history.access(block_id, 1, self._dense_struct)
            count = self._draw.choice(self._counts)
            drawn = chosen or sorted(self._draw.sample(range(EXPERTS), count))
            for number in drawn:
                self.history.access(self.expert(layer, number), 1, EXPERT)
            for number in drawn:
                self.history.access(self.expert(layer, 500 + number), 1, SECOND)

    def run(self, count: int) -> Mixture:
        for _ in range(count):
            self.token()
        return self


def distances(mixture: Mixture) -> list[float]:
    """Where each matrix of every token is foreseen."""
    next_use = mixture.history.next_use
    return [next_use(one) for layer in range(LAYERS) for one in mixture.dense(layer)]


@pytest.mark.parametrize("counts", [(4,), (2, 3, 6), (1, 8)])
@pytest.mark.parametrize("dense_struct", [DENSE, EXPERT])
def test_the_place_is_kept_and_only_the_experts_are_not_foreseen(counts, dense_struct):
    mixture = Mixture(counts, dense_struct).run(WARM_UP)
    history = mixture.history
    assert history._routing.kinds
    leaps = history.leap_count
    for _ in range(8):
        mixture.token()
        found = distances(mixture)
        assert found == sorted(found)
        assert found[-1] < NEVER
    assert history.leap_count == leaps
    experts = [
        mixture.expert(layer, first + number)
        for layer in range(LAYERS)
        for number in range(EXPERTS)
        for first in (0, 500)
    ]
    assert sum(history.next_use(one) < NEVER for one in experts) <= len(experts) // 100
    foreseen = {block_id for _, block_id in history.upcoming(history.period)}
    assert foreseen >= {one for layer in range(LAYERS) for one in mixture.dense(layer)}
    assert len(foreseen) <= LAYERS * DENSE_COUNT + len(experts) // 100


def test_the_same_experts_again_are_foreseen_again():
    mixture = Mixture().run(WARM_UP)
    for _ in range(TRUSTED_COUNT + 8):
        mixture.token([3, 5, 8, 13])
    assert not mixture.history._routing.kinds
    assert mixture.history.next_use(mixture.expert(2, 5)) < NEVER


def test_results_of_operators_are_passed_over_with_the_experts():
    history, draw = History(), random.Random(0)
    for number in range(80):
        for layer in range(4):
            history.access(layer, 1, DENSE)
            for chosen in draw.sample(range(64), draw.choice((2, 5))):
                history.access(100 + 64 * layer + chosen, 1, EXPERT)
            if (number + layer) % 2:
                made = 100_000 + 10 * number + layer
                history.birth(made, 1)
                history.access(made, 1, SECOND)
                history.death(made)
    assert history._routing.kinds
    assert all(history.next_use(layer) < NEVER for layer in range(4))
    assert SECOND not in history._routing.kinds


def test_two_models_of_equal_layers_are_not_taken_for_experts():
    """Each change of place is a mistake for a while, by operators of the same kinds."""
    history, draw = History(), random.Random(0)
    for _ in range(60):
        first = draw.choice((0, 1_000))
        for _ in range(draw.randrange(1, 4)):
            for number in range(48):
                history.access(first + number, 1, number % 3)
    assert not history._routing.kinds
    assert history.next_use(first) < NEVER


@pytest.mark.parametrize("count", [2, 9])
def test_layers_left_out_at_random_are_not_taken_for_experts(count):
    """The block that comes instead stands close by in the record."""
    history, draw = History(), random.Random(0)
    for _ in range(80):
        for layer in range(12):
            if draw.random() < 0.8:
                for number in range(count):
                    history.access(layer * 100 + number, 1, DENSE)
        assert not history._routing.kinds


def test_what_it_remembers_is_bounded():
    history, draw = History(capacity=1_000), random.Random(0)
    for number in range(20_000):
        size = number // 100  # of a cache that grows
        history.access(draw.randrange(200) if number % 3 else 1_000 + number, 1, size)
    routing = history._routing
    assert history.end > 10 * (history.end - history.start)
    assert len(routing._hit_count) <= 1_000
    assert len(routing._credit) <= 12
    assert len(routing.kinds) <= len(routing._credit)


def test_a_kind_that_was_wrong_once_is_soon_forgiven():
    routing = Routing()
    assert not routing.note_miss(EXPERT, 7)
    for symbol in range(40):
        routing.note_hit(EXPERT, symbol)
    assert not routing._credit


def test_a_kind_changes_once_in_each_direction():
    routing = Routing()
    assert sum(routing.note_miss(EXPERT, symbol) for symbol in range(100)) == 1
    assert routing.has(EXPERT, 5)
    assert not routing.has(DENSE, 5)
    assert sum(routing.note_hit(EXPERT, symbol) for symbol in range(100)) == 1
    assert not routing.kinds


def test_a_block_is_trusted_after_some_hits_and_until_the_next_miss():
    routing = Routing()
    for symbol in range(100):
        routing.note_miss(EXPERT, symbol)
    for count in range(TRUSTED_COUNT):
        assert routing.has(EXPERT, 5), count
        routing.note_hit(EXPERT, 5)
    assert not routing.has(EXPERT, 5)
    routing.note_miss(EXPERT, 5)
    assert routing.has(EXPERT, 5)
