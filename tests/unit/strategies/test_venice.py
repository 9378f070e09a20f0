"""Venice, asked with numbers: where blocks live, and where operators run."""

from __future__ import annotations

import itertools

import pytest

from torchTensorRef.strategies.dealing import (
    STRETCH_COUNT,
    WEIGHTS_SHARE,
    moves_to_even_out,
    rounds_of,
    shares_of,
)
from torchTensorRef.strategies.venice import AHEAD_SHARE, Venice
from torchTensorRef.strategy import (
    Access,
    DeviceSnapshot,
    MissingBlock,
    Offer,
    OperandSnapshot,
    OpSnapshot,
)

GB = 10**9


def device(name, limit_nbytes, link=1e9):
    return DeviceSnapshot(
        name=name,
        limit_nbytes=limit_nbytes,
        resident_nbytes=0,
        in_flight_nbytes=0,
        in_flight_count=0,
        now_ns=0,
        link_free_ns=0,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
    )


def op(accelerators, *operands, label=""):
    return OpSnapshot(
        name="mm",
        operand_nbytes=sum(o.nbytes for o in operands),
        missing_nbytes=0,
        flops=0,
        default_device=accelerators[0].name,
        operands=operands,
        accelerators=tuple(accelerators),
        label=label,
    )


def weight(number, nbytes=100, *devices):
    return OperandSnapshot(number, nbytes, True, devices)


def activation(number, nbytes, *devices):
    return OperandSnapshot(number, nbytes, False, devices)


def use(strategy, number, where, nbytes=100):
    strategy.on_access(Access(number, nbytes, 0, True, False, True, device=where))


def test_shares_fill_the_first_or_let_all_links_work_equally_long():
    two = [device("a", 20 * GB), device("b", 10 * GB)]
    assert shares_of(two, 20 * GB) == [WEIGHTS_SHARE * 20 * GB, WEIGHTS_SHARE * 10 * GB]
    fast, slow = device("a", 10 * GB, link=3e9), device("b", 10 * GB, link=1e9)
    first, second = shares_of([fast, slow], 26 * GB)
    assert first + second == pytest.approx(26 * GB)
    room = WEIGHTS_SHARE * 10 * GB
    assert (first - room) / 3e9 == pytest.approx((second - room) / 1e9)


def test_weights_are_dealt_out_in_stretches_the_largest_first():
    small, large = device("small", 1000), device("large", 2000)
    strategy = Venice()
    where = [strategy.place(op([small, large], weight(n))) for n in range(24)]
    assert where == ["large"] * 18 + ["small"] * 6
    assert strategy.dealt_nbytes == {"large": 1800, "small": 600}
    assert [strategy.place(op([small, large], weight(n))) for n in (0, 20)] == ["large", "small"]


def test_what_is_small_does_not_go_back_to_a_gap():
    a, b = device("a", 2000), device("b", 1000)
    strategy = Venice()
    for n in range(2):
        assert strategy.place(op([a, b], weight(n, 850))) == "a"
    assert strategy.place(op([a, b], weight(2, 850))) == "b"
    assert strategy.place(op([a, b], weight(3, 40))) == "b"


def test_what_does_not_fit_is_dealt_out_anew_once_all_is_known():
    a, b = device("a", 1_000_000), device("b", 1_000_000)
    strategy = Venice()
    for n in range(40):
        use(strategy, n, strategy.place(op([a, b], weight(n, 100_000))), 100_000)
    dealt = strategy.dealt_nbytes
    assert dealt == {"a": 900_000, "b": 3_100_000}
    use(strategy, 0, "a", 100_000)  # the program begins anew
    strategy.place(op([a, b], weight(1, 100_000)))
    assert abs(strategy.dealt_nbytes["a"] - strategy.dealt_nbytes["b"]) <= 200_000
    where = [strategy.place(op([a, b], weight(n, 100_000))) for n in range(40)]
    turns = sum(x != y for x, y in itertools.pairwise(where))
    rounds = rounds_of([a, b], [100_000] * 40)
    assert rounds > 1
    assert 2 * rounds - 2 <= turns <= 2 * rounds


def test_operators_without_weights_run_where_most_of_their_operands_are():
    a, b = device("a", 10_000), device("b", 10_000)
    strategy = Venice()
    assert strategy.place(op([a, b], activation(1, 10, "a"), activation(2, 20, "b"))) == "b"
    assert strategy.place(op([a, b], activation(1, 20, "a"), activation(2, 20, "b"))) == "b"
    assert strategy.place(op([a, b], activation(1, 20, "a", "b"), activation(2, 1, "a"))) == "a"
    assert strategy.place(op([a, b], activation(3, 20))) == "a"  # nowhere: the first one


def test_tiny_weights_go_where_they_are_needed():
    a, b = device("a", 1 << 20), device("b", 1 << 20)
    strategy = Venice()
    norm = weight(1, 100, "a")
    assert strategy.place(op([a, b], activation(2, 200, "b"), norm)) == "b"
    assert strategy.place(op([a, b], activation(3, 200, "a"), norm)) == "a"
    assert strategy.dealt_nbytes == {"a": 0, "b": 0}


def test_labels_are_obeyed_once_the_program_names_two():
    a, b = device("a", 10_000), device("b", 10_000)
    strategy = Venice()
    there = weight(1, 100, "b")
    assert strategy.place(op([a, b], there, label="a")) == "b"  # written for one accelerator
    assert strategy.place(op([a, b], weight(2), label="b")) == "b"
    assert strategy.place(op([a, b], there, label="a")) == "a"


def test_what_is_gone_makes_room():
    a, b = device("a", 1000), device("b", 1000)
    strategy = Venice()
    for n in range(12):
        strategy.place(op([a, b], weight(n)))
    assert strategy.dealt_nbytes == {"a": 900, "b": 300}
    for n in range(12):
        strategy.on_death(n)
    assert strategy.dealt_nbytes == {"a": 0, "b": 0}
    assert strategy.place(op([a, b], weight(20))) == "a"


def test_other_accelerators_and_other_budgets_are_dealt_to_anew():
    a, b = device("a", 1000), device("b", 1000)
    strategy = Venice()
    for n in range(12):
        strategy.place(op([a, b], weight(n)))
    strategy.place(op([device("a", 400), b], weight(0)))
    assert strategy.dealt_nbytes == {"b": 900, "a": 300}
    strategy.place(op([device("c", 2000)], weight(0)))
    assert strategy.dealt_nbytes == {"c": 1200}


def test_what_lived_where_an_accelerator_has_left_lives_elsewhere():
    a, b, c = device("a", 500), device("b", 500), device("c", 2000)
    strategy = Venice()
    for n in range(24):
        strategy.place(op([a, b, c], weight(n)))
    left = {strategy.place(op([a, b], weight(n))) for n in range(24)}
    assert left == {"a", "b"}
    assert strategy.dealt_nbytes == {"a": 1200, "b": 1200}
    assert strategy.place(op([a, b, c], weight(0))) == "c"


def test_a_block_may_die_before_what_was_foretold_is_dealt_out():
    a, b = device("a", 1000), device("b", 1000)
    strategy = Venice()
    for n in range(12):
        strategy.place(op([a, b], weight(n)))
    strategy.on_foretold([Access(20, 100, 0, True, False, True)])
    for n in range(12):
        strategy.on_death(n)
    assert strategy.place(op([a, b], weight(20))) == "a"
    assert strategy.dealt_nbytes == {"a": 100, "b": 0}


def test_a_stretch_has_a_block_of_the_usual_size():
    a, b = device("a", 1_000_000), device("b", 1_000_000)
    assert rounds_of([a, b], [10_000] * 4096) == STRETCH_COUNT // 2
    assert rounds_of([a, b], [1_000_000] * 40) == 20
    assert rounds_of([a, b, a, b], [1_000_000] * 40) == 10
    assert rounds_of([a, b], [30_000_000]) == 1


def test_layers_that_are_alike_are_dealt_out_alike():
    a, b = device("a", 1_000_000), device("b", 1_000_000)
    layer = [100_000, 50_000, 400_000, 400_000]
    rounds = [rounds_of([a, b], [700_000, *layer * count, 5]) for count in (10, 20, 30, 70)]
    assert rounds == [10, 20, 30, 70]
    assert rounds_of([a, b], [7, *layer * 320]) == 80  # no more than so many stretches
    # Two layers a round: four stretches of the 76 that have a block of the usual size each.
    assert rounds_of([a, a, b, b], layer * 32) == 16


def test_no_more_is_fetched_ahead_than_a_share_of_what_is_missing():
    a, b = device("a", 1_000_000), device("b", 1_000_000)
    strategy = Venice()
    for _ in range(2):
        for n in range(40):
            use(strategy, n, strategy.place(op([a, b], weight(n, 100_000))), 100_000)
    lacks = AHEAD_SHARE * (2_000_000 - 900_000)
    asked: list[str] = []
    strategy._flow("a").prefetch = lambda device, resident: asked.append(device.name) or ()
    on_a = [n for n in range(40) if strategy.place(op([a, b], weight(n, 100_000))) == "a"]
    for number in on_a[: int(lacks / 100_000) + 1]:
        strategy.prefetch(a, [])
        strategy.on_prefetch(number, 100_000)
    count = len(asked)
    assert count == int(lacks / 100_000) + 1
    strategy.prefetch(a, [])
    assert len(asked) == count  # enough is there
    use(strategy, on_a[0], "a", 100_000)
    strategy.prefetch(a, [])
    assert len(asked) == count + 1


def test_what_is_made_anew_each_time_is_not_dealt_out():
    """A cache that grows lives where it was made, and no weight moves for it."""
    two = [device("a", 100_000), device("b", 100_000)]
    strategy, numbers = Venice(), iter(range(100, 200))
    cache, home = 0, {}
    for token in range(8):
        nbytes = 1000 + 100 * token
        for number in range(4):
            where = strategy.place(op(two, weight(number, 20_000)))
            use(strategy, number, where, 20_000)
        if cache:
            where = strategy.place(op(two, weight(cache, nbytes - 100, "b")))
            use(strategy, cache, where, nbytes - 100)
        made = next(numbers)
        home[made] = strategy.on_birth(made, nbytes, 0, where), where
        use(strategy, made, where, nbytes)
        if cache:
            strategy.on_death(cache)
        cache = made
    assert strategy.place(op(two, weight(cache, nbytes, "b"))) == "b"
    answers = [answer for answer, _ in home.values()]
    assert answers[0]
    assert not any(answers[-4:])
    assert [where for _, where in home.values()][-4:] == ["b"] * 4
    assert strategy.dealt_nbytes == {"a": 80_000, "b": 0}


def test_the_flow_of_the_accelerator_says_what_is_computed_at_home():
    def asked(home_ns):
        offers = (Offer("b", 1_000_000, 1000, 0, True), Offer("cpu", 0, home_ns, 1000, True))
        missing = (MissingBlock(1, 100, 7, True, 500_000),)
        return OpSnapshot(
            name="mm",
            operand_nbytes=100,
            missing_nbytes=100,
            flops=0,
            default_device="b",
            is_movable=True,
            is_pressed=True,
            missing=missing,
            offers=offers,
        )

    strategy = Venice()
    assert strategy.place(asked(200_000)) == "cpu"
    assert strategy.place(asked(2_000_000)) == "b"


def test_what_one_has_too_much_of_goes_to_who_has_too_little():
    sizes = {1: 30, 2: 50, 3: 30, 4: 80, 5: 30, 6: 40}
    home = {1: "a", 2: "a", 3: "a", 4: "a", 5: "a", 6: "b"}
    excess = {"a": 45.0, "b": -45.0}
    moves = list(moves_to_even_out(excess, home, sizes, 1))
    assert moves == [(3, "b")]  # 50 and 80 are too much; 15 are left, and nothing is as small
    assert list(moves_to_even_out(excess, home, sizes, 31)) == []
    assert list(moves_to_even_out({"a": 0.0, "b": 0.0}, home, sizes, 1)) == []
    excess = {"a": 100.0, "b": -60.0, "c": -40.0}
    assert list(moves_to_even_out(excess, home, sizes, 1)) == [(2, "b"), (3, "c")]


def test_weights_are_dealt_out_evenly_where_layers_do_not_divide():
    """One matrix more on one accelerator is made up for by a small one."""
    strategy, two = Venice(), [device("a", 10_000_000), device("b", 10_000_000)]
    layer = [150_000, 40_000, 40_000, 150_000, 450_000, 450_000, 450_000]
    sizes = [*layer * 20, 300_000, 300_000]
    for _ in range(3):
        for number, nbytes in enumerate(sizes):
            use(strategy, number, strategy.place(op(two, weight(number, nbytes))), nbytes)
    a, b = (strategy.dealt_nbytes[name] for name in "ab")
    assert a + b == sum(sizes)
    assert abs(a - b) < 150_000


def test_weights_make_room_for_caches_where_these_are():
    """Of what does not fit, the accelerator that has the caches gets less."""
    two = [device("a", 1_000_000), device("b", 1_000_000)]
    strategy, numbers = Venice(), itertools.count(1000)
    caches: dict[int, int] = {}
    dealt = []
    for token in range(20):
        nbytes = 1000 * (token + 1)
        for number in range(100):
            where = strategy.place(op(two, weight(number, 40_000)))
            use(strategy, number, where, 40_000)
            strategy.prefetch(two[0], [])
            if number % 10:
                continue
            made = next(numbers)
            cache = caches.get(number)
            if cache is not None:
                where = strategy.place(op(two, weight(cache, nbytes - 1000, "b")))
                use(strategy, cache, where, nbytes - 1000)
            strategy.on_birth(made, nbytes, 0, "b")
            use(strategy, made, "b", nbytes)
            if cache is not None:
                strategy.on_death(cache)
            caches[number] = made
        dealt.append(strategy.dealt_nbytes)
    assert abs(dealt[2]["a"] - dealt[2]["b"]) <= 40_000
    # Ten caches take 200,000 bytes by now; half as much has moved to the other one, and no more.
    assert 80_000 <= dealt[-1]["a"] - dealt[-1]["b"] <= 200_000
    assert sum(x != y for x, y in itertools.pairwise(dealt[2:])) <= 4


def test_what_is_asked_for_twice_is_ahead_once():
    two = [device("a", 1_000_000), device("b", 1_000_000)]
    strategy = Venice()
    for number in range(40):
        use(strategy, number, strategy.place(op(two, weight(number, 100_000))), 100_000)
    strategy.on_prefetch(1, 100_000)
    strategy._home[1] = "b"  # it has been dealt out anew meanwhile
    strategy.on_prefetch(1, 100_000)
    assert strategy._ahead_nbytes == {"a": 0, "b": 100_000}


def test_what_is_foretold_between_two_periods_is_dealt_out_by_the_next_operator():
    """Until then nothing is evened out: some of it has no home."""
    two = [device("a", 1_000_000), device("b", 1_000_000)]
    strategy = Venice()
    for _ in range(3):
        for number in range(40):
            use(strategy, number, strategy.place(op(two, weight(number, 100_000))), 100_000)
    strategy.on_foretold([Access(50, 100_000, 0, True, False, True)])
    before = strategy.dealt_nbytes
    list(strategy.prefetch(two[0], []))  # the period that has begun raised KeyError
    assert strategy.dealt_nbytes == before
    strategy.place(op(two, weight(0, 100_000)))
    assert sum(strategy.dealt_nbytes.values()) == 4_100_000
