"""How large tiles are: they fit the room there is, move least, and are no smaller than they must.

A part that does not lie along an axis is used again while the tiles go along it. So where one axis
is cut alone, everything moves once; where two are, what lies along the inner one alone moves once
per tile of the outer one. Tiles are gone through like a snake: at each turn of the outer axis the
inner one goes back the way it came, and what is there is used again.

The pieces of the next tile come while one is computed, so there is room for two of each. Of what
only a turn changes the second one is used at turns alone: where pieces are so long that this room
would halve what moves, it is given to the first one, and turns are waited at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from .cut import Axis, Inner, Tile

#: A tile moves so many bytes if it can: less, and the latency of the copies shows; more, and there
#: is nothing to overlap the first and the last one with.
GOOD_NBYTES = 32 << 20
#: What is computed while something is copied needs so many tiles.
GOOD_COUNT = 3
#: Sums are cut where that moves so much less than what keeps the bits.
MUCH_LESS = 0.7
#: Turns are waited at where that moves about half as much. (Where compute takes longer than the
#: link, waiting only costs; for less it is not worth that risk.)
HALF_AS_MUCH = 0.55
#: What may move more than the least if it takes less room.
SLACK = 1.02


@dataclass(frozen=True, slots=True)
class Part:
    """An operand or a result, as far as its bytes go."""

    nbytes: int
    axes: frozenset[int]
    is_result: bool = False
    #: What stands beside a piece where sums are cut: it in single precision, as a share of it.
    sums_share: float = 0.0
    #: It is made and used up within a tile, where sums are cut.
    is_scratch: bool = False


@dataclass(frozen=True, slots=True)
class Tiling:
    """The lengths of tiles along each axis, and the order in which the axes are gone through."""

    axes: tuple[Axis, ...]
    lengths: tuple[int, ...]
    #: The outermost first.
    order: tuple[int, ...]
    need_nbytes: int
    moved_nbytes: int
    #: Whether the pieces of the next tile fit as well.
    has_room_ahead: bool
    #: What is last in the order, where sums may be cut.
    inner: Inner | None = None

    def counts(self) -> tuple[int, ...]:
        """How many tiles there are along each axis."""
        pairs = zip(self.axes, self.lengths, strict=True)
        return tuple(len(axis.ranges(length)) for axis, length in pairs)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles like a snake; those of a sum in several passes as often."""
        ranges = [axis.ranges(length) for axis, length in zip(self.axes, self.lengths, strict=True)]
        order, inner = list(self.order), self.inner
        in_order = inner.axis if inner is not None and inner.is_in_order else None
        if inner is not None and len(ranges[inner.axis]) > 1:
            order.insert(order.index(inner.axis), len(ranges))
            ranges.append([(0, 0)] * inner.passes)
        counts = [len(ranges[a]) for a in order]
        for number in range(prod(counts)):
            tile = [(0, 0)] * len(ranges)
            rest, outer = number, prod(counts)
            turns = 0
            for a, count in zip(order, counts, strict=True):
                outer //= count
                i, rest = divmod(rest, outer)
                # The number of turns so far decides which way this axis is gone.
                is_back = turns % 2 and a != in_order
                tile[a] = ranges[a][count - 1 - i if is_back else i]
                turns = turns * count + i
            yield tuple(tile[: len(self.axes)])


class TileTooLargeError(Exception):
    """Internal: not even the smallest tile fits."""

    def __init__(self, need_nbytes: int, lengths: tuple[int, ...]) -> None:
        super().__init__(f"the smallest tile takes {need_nbytes:,} bytes")
        self.need_nbytes = need_nbytes
        self.lengths = lengths


def choose(
    axes: Sequence[Axis], parts: Sequence[Part], room_nbytes: int, inner: Inner | None = None
) -> Tiling:
    """Choose tiles that fit, if possible with room for the pieces of the next one.

    Parameters
    ----------
    axes : sequence of Axis
        What may be cut, what is best cut first.
    parts : sequence of Part
        Operands and results, each of which has its piece in a tile.
    room_nbytes : int
        What the pieces may take.
    inner : Inner, optional
        The axis that is summed over. It is cut if nothing fits otherwise, or much less moves.

    Raises
    ------
    TileTooLargeError
        The smallest tile does not fit.
    """
    if inner is None or axes[inner.axis].most_tiles == 1:
        return _choose_patiently(axes, parts, room_nbytes)
    whole = [Axis(a.extent, a.extent) if i == inner.axis else a for i, a in enumerate(axes)]
    try:
        if inner.is_always:
            raise TileTooLargeError(0, ())
        outer = _choose_patiently(whole, [p for p in parts if not p.is_scratch], room_nbytes)
        outer = replace(outer, inner=inner)
    except TileTooLargeError:
        outer = None
    if outer is None:
        sums = _choose_patiently(axes, parts, room_nbytes, inner)
        joint = _choose_sums(tuple(axes), parts, room_nbytes, inner)
        return joint if joint is not None and joint.moved_nbytes < sums.moved_nbytes else sums
    joint = _choose_sums(tuple(axes), parts, room_nbytes, inner)
    if joint is not None and joint.moved_nbytes < MUCH_LESS * outer.moved_nbytes:
        return joint
    return outer


def _choose_sums(
    axes: tuple[Axis, ...], parts: Sequence[Part], room_nbytes: int, inner: Inner
) -> Tiling | None:
    """Choose tiles of two axes and a third one that is gone through for each of the others."""
    others = [a for a, axis in enumerate(axes) if a != inner.axis and axis.most_tiles > 1]
    if len(others) != 2:
        return None
    for copies in (2, 1):
        chooser = _Chooser(axes, parts, room_nbytes, copies, inner)
        found: list[Tiling] = []
        most = axes[inner.axis].most_tiles
        for count in [*(1 << power for power in range(1, most.bit_length())), most]:
            lengths = [axis.extent for axis in axes]
            lengths[inner.axis] = _length(axes[inner.axis], count)
            found += chooser.two(lengths, *others)
        if found:
            return min(found, key=lambda tiling: tiling.moved_nbytes)
    return None


def _choose_patiently(
    axes: Sequence[Axis], parts: Sequence[Part], room_nbytes: int, inner: Inner | None = None
) -> Tiling:
    try:
        return _choose(axes, parts, room_nbytes, 2, inner)
    except TileTooLargeError:
        return _choose(axes, parts, room_nbytes, 1, inner)


def _choose(
    axes: Sequence[Axis],
    parts: Sequence[Part],
    room_nbytes: int,
    copies: int,
    inner: Inner | None = None,
) -> Tiling:
    """Choose tiles of which so many fit at a time."""
    chooser = _Chooser(tuple(axes), parts, room_nbytes, copies, inner)
    lengths = [axis.extent for axis in axes]
    for a in () if inner is None else inner.after:
        lengths[a] = min(axes[a].step, lengths[a])
    left = [a for a, axis in enumerate(axes) if axis.most_tiles > 1 and lengths[a] > axis.step]
    while left:
        found = [tiling for a in left if (tiling := chooser.one(lengths, a)) is not None]
        if found:
            return found[0]
        pairs = [(a, b) for a in left for b in left if a != b] if len(left) <= 2 else []
        for a, b in pairs:
            found += chooser.two(lengths, a, b)
        if copies > 1 and inner is None:
            turns = _Chooser(tuple(axes), parts, room_nbytes, copies, waits_at_turns=True)
            waiting = [tiling for a, b in pairs for tiling in turns.two(lengths, a, b)]
            if waiting and _least(waiting) < HALF_AS_MUCH * _least(found):
                found = waiting
        if found:
            good = [one for one in found if one.moved_nbytes <= _least(found) * SLACK]
            return min(good, key=lambda tiling: (tiling.need_nbytes, tiling.moved_nbytes))
        first = left.pop(0)
        lengths[first] = min(axes[first].step, lengths[first])
        if not left:
            tiling = chooser.tiling(lengths, tuple(range(len(axes))))
            if tiling.need_nbytes <= room_nbytes:
                return tiling
    whole = chooser.tiling(lengths, tuple(range(len(axes))))
    if whole.need_nbytes > room_nbytes:
        raise TileTooLargeError(whole.need_nbytes, whole.lengths)
    return whole


def _least(found: Sequence[Tiling]) -> float:
    return min((tiling.moved_nbytes for tiling in found), default=inf)


class _Chooser:
    """Tries lengths for one call.

    Where it waits at turns, what the inner axis does not change is there once: the next one of it
    takes the place of the last one, and while it comes nothing is computed.
    """

    def __init__(
        self,
        axes: tuple[Axis, ...],
        parts: Sequence[Part],
        room_nbytes: int,
        copies: int,
        inner: Inner | None = None,
        *,
        waits_at_turns: bool = False,
    ) -> None:
        self._axes, self._parts = axes, parts
        self._room, self._copies, self._inner = room_nbytes, copies, inner
        self._waits_at_turns = waits_at_turns

    def one(self, lengths: list[int], a: int) -> Tiling | None:
        """Cut one axis further; no longer tiles than are good, if shorter ones are none the worse.

        Where another axis has been cut before, this is the inner one.
        """
        axis, count = self._axes[a], 1
        order = (*(b for b in range(len(self._axes)) if b != a), a)
        fits = None
        for count in _counts(axis):
            fits = self._fitting(lengths, a, count, order)
            if fits is not None:
                break
        if fits is None:
            return None
        piece_nbytes = self._moved_by_one(fits.lengths)
        wanted = max(count * piece_nbytes // GOOD_NBYTES, GOOD_COUNT)
        if wanted > count and piece_nbytes > GOOD_NBYTES // GOOD_COUNT:
            return self._fitting(lengths, a, min(wanted, axis.most_tiles), order) or fits
        return fits

    def _fitting(
        self, lengths: Sequence[int], a: int, count: int, order: tuple[int, ...]
    ) -> Tiling | None:
        cut = list(lengths)
        cut[a] = _length(self._axes[a], count)
        tiling = self.tiling(cut, order)
        return tiling if tiling.need_nbytes <= self._room else None

    def two(self, lengths: list[int], a: int, b: int) -> Iterator[Tiling]:
        """Cut an outer and an inner axis in all ways that may be worth it."""
        rest = [c for c in range(len(self._axes)) if c not in (a, b)]
        for count in _counts(self._axes[a]):
            cut = list(lengths)
            cut[a] = _length(self._axes[a], count)
            for inner in _counts(self._axes[b]):
                cut[b] = _length(self._axes[b], inner)
                tiling = self.tiling(cut, (*rest, a, b))
                if tiling.need_nbytes <= self._room:
                    yield tiling
                    break

    def tiling(self, lengths: Sequence[int], order: tuple[int, ...]) -> Tiling:
        """Say what tiles of such lengths take and move; what is summed over is gone last."""
        inner = self._inner
        if inner is not None:
            order = (*(a for a in order if a != inner.axis), inner.axis)
        counts = [
            len(axis.ranges(length)) for axis, length in zip(self._axes, lengths, strict=True)
        ]
        last = next((a for a in reversed(order) if counts[a] > 1), None)
        need = moved = 0
        for part in self._parts:
            is_cut = any(counts[a] > 1 for a in part.axes)
            piece = self._piece_nbytes(part, lengths)
            waits = self._waits_at_turns and is_cut and last not in part.axes
            has_copies = is_cut and not (waits or part.is_scratch)
            need += piece * (self._copies if has_copies else 1)
            if part.is_scratch:
                continue
            passes = 1
            if inner is not None:
                need += int(piece * part.sums_share)
                passes = inner.passes if inner.axis in part.axes else 1
            moves = passes * _changes(part, counts, order)
            moved += part.nbytes if part.is_result else piece * moves
        return Tiling(self._axes, tuple(lengths), order, need, moved, self._copies > 1, inner)

    def _piece_nbytes(self, part: Part, lengths: Sequence[int]) -> int:
        """The bytes of its largest piece: the last one may be longer than the others."""
        nbytes = float(part.nbytes)
        for a in part.axes:
            longest = max(end - start for start, end in self._axes[a].ranges(lengths[a]))
            nbytes *= longest / max(self._axes[a].extent, 1)
        return int(nbytes + 0.999)

    def _moved_by_one(self, lengths: Sequence[int]) -> int:
        return sum(self._piece_nbytes(part, lengths) for part in self._parts if not part.is_scratch)


def _counts(axis: Axis) -> Iterator[int]:
    """Numbers of tiles that are tried: all small ones, then in steps of a fifth."""
    count = 1
    while count < axis.most_tiles:
        yield count
        count += max(count // 5, 1)
    yield axis.most_tiles


def _length(axis: Axis, count: int) -> int:
    """The length that cuts an axis into about so many tiles: a multiple of its step."""
    if count <= 1:
        return axis.extent
    if count >= axis.most_tiles:
        return axis.step
    steps = -(-axis.extent // (count * axis.step))
    return max(steps * axis.step, axis.step)


def _changes(part: Part, counts: Sequence[int], order: Sequence[int]) -> int:
    """How often a part's piece is another one than for the tile before."""
    reached = [i for i, a in enumerate(order) if a in part.axes and counts[a] > 1]
    if not reached:
        return 1
    total = prod(counts[a] for a in order[: reached[-1] + 1])
    # At each turn of an axis that it does not lie along, the inner ones go back: it stays.
    if len(reached) == 1:
        total -= prod(counts[a] for a in order[: reached[0]]) - 1
    return total
