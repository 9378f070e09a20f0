"""The orders that Flow keeps, event by event, against what sorting everything would say."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchTensorRef.strategies.flow.by_next_use import ByKey
from torchTensorRef.strategies.flow.eviction_order import EvictionOrder
from torchTensorRef.strategies.flow.forecaster import horizon_of
from torchTensorRef.strategies.flow.history import History
from torchTensorRef.strategies.flow.scores import UNFORESEEN, cost_per_byte
from torchTensorRef.strategies.flow.stock import Stock
from torchTensorRef.strategy import Access, BlockSnapshot

numbers = st.integers(0, 12)
keys = st.integers(-20, 20).map(float)
LIMIT = 10_000


def snapshot(block_id: int, nbytes: int, *, is_dirty: bool = False) -> BlockSnapshot:
    return BlockSnapshot(block_id, nbytes, last_use=0, is_dirty=is_dirty, is_persistent=True)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("note"), numbers, keys),
            st.tuples(st.just("forget"), numbers, keys),
            st.tuples(st.just("below"), numbers, keys),
            st.tuples(st.just("look"), numbers, keys),
        ),
        max_size=200,
    )
)
def test_by_key_is_a_sorted_dict(events):
    heap, model = ByKey(), dict[int, float]()
    for event, number, key in events:
        if event == "note":
            heap.note(number, key)
            model[number] = key
        elif event == "forget":
            heap.forget(number)
            model.pop(number, None)
        elif event == "below":
            taken = heap.take_below(key)
            assert sorted(taken) == sorted(n for n, known in model.items() if known < key)
            for one in taken:
                del model[one]
        else:  # as far as somebody looks, and all is there again afterwards
            seen = list(islice(heap.ascending(), number))
            assert seen == sorted((key, n) for n, key in model.items())[:number]
        assert len(heap) == len(model)
        assert sorted(heap.entries()) == sorted((key, n) for n, key in model.items())


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        numbers,
        st.tuples(
            st.integers(1, 400), st.sampled_from([64, 512, 4096]), st.booleans(), st.booleans()
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_victims_come_by_distance_per_cost(blocks, with_small):
    order = EvictionOrder()
    order.clear(LIMIT)
    for number, (position, nbytes, is_dirty, is_small) in blocks.items():
        order.note(number, nbytes, position, is_dirty=is_dirty, is_small=is_small)

    def look(number: int) -> BlockSnapshot:
        _, nbytes, is_dirty, _ = blocks[number]
        return snapshot(number, nbytes, is_dirty=is_dirty)

    def walk() -> list[tuple[float, int]]:
        found = order.best_first(0, 0, look, with_small=with_small, with_fresh=True)
        return [(distance, block.block_id) for distance, block in found]

    def score(number: int) -> float:
        position, nbytes, is_dirty, _ = blocks[number]
        return position / cost_per_byte(nbytes, is_dirty, LIMIT)

    seen = walk()
    wanted = {n for n, (_, _, _, is_small) in blocks.items() if with_small or not is_small}
    assert {number for _, number in seen} == wanted
    assert all(distance == blocks[number][0] for distance, number in seen)
    scores = [score(number) for _, number in seen]
    # Costs that are nearly equal count as one.
    assert all(first >= second * (1 - 1 / 256) for first, second in pairwise(scores))
    assert walk() == seen  # to look changes nothing


def test_what_turns_out_dirty_goes_later():
    order = EvictionOrder()
    order.clear(LIMIT)
    order.note(1, 512, 100, is_dirty=False, is_small=False)
    order.note(2, 512, 99, is_dirty=False, is_small=False)
    dirty = {1}

    def look(number: int) -> BlockSnapshot:
        return snapshot(number, 512, is_dirty=number in dirty)

    found = order.best_first(0, 0, look, with_small=True, with_fresh=True)
    assert [block.block_id for _, block in found] == [2, 1]


@pytest.mark.parametrize("older", [0, 10_000])
def test_how_much_has_run_in_the_process_before_changes_no_order(older):
    """Of 1 and 3 no next use is known: 3, whose age is not told in accesses, goes after 1."""
    order = EvictionOrder()
    order.clear(LIMIT)
    order.note(1, 512, UNFORESEEN - 98, is_dirty=False, is_small=False)
    order.note(2, 512, 120, is_dirty=False, is_small=False)
    order.note_fresh(3)

    def look(number: int) -> BlockSnapshot:
        return snapshot(number, 512)._replace(is_persistent=True, last_use=older + 295)

    found = order.best_first(80, older + 300, look, end=100, with_small=True, with_fresh=True)
    assert [block.block_id for _, block in found] == [1, 3, 2]


def test_a_large_one_goes_before_a_small_one_where_a_decision_is_dear():
    """What frees a byte costs less, even if it is used sooner."""
    order = EvictionOrder()
    for decision_nbytes, expected in ((0, [1, 2, 3]), (1 << 22, [2, 1, 3])):
        order.clear(1 << 24, decision_nbytes)
        for number, nbytes, position in ((1, 64, 100), (2, 4096, 50), (3, 64, 10)):
            order.note(number, nbytes, position, is_dirty=False, is_small=False)
        sizes = {1: 64, 2: 4096, 3: 64}
        found = order.best_first(
            0, 0, lambda n, sizes=sizes: snapshot(n, sizes[n]), with_small=True, with_fresh=True
        )
        assert [block.block_id for _, block in found] == expected


def test_costs_of_decisions_come_in_steps():
    """Blocks of nearly the same cost are kept together: each kind is looked at every time."""
    costs = {cost_per_byte(nbytes, False, 1 << 40, 1 << 22) for nbytes in range(1, 1 << 14)}
    assert len({round(cost, 2) for cost in costs}) < 4 * 24


@pytest.mark.parametrize("decision_nbytes", [0, 1024])
def test_what_is_copied_sooner_than_decided_about_is_not_copied_home_early(decision_nbytes):
    history, stock = flow_of(list(range(10)), 6)
    stock.set_limit(LIMIT, decision_nbytes)
    for block_id in range(10):
        stock.use(Access(block_id, 512, block_id, True, True, True))
        history.access(block_id, 512, block_id)
    there = [snapshot(n, 512, is_dirty=True) for n in range(10)]
    assert stock.is_in_order(there, is_all=True)
    early = {
        *(block.block_id for block in stock.dirty_ones(there.__getitem__, 1)),
        *(block.block_id for block in stock.oldest_dirty(there.__getitem__)),
    }
    assert bool(early) == (decision_nbytes == 0)


def test_a_small_one_that_is_not_foreseen_stays_where_a_decision_is_dear():
    for decision_nbytes, first in ((0, 99), (1024, 9)):
        history, stock = flow_of(list(range(10)), 6)
        stock.set_limit(LIMIT, decision_nbytes)
        sizes = {**dict.fromkeys(range(10), 512), 99: 16}
        there = [snapshot(n, nbytes) for n, nbytes in sizes.items()]
        assert history.next_use(99) > 10**9
        assert stock.is_in_order(there, is_all=True)
        look = {block.block_id: block for block in there}.__getitem__
        assert next(stock.all_victims(look, 0)).block_id == first


def flow_of(order: list[int], rounds: int) -> tuple[History, Stock]:
    """A program that uses blocks in turn, all of which came as it used them."""
    history = History()
    stock = Stock(history)
    stock.set_limit(LIMIT)
    for block_id in order * rounds:
        history.access(block_id, 512, block_id)
        stock.use(Access(block_id, 512, block_id, True, False, True))
    return history, stock


@pytest.mark.parametrize("gone", [[3], [0, 7], [1, 2, 3, 4, 5]])
def test_what_is_missing_comes_in_the_order_of_its_use(gone):
    history, stock = flow_of(list(range(10)), 6)
    assert stock.is_in_order([snapshot(n, 512) for n in range(10)], is_all=True)
    for block_id in gone:
        stock.evict(block_id)
    expected = sorted((history.next_use(block_id), block_id) for block_id in gone)
    assert [wanted[:2] for wanted in stock.missing()] == expected
    # As the program goes on: what it uses is there, the rest stays in order.
    history.access(0, 512, 0)
    stock.use(Access(0, 512, 0, True, False, False))
    left = [block_id for block_id in gone if block_id != 0]
    assert [wanted[:2] for wanted in stock.missing()] == sorted(
        (history.next_use(n), n) for n in left
    )


def test_what_has_died_is_neither_here_nor_missing():
    history, stock = flow_of(list(range(6)), 6)
    assert stock.is_in_order([snapshot(n, 512) for n in range(6)], is_all=True)
    stock.evict(2)
    for block_id in (2, 4):
        history.death(block_id)
        stock.death(block_id)
    assert list(stock.missing()) == []
    look = {n: snapshot(n, 512) for n in range(6)}.get
    assert {b.block_id for b in stock.all_victims(look, 0)} == {0, 1, 3, 5}


def test_no_victim_is_named_twice_until_it_is_used():
    history, stock = flow_of(list(range(6)), 6)
    assert stock.is_in_order([snapshot(n, 512) for n in range(6)], is_all=True)
    look = {n: snapshot(n, 512) for n in range(6)}.get
    first = next(stock.victims(look, 0))[1].block_id
    stock.name(first)
    assert first not in {block.block_id for _, block in stock.victims(look, 0)}
    assert first in {block.block_id for block in stock.all_victims(look, 0)}
    history.access(first, 512, first)
    stock.use(Access(first, 512, first, True, False, True))
    assert first in {block.block_id for _, block in stock.victims(look, 0)}


def test_who_looks_for_a_victim_does_not_look_at_those_named():
    _, stock = flow_of(list(range(100)), 6)
    there = {n: snapshot(n, 512) for n in range(100)}
    assert stock.is_in_order(list(there.values()), is_all=True)
    looked_at = []

    def look(number: int) -> BlockSnapshot | None:
        looked_at.append(number)
        return there.get(number)

    for _ in range(50):
        stock.name(next(stock.victims(look, 0))[1].block_id)
    assert len(looked_at) == len(set(looked_at)) == 50


def test_the_horizon_meets_each_block_that_recurs():
    history, _ = flow_of(list(range(10)), 6)
    assert {n for _, n in history.upcoming(horizon_of(history))} == set(range(10))


def test_a_small_one_that_is_not_foreseen_does_not_come_nearer():
    """The program moves on; the block is used no sooner for that."""
    history, stock = flow_of(list(range(10)), 6)
    stock.set_limit(LIMIT, 1024)
    sizes = {**dict.fromkeys(range(10), 512), 99: 512}
    there = [snapshot(n, nbytes) for n, nbytes in sizes.items()]
    assert stock.is_in_order(there, is_all=True)
    look = {block.block_id: block for block in there}.__getitem__
    for block_id in [*range(10)] * 12:
        history.access(block_id, 512, block_id)
        stock.use(Access(block_id, 512, block_id, True, False, True))
        assert next(stock.all_victims(look, 0)).block_id == 99


@pytest.mark.parametrize("is_dirty", [True, False])
def test_what_goes_by_itself_is_copied_home_later_than_what_is_used_later(is_dirty):
    """A gradient after the optimizer has read it: to give it back takes a copy, if it is dirty."""
    history, stock = flow_of(list(range(10)), 1)
    for gradient in range(100, 106):  # one in each step, instead of the one before
        for block_id in range(10):
            if block_id == 2:
                history.death(gradient - 1)
                stock.death(gradient - 1)
                stock.birth(gradient, 512, stays=history.birth(gradient, 512, 1))
            uses = [block_id, gradient] if block_id == 6 else [block_id]
            for used in uses:
                history.access(used, 512, used if used < 10 else 99)
                stock.use(Access(used, 512, used, True, False, True))
    there = [snapshot(n, 512, is_dirty=is_dirty and n == gradient) for n in (*range(10), gradient)]
    assert history.next_use(gradient) > 10**9
    assert history.next_end(gradient) == 2
    assert stock.is_in_order(there, is_all=True)
    look = {block.block_id: block for block in there}.__getitem__
    victims = [block.block_id for block in stock.all_victims(look, 0)]
    assert victims.index(gradient) == (0 if not is_dirty else 8)


@pytest.mark.parametrize(("lives", "is_first"), [(4, False), (45, True)])
def test_a_result_that_is_used_no_more_is_given_back_if_it_does_not_go_soon(lives, is_first):
    """Activations: made and used once in each step, and dead so many accesses later."""
    history, stock = flow_of(list(range(60)), 1)
    for made in range(100, 105):
        for block_id in range(60):
            history.access(block_id, 512, block_id)
            stock.use(Access(block_id, 512, block_id, True, False, True))
            if block_id == 10:
                stock.birth(made, 512, stays=history.birth(made, 512))
            if block_id == 11:
                history.access(made, 512, 99, is_persistent=False)
                stock.use(Access(made, 512, 99, False, False, True))
            if block_id == 10 + lives and made < 104:
                history.death(made)
                stock.death(made)
            if (made, block_id) == (104, 12):
                break
    there = [snapshot(n, 512) for n in range(60)]
    there.append(snapshot(104, 512, is_dirty=True)._replace(is_persistent=False))
    assert stock.is_in_order(there, is_all=True)
    look = {block.block_id: block for block in there}.__getitem__
    ahead_of_need = {block.block_id: distance for distance, block in stock.victims(look, 0)}
    assert ahead_of_need.get(104, 0) >= 60 if is_first else 104 not in ahead_of_need
