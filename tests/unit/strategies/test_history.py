"""The sticky cursor: what it foresees, what it survives, what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchTensorRef.strategies.flow.history import NEVER, History
from torchTensorRef.strategies.flow.places import GRAM_LENGTHS

from ...support.cache_model import least_misses
from ...support.calls import calls_of
from ...support.traces import TRACES, Trace, back, blocks_of, sweep


def told(trace: Trace, history: History | None = None) -> History:
    history = History() if history is None else history
    for block_id, struct in trace:
        history.access(block_id, 1, struct)
    return history


def foreseen(history: History, count: int) -> list[int]:
    return [block_id for _, block_id in history.upcoming(count)]


def misses(trace: Trace, room: int, *, follow: bool) -> int:
    """Count the misses of a cache that evicts by the forecast, or by age."""
    history, held, count = History(), dict[int, int](), 0
    for position, (block_id, struct) in enumerate(trace):
        history.access(block_id, 1, struct)
        if block_id not in held:
            count += 1
            if len(held) >= room:
                distance = history.next_use if follow else lambda _: 0.0
                del held[max(held, key=lambda other: (distance(other), -held[other]))]
        held[block_id] = position
    return count


def test_nothing_is_foreseen_of_what_was_not_seen():
    history = told(sweep(0, 5, 0))
    assert (history.cursor, history.next_use(3), foreseen(history, 9)) == (-1, NEVER, [])


def test_a_second_round_is_foreseen_from_its_first_access():
    history = told([*sweep(0, 5, 0), (0, 0)])
    assert [history.next_use(block_id) for block_id in range(5)] == [4, 0, 1, 2, 3]
    assert foreseen(history, 12) == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]


def test_upcoming_may_begin_later():
    history = told([*sweep(0, 5, 0), (0, 0)])
    assert list(history.upcoming(12, 7)) == list(history.upcoming(12))[7:]


def test_other_lengths_do_not_disturb_the_order():
    """A prefill and a decode step use the same blocks by operators of other sizes."""
    history = told([*sweep(0, 5, struct=1), (0, 2)])
    assert foreseen(history, 4) == [1, 2, 3, 4]


def test_a_longer_period_is_foreseen_in_its_place():
    micro = sweep(0, 6, 0) + back(0, 6, 1)
    step = micro * 4 + sweep(100, 6, 2)
    history = told(step * 3 + micro * 4)
    assert foreseen(history, 8) == [*range(100, 106), 0, 1]
    assert history.next_use(100) == 0


def test_substitution_by_an_equal_operator_keeps_the_place():
    layers = [(block, 9 if block == 2 else 0) for block in range(5)]
    changed = [(77, 9) if block == 2 else (block, struct) for block, struct in layers]
    history = told(layers * 2 + changed[:3])
    assert (history.leap_count, foreseen(history, 3)) == (told(layers).leap_count + 1, [3, 4, 0])


def test_layers_that_are_routed_as_once_before_keep_the_place():
    """A mixture of experts: fourteen layers are routed as two steps ago."""

    def step(experts):
        return [use for at, e in enumerate(experts) for use in ((at, 0), (100 + 10 * at + e, 1))]

    first, second, third = [1] * 40, [2] * 40, [1] * 14
    history = told(step(first) + step(second) + step(third))
    assert history.period == 80
    assert foreseen(history, 4) == [14, 242, 15, 252]


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_blocks_that_equal_operators_use_several_times_in_a_row_are_foreseen(together, times):
    """Layers that are applied to two inputs in turn, cells of a recurrent network."""
    layers = [tuple(range(i, i + together)) for i in range(0, 40, together)]
    period = [(block_id, 0) for layer in layers for block_id in layer * times]
    history = told(period * 4)
    assert history.period == len(period)
    assert history.confidence > 0.95
    assert foreseen(history, len(period)) == [block_id for block_id, _ in period]


def test_an_exception_in_the_middle_of_a_step_is_one_wrong_access():
    history = told(sweep(0, 20, 0) * 3 + sweep(0, 7, 0))
    leaps = history.leap_count
    told(sweep(0, 4, 5), history)
    assert history.leap_count - leaps <= 1
    assert foreseen(history, 5) == [4, 5, 6, 7, 8]


def test_training_and_evaluation_in_turns():
    train, evaluate = sweep(0, 9, 0) + back(0, 9, 1), sweep(0, 9, 2) + sweep(50, 2, 3)
    history = told((train + evaluate) * 3)
    before = history.confidence
    told((train + evaluate) * 2, history)
    assert history.confidence >= before > 0.5


def test_the_dead_are_not_foreseen():
    history = told(sweep(0, 4, 0) * 2)
    history.death(2)
    assert 2 not in foreseen(history, 8)
    assert history.nbytes(2) == 0


def test_bytes_of_the_living():
    history = History()
    history.access(1, 10, 0)
    history.birth(2, 5)
    history.access(2, 7, 0, is_persistent=False)
    history.death(1)
    assert (history.living_nbytes, history.nbytes(2)) == (7, 7)


def decode_with_states(history: History, tokens: range, layers: int = 3) -> list[int]:
    """Run a program that makes each layer's state anew at each token; return the last states."""
    states: dict[int, int] = {}
    for token in tokens:
        for layer in range(layers):
            history.access(layer, 100, 1)
            if layer in states:
                history.access(states[layer], 10 + token, 2, is_persistent=False)
            made = 1000 + token * layers + layer
            history.birth(made, 11 + token)
            if layer in states:
                history.death(states[layer])
            states[layer] = made
    return [states[layer] for layer in range(layers)]


def test_temporaries_are_known_by_their_birth_place():
    """Each token makes new states under new numbers; when they are used is known all the same."""
    history = History()
    last = decode_with_states(history, range(4))
    # After layer 2's access, in the slot in which its state was used each time.
    assert [history.next_use(block_id) for block_id in last] == [1, 2, 0]
    assert history.period == 3


def test_what_was_used_last_is_foreseen_to_go_and_not_to_be_used_as_the_next_one_made_there():
    """An activation: made, used twice within a layer, and dead a few accesses later."""
    history = History()
    for step in range(4):
        for layer in range(10):
            made = 100 + 10 * step + layer
            history.access(layer, 100, 1)
            history.birth(made, 100)
            history.access(20 + layer, 100, 1)
            history.access(made, 100, 2, is_persistent=False)
            history.death(made - 1)
    assert (history.next_use(made), history.next_end(made)) == (0, 2), "as its use just now"
    assert history.next_end(0) == NEVER, "no operator has made it"
    for left, accessed in ((1, 0), (0, 20)):
        history.access(accessed, 100, 1)
        # The next that the record has used there was made there before.
        assert (history.next_use(made), history.next_end(made)) == (NEVER, left)
    history.access(1, 100, 1)
    assert history.next_end(made) > 10, "it has lived longer than those before: till the next one"


def test_caches_that_grow_are_known_although_no_operator_looks_the_same():
    """As keys and values do: of another size at each token, and read once before they are gone."""
    history, caches = History(), dict[int, int]()
    for token in range(8):
        for layer in range(3):
            history.access(layer, 4096, 1)
            nbytes = 160 + 10 * token
            if token:
                history.access(caches[layer], nbytes, hash((2, nbytes)))
            made = 1000 + 3 * token + layer
            # One token is run otherwise, so that they are born elsewhere.
            stays = history.birth(made, nbytes + 10, 5 if token == 3 else 0)
            if token:
                history.death(caches[layer])
            caches[layer] = made
            assert stays == (token not in (0, 3, 4))
    assert [history.next_use(caches[layer]) for layer in range(3)] == [1, 3, 5]
    assert history.period == 6
    assert history.confidence > 0.8


def test_what_is_to_be_made_until_then_is_passed_over():
    """A cache that each token makes anew: what is used around it is expected all the same."""
    history, made = History(), 100
    for _ in range(4):
        for block_id in (0, 1, made):
            history.access(block_id, 8, 0)  # of the token before
        history.death(made)
        made += 1
        history.birth(made, 8)
        for block_id in (made, 2, 3):
            history.access(block_id, 8, 0)
    history.access(0, 8, 0)
    assert list(history.next_ones(5)) == [1, made, 2, 3]
    history.death(2)
    assert list(history.next_ones(5)) == [1, made, 3], "something else comes in its place"


def training_step(history, step, tracked, layers=12):
    """Four micro-steps over equal layers, each of which makes four results; then the optimizer.

    Which results are accessed as what stays is `tracked(step, micro_step, layer)`. Weights have
    the numbers from 0, the optimizer's state those from 100.
    """
    number = 1000 * (1 + step)
    for micro in range(4):
        made = []
        for layer in range(layers):
            history.access(2 * layer, 8, 1)
            history.access(2 * layer + 1, 8, 2)
            for place in range(4):
                number += 1
                history.birth(number, 8, place)
            made.append((layer, range(number - 3, number + 1)))
        for layer, results in reversed(made):
            for block_id in results if tracked(step, micro, layer) else ():
                history.access(block_id, 8, 3)
            history.access(2 * layer, 8, 4)
            for block_id in results:
                history.death(block_id)
    for layer in range(2 * layers):
        history.access(layer, 8, 5)
        history.access(100 + layer, 8, 5)


@pytest.mark.parametrize("way", ["by step", "by micro-step", "at random"])
def test_activations_that_come_and_go_are_no_other_micro_step(way):
    rng = random.Random(0)
    tracked = {
        "by step": lambda step, micro, layer: step > 3,
        "by micro-step": lambda step, micro, layer: (micro + step) % 2,
        "at random": lambda step, micro, layer: rng.random() < 0.5,
    }[way]
    history = History()
    for step in range(4):
        training_step(history, step, tracked)
    for step in range(4, 9):
        leaps, before = history.leap_count, history.end
        training_step(history, step, tracked)
        assert history.leap_count == leaps
        assert abs(history.period - (history.end - before)) <= 8  # a step, and no micro-step


def test_what_outlives_its_birth_place_gets_an_identity_of_its_own():
    """Optimizer state is born once, where a step makes something short-lived each time."""
    history = told(sweep(0, 4, 0) * 2)
    for number in range(3):
        history.access(0, 1, 0)
        history.birth(500 + number, 1)
        told(sweep(1, 3, 0), history)
    history.access(500, 1, 7)
    history.access(502, 1, 7)
    told(sweep(0, 4, 0), history)
    history.access(500, 1, 7)
    assert foreseen(history, 2) == [502, 0]


@pytest.mark.parametrize("is_persistent", [True, False])
def test_memory_is_bounded(is_persistent):
    history, rng = History(capacity=2_000), random.Random(0)
    for number in range(20_000):
        history.access(rng.randrange(50), 1, 0, is_persistent=is_persistent)
        history.birth(1_000 + number, 1)
        history.access(1_000 + number, 1, 0, is_persistent=number % 7 == 0)
        history.death(1_000 + number)
    assert history.end - history.start <= 2_000
    assert sum(map(len, history._uses.values())) <= 4_000
    assert history._names.birth_count <= 2_000
    places = history._places
    assert max(len(grams) for grams in (*places._grams, *places._older_grams)) <= 4_000
    assert len(history._nbytes) <= 51
    assert not history._symbol_of
    assert not history._bearer_of


def test_of_an_order_that_is_ever_new_not_all_contexts_are_kept():
    history, rng = History(capacity=4_000), random.Random(0)
    for _ in range(6_000):
        block = rng.randrange(100)
        history.access(block, 10, block)
        grams = (*history._places._grams, *history._places._older_grams)
        assert max(map(len, grams)) <= 4_000 / 8 + max(GRAM_LENGTHS)
    last = history._symbols[-60:-20]
    for block in last[:4]:
        history.access(block, 10, block)
    assert [block for _, block in history.upcoming(10)] == last[4:14], "it is still found"


def test_a_trim_does_not_lose_the_place():
    round_ = [(block_id, block_id) for block_id in range(30)]
    history = told(round_ * 500, History(capacity=1_000))
    leaps = history.leap_count
    assert foreseen(history, 30) == list(range(30))
    told(round_[:10] + round_[:10], history)
    assert history.leap_count == leaps + 1
    assert foreseen(history, 3) == [10, 11, 12]


@pytest.mark.parametrize("name", TRACES)
def test_an_access_costs_a_handful_of_calls(name):
    """Some microseconds, counted in what no other process of the machine can change."""
    trace = TRACES[name][0](random.Random(1))
    assert calls_of(lambda: told(trace)) / len(trace) < 60


edits = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from("ids"), st.integers(0, 45)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 40), st.integers(3, 12), edits)
def test_insertions_deletions_and_substitutions_never_make_it_worse_than_lru(
    count, rounds, changes
):
    trace = sweep(0, count, 0) * rounds
    for place, kind, block_id in changes:
        index = place % len(trace)
        if kind == "i":
            trace.insert(index, (block_id, 1))
        elif kind == "d":
            del trace[index]
        else:
            trace[index] = (block_id, trace[index][1])
    room = count // 2
    followed = misses(trace, room, follow=True)
    oracle = least_misses(blocks_of(trace), room)
    assert oracle <= followed <= 1.03 * misses(trace, room, follow=False) + 2 * len(changes) + 2
    assert followed <= 1.1 * oracle + (room + 2) * (len(changes) + 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("apbd"), st.integers(0, 15), st.integers(0, 3)), max_size=300
    )
)
def test_any_order_of_calls_is_borne(calls):
    history = History(capacity=64)
    for kind, block_id, struct in calls:
        if kind in "ap":
            history.access(block_id, 8, struct, is_persistent=kind == "p")
        elif kind == "b":
            history.birth(block_id, 8)
        else:
            history.death(block_id)
        assert history.start <= history.end
        assert history.cursor == -1 or history.start <= history.cursor < history.end
        assert history.living_nbytes == 8 * len(history._nbytes)
        assert all(block in history._nbytes for block in foreseen(history, 40))
        assert all(history.next_use(block) >= 0 for block in range(16))
