"""The order by last use, against sorting."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from torchTensorRef.memory.recency import Recency


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_sorting(seed):
    rng = random.Random(seed)
    uses: dict[int, int] = {}
    nbytes: dict[int, int] = {}
    order = Recency(uses.get)
    for tick in range(3_000):
        what = rng.random()
        if what < 0.2 or not uses:
            uses[tick], nbytes[tick] = tick, rng.choice([1, 8, 64])
            order.add(tick, tick, nbytes[tick])
        elif what < 0.75:
            uses[rng.choice(list(uses))] = tick  # nobody is told
        elif what < 0.8:
            number = rng.choice(list(uses))
            order.remove(number)
            del uses[number]
        elif what < 0.85:
            del uses[rng.choice(list(uses))]  # gone, and nobody is told
        elif what < 0.9:
            number = rng.choice(list(uses))  # gone and there again
            order.remove(number)
            order.add(number, uses[number], nbytes[number])
        else:
            expected = sorted(uses, key=lambda n: (uses[n], -nbytes[n], n))
            count = rng.choice([1, 5, len(uses)])
            assert list(islice(order.oldest(), count)) == expected[:count]


def test_to_find_the_oldest_takes_a_few_steps_where_all_are_used_in_turn():
    looks = 0
    uses = dict.fromkeys(range(2_000), 0)

    def last_use_of(number: int) -> int | None:
        nonlocal looks
        looks += 1
        return uses.get(number)

    order = Recency(last_use_of)
    for number in uses:
        order.add(number, 0, 1)
    tick = 0
    for number in [*uses, *uses]:
        tick += 1
        uses[number] = tick
        next(order.oldest())
    assert looks < 5 * tick


def test_there_is_no_oldest_of_none():
    order = Recency({}.get)
    assert list(order.oldest()) == []
    order.add(1, 0, 1)
    order.remove(1)
    order.remove(1)
    assert list(order.oldest()) == []
