"""Which weights are fetched and which are used at home, on two clocks; with numbers alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from torchTensorRef.strategies.flow.at_home import LIGHT_NS, LOST_COPIES, AtHome
from torchTensorRef.strategies.flow.latest_start import LatestStart
from torchTensorRef.strategy import Access, DeviceSnapshot, MissingBlock, Offer, OpSnapshot

NBYTES, STRUCT = 1000, 5
#: One byte per ns on the link.
DEVICE = DeviceSnapshot("sim", 10**6, 0, 0, 0, 0, 0, 1e9, 1e9)


def asked(
    home_ns: int,
    fetch_ns: int,
    *,
    is_movable: bool = True,
    is_persistent: bool = True,
    is_here: bool = False,
    is_coming: bool = False,
    nbytes: int = NBYTES,
):
    return OpSnapshot(
        name="mm",
        operand_nbytes=nbytes,
        missing_nbytes=nbytes,
        flops=0,
        default_device="sim",
        is_movable=is_movable,
        is_pressed=True,
        missing=(MissingBlock(1, nbytes, STRUCT, is_persistent, nbytes, is_coming),),
        offers=(
            Offer("sim", fetch_ns, 0, 0, is_learned=True),
            Offer("cpu", 0, home_ns, 0, is_learned=True, is_here=is_here),
        ),
    )


def fetched(at_home: AtHome, count: int, compute_ns: int = 0) -> list[int]:
    gate = LatestStart()
    for position in range(count + 1):
        gate.advance(replace(DEVICE, compute_ns=position * compute_ns), 0, position)
    missing = ((number, number, NBYTES) for number in range(count))
    return [block_id for _, block_id, _ in at_home.in_time(DEVICE, gate, 0, missing)]


def knowing(cost_ns: int, count: int = 100) -> AtHome:
    at_home = AtHome()
    at_home.wants(asked(cost_ns, 10**9))
    for number in range(count):
        at_home.use(Access(number, NBYTES, STRUCT, True, False, False, True))
    return at_home


@pytest.mark.parametrize(("cost_ns", "share"), [(1000, 1 / 2), (500, 1 / 3), (250, 1 / 5)])
def test_the_share_follows_from_the_speeds_and_is_even(cost_ns, share):
    found = fetched(knowing(cost_ns), 100)
    assert len(found) == pytest.approx(100 * share, abs=2)
    gaps = {b - a for a, b in pairwise(found)}
    assert max(gaps) - min(gaps) <= 1


def test_what_the_link_brings_in_time_is_fetched():
    found = fetched(knowing(500), 20, compute_ns=1200)
    assert found == list(range(1, 20))  # but for the first: nothing was on its way


def test_nothing_known_leaves_nothing_out():
    assert fetched(AtHome(), 10) == list(range(10))


def test_what_takes_many_copies_at_home_is_fetched():
    assert fetched(knowing(4100), 10) == list(range(10))


def test_a_block_that_another_operator_uses_is_fetched():
    at_home = knowing(500, 2)
    at_home.use(Access(0, NBYTES, STRUCT + 1, True, False, True))
    assert 0 in fetched(at_home, 2)
    at_home.use(Access(0, NBYTES, STRUCT, True, True, True))  # it is written
    assert 0 in fetched(at_home, 2)


def test_at_home_where_that_ends_sooner():
    at_home = AtHome()
    assert at_home.wants(asked(500, 600)).device == "cpu"
    assert at_home.wants(asked(700, 600)) is None
    assert at_home.wants(asked(4100, 10**6)) is None  # of little that would have to cross
    assert at_home.wants(asked(500, 600, is_movable=False)) is None
    assert at_home.wants(asked(500, 600, is_persistent=False)) is None


def test_a_copy_that_is_on_its_way_is_not_lost_for_a_little():
    at_home, lost_ns = AtHome(), LOST_COPIES * NBYTES
    assert at_home.wants(asked(500, 500 + lost_ns, is_coming=True)) is None
    assert at_home.wants(asked(500, 501 + lost_ns, is_coming=True)).device == "cpu"


def test_what_is_light_follows_what_is_at_home():
    at_home = AtHome()
    light = asked(LIGHT_NS, 0, is_persistent=False, is_here=True)
    assert at_home.wants(light).device == "cpu"
    heavy = asked(LIGHT_NS + 1, 10**9, is_persistent=False, is_here=True)
    assert at_home.wants(heavy) is None
    assert at_home.wants(asked(1, 10**9, is_persistent=False)) is None  # some of it is not there
    assert not at_home.is_open


def test_what_is_large_is_used_where_it_lies_whoever_made_it():
    at_home, large = AtHome(), LIGHT_NS + 1
    made = asked(large, 2 * large, is_persistent=False, nbytes=large)
    assert at_home.wants(made).device == "cpu"
    assert at_home.wants(asked(3 * large, 2 * large, is_persistent=False, nbytes=large)) is None
    # It says nothing of weights: no copy is planned around what may be another block next time.
    at_home.use(Access(1, NBYTES, STRUCT, True, False, False, True))
    assert fetched(at_home, 3) == [0, 1, 2]


def test_the_link_gets_what_lasts_until_the_host_is_through():
    at_home = knowing(500, 20)
    assert at_home.longest_ns == 500
    fetched(at_home, 20)
    assert at_home.next_ns == 500
    busy = replace(DEVICE, link_free_ns=300)
    assert at_home.idle_nbytes(busy, at_home.next_ns) == 200
    assert at_home.idle_nbytes(replace(busy, compute_free_ns=100), at_home.next_ns) == 300
    fetched(at_home, 20, compute_ns=1200)
    for _ in range(200):
        at_home.wants(asked(250, 10**9))
    assert 250 <= at_home.longest_ns < 260  # what was long ago is forgotten
