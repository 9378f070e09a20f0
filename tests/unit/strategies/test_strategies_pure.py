"""Strategies told with integers: THEORY 1.3's formulas, and single decisions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from torchTensorRef.strategies import AVAILABLE
from torchTensorRef.strategies.flow.alike import SHARED_NBYTES, Alike
from torchTensorRef.strategies.flow.flow import PREFETCH_CONFIDENCE, Flow
from torchTensorRef.strategies.flow.guess import Guess
from torchTensorRef.strategies.flow.link_queue import LinkQueue
from torchTensorRef.strategies.genoa import Genoa
from torchTensorRef.strategies.lru import LeastRecentlyUsed
from torchTensorRef.strategy import Access, BlockSnapshot, DeviceSnapshot, Strategy

from ...support.cache_model import CacheModel, Operand, Step, least_misses, uses
from ...support.sweeps import in_turn, usual
from ...support.traces import Trace, back, blocks_of, sweep

NBYTES = 1_000
ROOMS = [(10, 6), (32, 8), (32, 12), (32, 16), (32, 24), (48, 20)]


def steady_blocks(
    strategy: Strategy, sweep_: Trace, room: int, count: int, compute_ns: int = 1, **options: bool
) -> float:
    """Return the blocks moved in `count` sweeps, once the first four are over."""
    model = CacheModel(strategy, room * NBYTES, **options)
    before = model.run(uses(sweep_ * 4, NBYTES, compute_ns)).moved_nbytes
    return (model.run(uses(sweep_ * count, NBYTES, compute_ns)).moved_nbytes - before) / NBYTES


@pytest.mark.parametrize(("blocks", "room"), ROOMS)
class TestCyclicSweep:
    """N blocks in turn with room for k; N - 1 sweeps are a whole number of MIN's rounds."""

    def test_lru_moves_everything(self, blocks, room):
        moved = steady_blocks(LeastRecentlyUsed(), sweep(0, blocks, 0), room, blocks - 1)
        assert moved == blocks * (blocks - 1)

    def test_min_is_what_the_formula_says(self, blocks, room):
        rounds = 20 * (blocks - 1)
        numbers = blocks_of(sweep(0, blocks, 0) * rounds)
        first = blocks_of(sweep(0, blocks, 0) * (blocks - 1))
        steady = least_misses(numbers[: 3 * len(first)], room) - least_misses(
            numbers[: 2 * len(first)], room
        )
        assert steady == blocks * (blocks - room)

    def test_flow_on_demand_moves_what_min_moves(self, blocks, room):
        moved = steady_blocks(Flow(), sweep(0, blocks, 0), room, blocks - 1, looks_ahead=False)
        assert moved == blocks * (blocks - room)

    def test_flow_ahead_loses_the_slot_of_the_copy_in_flight(self, blocks, room):
        """W(W-B+s)/(W-s), in the regime in which sparing the block in use pays."""
        moved = steady_blocks(Flow(), sweep(0, blocks, 0), room, blocks - 1, compute_ns=250)
        assert moved == blocks * (blocks - room + 1)

    def test_flow_ahead_loses_less_where_operators_are_short(self, blocks, room):
        moved = steady_blocks(Flow(), sweep(0, blocks, 0), room, blocks - 1, compute_ns=1)
        assert blocks * (blocks - room) < moved < blocks * (blocks - room + 1)

    def test_everything_that_fits_is_fetched_once(self, blocks, room):
        model = CacheModel(Flow(), blocks * NBYTES)
        model.run(uses(sweep(0, blocks, 0) * 5, NBYTES))
        assert model.counts.moved_nbytes == blocks * NBYTES


@pytest.mark.parametrize("strategy", [LeastRecentlyUsed, Flow])
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("room", [8, 12, 24])
def test_palindrome_sweep_moves_what_does_not_fit(strategy, looks_ahead, room):
    """W - B per direction; LRU is as good as can be."""
    there_and_back = sweep(0, 32, 0) + back(0, 32, 1)
    moved = steady_blocks(strategy(), there_and_back, room, 10, looks_ahead=looks_ahead)
    assert moved == 20 * (32 - room)


@pytest.mark.parametrize(
    ("share", "compute_ns"), in_turn([0.25, 0.5, 0.75], [1, 500, 1000, 4000], each=2)
)
def test_time_is_near_the_floor(share, compute_ns):
    """The floor is the larger of all compute and all bytes that do not fit (THEORY 3.1)."""
    blocks, room = 128, int(128 * share)
    model = CacheModel(Flow(), room * NBYTES)
    model.run(uses(sweep(0, blocks, 0) * 4, NBYTES, compute_ns))
    start_ns = model.now_ns
    model.run(uses(sweep(0, blocks, 0) * 8, NBYTES, compute_ns))
    floor_ns = max(blocks * compute_ns, (blocks - room) * NBYTES)
    assert (model.now_ns - start_ns) / 8 <= 1.08 * floor_ns


@pytest.mark.parametrize("share", usual([0.5], [0.25, 0.75]))
def test_where_compute_is_the_bottleneck_copies_start_late(share):
    """Without times every link cycle is used, and twice the bytes are moved for nothing."""
    room = int(64 * share)
    late = steady_blocks(Flow(), sweep(0, 64, 0), room, 63, compute_ns=2000)
    early = steady_blocks(Flow(), sweep(0, 64, 0), room, 63, compute_ns=2000, tells_times=False)
    assert 64 * (64 - room) <= late <= 1.2 * 64 * (64 - room) <= early


def device(limit_nbytes: int = 10_000, **facts: float) -> DeviceSnapshot:
    known = {
        "name": "model",
        "limit_nbytes": limit_nbytes,
        "resident_nbytes": limit_nbytes,
        "in_flight_nbytes": 0,
        "in_flight_count": 0,
        "now_ns": 0,
        "link_free_ns": 0,
        "h2d_bytes_per_s": 1e9,
        "d2h_bytes_per_s": 1e9,
    }
    return DeviceSnapshot(**known | facts)


def block(
    block_id: int,
    nbytes: int = 1_000,
    last_use: int = 0,
    *,
    dirty: bool = False,
    lasts: bool = True,
) -> BlockSnapshot:
    return BlockSnapshot(block_id, nbytes, last_use, dirty, lasts)


def learned(trace: Trace, **options: int) -> Flow:
    strategy = Flow(**options)
    for block_id, struct in trace:
        strategy.on_access(Access(block_id, 1_000, struct, True, True, True))
    return strategy


def test_each_strategy_is_found_by_its_name():
    assert {name: strategy.name for name, strategy in AVAILABLE.items()} == {
        name: name for name in ("genoa", "lru", "flow", "venice")
    }


def test_lru_takes_what_comes_first():
    blocks = [block(3, 20, 10), block(2, 10, 10), block(1, 10, 30)]
    strategy = LeastRecentlyUsed()
    assert list(strategy.victims(device(), blocks, 5)) == [3]
    assert list(strategy.victims(device(), blocks, 31)) == [3, 2, 1]
    assert list(strategy.victims(device(), blocks, 0)) == []


def test_genoa_keeps_nothing():
    used = [block(1), block(2, dirty=True, lasts=False)]
    assert list(Genoa().after_operator(device(), used)) == [1, 2]


def test_flow_evicts_the_farthest_and_dirty_ones_later():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    blocks = [block(5), block(6), block(7, dirty=True)]
    assert list(strategy.victims(device(), blocks, 1)) == [6]
    assert list(strategy.victims(device(), blocks, 3_000)) == [6, 7, 5]
    blocks = [block(5), block(6), block(7)]
    assert list(strategy.victims(device(), blocks, 3_000)) == [7, 6, 5]


def test_flow_evicts_what_it_does_not_foresee_first():
    strategy = learned([*sweep(50, 3, 1), *sweep(0, 8, 0) * 2])
    blocks = [block(7, last_use=1), block(51, last_use=9), block(50, last_use=8)]
    assert list(strategy.victims(device(), blocks, 3_000)) == [50, 51, 7]


def test_flow_without_a_forecast_is_lru():
    blocks = [block(3, 20, 10), block(2, 10, 10, lasts=False), block(1, 10, 30)]
    assert list(Flow().victims(device(), blocks, 31)) == [3, 2, 1]


def test_flow_keeps_small_blocks_that_recur():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    blocks = [block(7, 10), block(6), block(5)]
    assert list(strategy.victims(device(), blocks, 2_005)) == [6, 5, 7]


def test_flow_fetches_in_the_order_of_use_and_does_no_harm():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    held = [block(0, last_use=9), block(6, last_use=7), block(7, last_use=8)]
    asked = list(strategy.prefetch(device(3_000, resident_nbytes=3_000), held))
    assert [(fetch.block_id, fetch.victims) for fetch in asked] == [(1, (7,))]
    held = [block(0, last_use=9), block(1, last_use=7), block(2, last_use=8)]
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    assert list(strategy.prefetch(device(3_000, resident_nbytes=3_000), held)) == []


def test_flow_does_not_queue_a_second_large_copy():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    busy = device(9_000, resident_nbytes=2_000, in_flight_nbytes=1_000, in_flight_count=1)
    assert list(strategy.prefetch(busy, [block(0), block(1)])) == []
    large = device(1_000_000, resident_nbytes=2_000)
    asked = list(strategy.prefetch(large, [block(0), block(1)]))
    assert [fetch.block_id for fetch in asked] == [2, 3, 4, 5]


def paced(compute_ns: int) -> Flow:
    """One that has heard of eight blocks in turn, and how long each use takes."""
    strategy = Flow()
    for at, (block_id, struct) in enumerate(sweep(0, 8, 0) * 12):
        strategy.on_access(Access(block_id, 1_000, struct, True, True, True))
        strategy.prefetch(device(compute_ns=compute_ns * (at + 1)), [])
    return strategy


def test_on_a_real_accelerator_flow_hears_together_of_what_is_used_while_the_link_is_busy():
    facts = {"in_flight_nbytes": 1_000, "in_flight_count": 1, "compute_ns": 10**6}
    busy = device(8_000, **facts)  # for a microsecond
    assert list(paced(100).expects(busy)) == [0, 1, 2, 3, 4], "until half of it is copied"
    assert list(paced(400).expects(busy)) == [0]
    assert list(paced(2_000).expects(busy)) == []
    assert list(paced(0).expects(busy)) == []
    assert list(paced(100).expects(device(8_000, **facts | {"compute_free_ns": 1}))) == []
    assert list(paced(100).expects(device(8_000, compute_ns=10**6))) == [], "nothing is missing"
    strategy = paced(100)
    strategy.on_evict(2)
    assert list(strategy.expects(busy)) == [0, 1]


def test_on_a_real_accelerator_flow_hears_together_of_what_is_used_while_nothing_is_urgent():
    facts = {"resident_nbytes": 7_000, "compute_ns": 97 * 10**6}
    quiet = device(9_000, **facts)
    strategy = paced(10**6)
    assert list(strategy.victims(quiet, [block(6)], 1_000)) == [6]
    strategy.on_evict(6)
    expected = list(strategy.expects(quiet))
    assert expected == [0, 1, 2, 3], "until the copy has to start, and one use before that"
    assert list(strategy.prefetch(quiet, [block(at) for at in range(8) if at != 6])) == []
    assert list(strategy.expects(quiet)) == expected
    strategy.on_access(Access(6, 1_000, 1, True, False, False))  # it was wrong
    assert list(strategy.expects(quiet)) == []


def test_where_nothing_is_fetched_ahead_flow_hears_together_of_what_is_there():
    """What is missing may as well not be used: experts that another token was routed to."""
    strategy, routes = Flow(), random.Random(0)

    def use(*block_ids: int) -> None:
        for block_id in block_ids:
            strategy.on_access(Access(block_id, 1_000, block_id, True, True, True))

    for _ in range(40):
        use(0, routes.randrange(10, 20), 1, routes.randrange(10, 20), 2, 3)
    assert strategy.history.confidence < PREFETCH_CONFIDENCE
    for block_id in range(10, 20):
        strategy.on_evict(block_id)
    seen = device(8_000)
    assert list(strategy.expects(seen)) == [0, 1], "few at first"
    use(0, 13, 1)
    strategy.on_evict(13)
    assert list(strategy.expects(seen)) == [2, 3, 0, 1], "more as long as they are used"


def test_guesses_are_as_long_as_they_are_right():
    guess, end, lengths = Guess(), 0, []
    for used_count in (9, 9, 9, 9, 9, 40, 40, 3, 0, 0):
        lengths.append(len(guess.these(range(100), end)))
        end += used_count
    assert lengths == [2, 4, 8, 16, 32, 18, 32, 32, 6, 2]
    assert guess.these([7, 7], end) == [7]


@pytest.mark.parametrize(("second", "is_brief"), [(0, False), (9, True)])
def test_small_blocks_are_several_where_they_are_not_one_used_twice(second: int, is_brief: bool):
    strategy = Flow()
    for block_id, nbytes in [(0, 500), (second, 500), (1, 5_000), (2, 5_000)] * 12:
        strategy.on_access(Access(block_id, nbytes, block_id, True, True, True))
    strategy.expects(device(decision_nbytes=1_000))
    assert strategy._queue.is_brief is is_brief


def seen(idle_share: float, **facts: int) -> LinkQueue:
    """A queue over a link of 1 GB/s that idled so much: for each use there is time for 15,625 B."""
    queue = LinkQueue()
    for at in range(1, 40):
        queue.look_at(device(64_000, now_ns=at * 10**6, **facts), at * 64)
        queue.moved(int((1 - idle_share) * 10**6))
    return queue


def test_the_queue_is_as_long_as_the_link_idles():
    here = device(64_000)
    assert (seen(0).count, seen(0).nbytes(here)) == (4, 1_000)
    assert (seen(0.02).count, seen(0.02).nbytes(here)) == (4, 1_000)
    assert (seen(0.1).count, round(seen(0.1).nbytes(here))) == (16, 3_200)
    assert round(seen(1).nbytes(here), -1) == 4_000
    assert seen(1, compute_free_ns=1).nbytes(here) == 1_000, "a simulated device says when"
    queue, simulated = seen(1), device(64_000, compute_free_ns=1)
    queue.look_at(simulated, 40 * 64)
    assert queue.nbytes(here) == 1_000, "what was seen is forgotten on a simulated device"
    assert queue.brief_nbytes(simulated) == 0
    queue = seen(0.1)
    for at in range(40, 80):
        queue.look_at(device(64_000, now_ns=at * 10**6), at * 64)
        queue.moved(10**6)
    assert (queue.count, round(queue.nbytes(here))) == (4, 1_000), "and no longer than that"
    strategy = paced(0)
    for at, (block_id, struct) in enumerate(sweep(0, 8, 0) * 12):
        strategy.on_access(Access(block_id, 1_000, struct, True, True, True))
        strategy.prefetch(device(64_000, now_ns=(at + 1) * 10**6), [])
    assert strategy._queue.count == 16, "nothing has moved"
    for at, (block_id, struct) in enumerate(sweep(0, 8, 0) * 100):
        strategy.on_access(Access(block_id, 1_000, struct, True, True, at % 2 == 0))
        strategy.on_prefetch(block_id, 500_000 * (at % 2))  # the other half of the time
        strategy.prefetch(device(64_000, now_ns=10**8 + at * 250_000), [])
    assert strategy._queue.count == 4, "the link is busy"
    busy = device(64_000, in_flight_nbytes=500, in_flight_count=1)
    assert queue.is_open(busy)
    queue.next_nbytes = 600
    assert not queue.is_open(busy), "what comes next does not fit"


def test_what_an_idle_link_could_copy_between_two_uses_is_small():
    def small(idle_share: float, **facts: int) -> float:
        return seen(idle_share, **facts).brief_nbytes(device(64_000, **facts))

    assert small(0, decision_nbytes=1_000) == 1_000
    assert small(0.05, decision_nbytes=1_000) == 1_000
    assert small(0.5, decision_nbytes=1_000) == pytest.approx(7_812, 0.01)
    assert small(1, decision_nbytes=100) == pytest.approx(1_600, 0.01), "not without end"
    assert small(1, decision_nbytes=1_000, compute_free_ns=1) == 1_000, "compute's end is known"
    for moved_nbytes, is_brief in [(100, True), (15_600, False)]:
        strategy = paced(0)
        for at, (block_id, struct) in enumerate(sweep(0, 8, 0) * 100):
            strategy.on_access(Access(block_id, 5_000, struct, True, True, True))
            strategy.on_prefetch(block_id, moved_nbytes)
            now_ns = (at + 1) * 15_625
            strategy.prefetch(device(64_000, now_ns=now_ns, decision_nbytes=1_000), [])
        strategy.expects(device(64_000, decision_nbytes=1_000))
        assert strategy._queue.is_brief is is_brief, "larger than a decision"


def test_nothing_is_looked_for_while_the_next_one_does_not_fit_into_the_queue():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    facts = {"resident_nbytes": 3_000, "in_flight_count": 1}
    busy = device(115_000, in_flight_nbytes=1_000, **facts)  # of 1,796 that may be
    assert list(strategy.prefetch(busy, [block(0), block(1)])) == []
    assert not strategy._may_queue(busy)
    less = device(115_000, in_flight_nbytes=700, **facts)
    assert [wish.block_id for wish in strategy.prefetch(less, [block(0), block(1)])] == [2]


def test_on_a_real_accelerator_victims_are_of_the_size_that_is_needed():
    unit = SHARED_NBYTES // 4

    def of_three(*facts: int) -> Alike:
        order = [(9.0, block(1, 5 * unit)), (8.0, block(2, 10 * unit)), (7.0, block(3, 5 * unit))]
        return Alike(device(compute_free_ns=sum(facts)), iter(order))

    def numbers(victims: Alike, units: int, distance: float) -> list[int]:
        return [one.block_id for one in iter(lambda: victims.take(units * unit, distance), None)]

    assert numbers(of_three(), 10, -1) == [2, 1, 3]
    assert numbers(of_three(), 5, -1) == [1, 3, 2]
    assert numbers(of_three(), 7, -1) == [1, 2, 3]
    assert numbers(of_three(), 5, 7.5) == [1, 2], "none that is used before what it makes room for"
    assert numbers(of_three(1), 10, -1) == [1, 2, 3], "a simulated device has no pieces"


def test_on_a_real_accelerator_small_victims_for_what_is_small_go_in_their_order():
    """Such blocks share segments; a large one has a segment of its own."""
    large, small, smaller = 2 * SHARED_NBYTES, SHARED_NBYTES, SHARED_NBYTES // 2
    looked_at: list[int] = []

    def order(*sizes: int) -> Alike:
        def described() -> Iterator[tuple[float, BlockSnapshot]]:
            for number, size in enumerate(sizes):
                looked_at.append(number)
                yield 9.0 - number, block(number, size)

        return Alike(device(), described())

    assert order(smaller, small, small).take(small, -1).block_id == 0
    assert looked_at == [0], "nothing is described that is not needed"
    assert order(small, smaller).take(smaller, 9.5) is None
    assert order(large, smaller, small).take(small, -1).block_id == 2
    assert order(small, large).take(large, -1).block_id == 1


def test_flow_leaves_room_for_what_operators_make():
    """Two of five blocks' room is needed by a result that comes before the missing block."""
    flow = Flow()
    model = CacheModel(flow, 6 * NBYTES)
    program = []
    for token in range(30):
        for number in range(8):
            made = 1_000 + token * 8 + number
            large = Operand(made, 2 * NBYTES, is_persistent=False)
            program.append(Step((Operand(number, NBYTES),), 0, 400, (large,), (made,)))
    counts = model.run(program)
    assert counts.peak_nbytes <= 6 * NBYTES
    assert counts.written_back_nbytes == 0
    assert counts.refused_count == 0
    # MIN with room for four: N(N-k)/(N-1) a sweep; one more for the copy in flight.
    assert counts.moved_nbytes / NBYTES <= 30 * 8 * (8 - 4 + 1) / 7 + 8


def test_flow_copies_the_next_victims_home_early():
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    full = device(8_000)
    blocks = [block(number, dirty=number in (1, 2)) for number in range(8)]
    assert list(strategy.write_back(full, blocks)) == []
    strategy = learned([*sweep(0, 8, 0), (0, 0)])
    blocks = [block(number, dirty=True) for number in range(8)]
    assert list(strategy.write_back(full, blocks)) == [0, 7]
    assert list(strategy.write_back(device(80_000, resident_nbytes=8_000), blocks)) == []


@pytest.mark.parametrize("strategy", [LeastRecentlyUsed, Genoa, Flow])
def test_training_with_writes_stays_under_the_budget(strategy):
    """Weights are written by an optimizer: the model itself asserts the budget at every step."""
    model = CacheModel(strategy(), 12 * NBYTES)
    for _ in range(6):
        model.run(uses(sweep(0, 16, 0) + back(0, 16, 1), NBYTES, 100))
        model.run(
            Step((Operand(n, NBYTES, is_write=True), Operand(100 + n, NBYTES, is_write=True)), 2)
            for n in range(16)
        )
    assert model.counts.peak_nbytes <= 12 * NBYTES
