"""The sizes of tiles: that they fit, cover everything once, and move little."""

import random
from itertools import pairwise
from math import prod

import pytest

from torchTensorRef.operators.blocked.cut import Axis, Inner
from torchTensorRef.operators.blocked.sizes import Part, TileTooLargeError, choose
from torchTensorRef.operators.blocked.sums import Products, Sums

MIB = 1 << 20


def product(n: int, k: int, m: int, *, cuts_sums: bool = False) -> tuple[list[Axis], list[Part]]:
    axes = [Axis(n, 128), Axis(m, 128), Axis(k, 128 if cuts_sums else k)]
    parts = [
        Part(4 * n * k, frozenset({0, 2})),
        Part(4 * k * m, frozenset({1, 2})),
        Part(4 * n * m, frozenset({0, 1}), is_result=True, sums_share=1.0),
    ]
    return axes, parts


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_everything_once_and_fit(seed):
    generator = random.Random(seed)
    axes = [Axis(generator.randint(1, 40), generator.randint(1, 4)) for _ in range(3)]
    parts = [
        Part(1000 * prod(axes[a].extent for a in along), frozenset(along))
        for along in ((0, 1), (1, 2), (0, 2))
    ]
    room = generator.randint(100_000, 1_000_000)
    try:
        tiling = choose(axes, parts, room)
    except TileTooLargeError as error:
        room = error.need_nbytes
        tiling = choose(axes, parts, room)
    assert tiling.need_nbytes <= room
    seen = set()
    for tile in tiling.tiles():
        for where in _points(tile):
            assert where not in seen
            seen.add(where)
    assert len(seen) == prod(axis.extent for axis in axes)


def _points(tile):
    (a, b), (c, d), (e, f) = tile
    return [(i, j, k) for i in range(a, b) for j in range(c, d) for k in range(e, f)]


@pytest.mark.parametrize("extent", range(1, 40))
def test_no_tile_is_shorter_than_a_step(extent):
    axis = Axis(extent, 4)
    for length in range(1, extent + 8):
        ranges = axis.ranges(length)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == extent
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert min(b - a for a, b in ranges) >= min(4, extent)
        assert len(ranges) <= axis.most_tiles


def test_one_axis_is_cut_where_the_other_operand_fits():
    """A row times a large matrix: each number of it crosses once."""
    axes, parts = product(1, 4096, 131072)
    tiling = choose(axes, parts, 256 * MIB)
    assert tiling.moved_nbytes == sum(part.nbytes for part in parts)
    assert tiling.need_nbytes < 80 * MIB


def test_tiles_are_gone_through_like_a_snake():
    axes, parts = product(1024, 1024, 1024)
    tiling = choose(axes, parts, 3 * MIB)
    tiles = list(tiling.tiles())
    assert min(tiling.counts()[:2]) > 1
    changed = [
        sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairwise(tiles)
    ]
    assert set(changed) == {1}


def test_sums_are_cut_where_much_less_moves():
    axes, parts = product(2048, 131072, 4096, cuts_sums=True)
    whole = choose([*axes[:2], Axis(131072, 131072)], parts, 320 * MIB)
    sums = choose(axes, parts, 320 * MIB, inner=Inner(2, Products))
    assert sums.counts()[2] > 1
    assert sums.order[-1] == 2
    assert sums.moved_nbytes < 0.5 * whole.moved_nbytes
    assert sums.need_nbytes <= 320 * MIB


def test_turns_are_waited_at_where_that_halves_what_moves():
    """Long rows: of those that stay there is one piece, of those that pass by there are two."""
    axes, parts = product(2048, 131072, 4096)
    row = 4 * 131072
    tiling = choose(axes, parts, 640 * row + MIB)
    assert tiling.has_room_ahead
    assert tiling.lengths[:2] == (128, 384)
    assert tiling.order[-2:] == (1, 0)
    # With two of each it would be 128 and 128: all rows 32 times, and not eleven.
    assert tiling.moved_nbytes <= row * (11 * 2048 + 4096)
    assert 640 * row < tiling.need_nbytes <= 640 * row + MIB


def test_turns_are_not_waited_at_for_less():
    axes, parts = product(16384, 16384, 16384)
    row = 4 * 16384
    tiling = choose(axes, parts, 5120 * row)
    outer, inner = (tiling.lengths[a] for a in tiling.order[-2:])
    assert 2 * (outer + inner) * row <= tiling.need_nbytes


def test_what_not_even_the_smallest_tile_takes_is_told():
    axes, parts = product(1024, 1024, 1024)
    with pytest.raises(TileTooLargeError) as raised:
        choose(axes, parts, 100_000)
    need_nbytes = raised.value.need_nbytes
    assert choose(axes, parts, need_nbytes).need_nbytes == need_nbytes


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("is_in_order", [True, False])
def test_what_is_gone_along_is_gone_through_in_passes_for_each_row(passes, is_in_order):
    inner = Inner(1, Sums, passes, is_in_order, after=(0,))
    row = [Part(4 * 3 * 8000, frozenset({0, 1}))]
    tiling = choose([Axis(3), Axis(8000, 500)], row, 10_000, inner=inner)
    assert tiling.counts() == (3, 8)
    tiles = list(tiling.tiles())
    starts = [start for _, (start, _) in tiles]
    assert [rows for rows, _ in tiles] == [(i, i + 1) for i in range(3) for _ in range(8 * passes)]
    for number in range(3 * passes):
        way = list(range(0, 8000, 1000)) if is_in_order or number % 2 == 0 else None
        assert starts[8 * number : 8 * (number + 1)] == (way or list(range(7000, -1, -1000)))
    assert tiling.moved_nbytes == passes * row[0].nbytes
