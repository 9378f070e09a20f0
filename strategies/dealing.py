"""How venice deals weights out: what each accelerator gets, and in how many stretches."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice

from ..strategy import DeviceSnapshot

#: What weights may take of a budget; the rest is for activations.
WEIGHTS_SHARE = 0.9
#: The most blocks that a layer has, and how many have to be as large as those a layer before.
LONGEST_LAYER = 256
ALIKE_SHARE = 0.9
#: What does not fit is dealt out in rounds, so that the program goes through so many stretches of
#: it. They take at least so long: each boundary takes tens of microseconds.
STRETCH_COUNT = 128
STRETCH_NS = 100_000


def shares_of(accelerators: Sequence[DeviceSnapshot], total_nbytes: int) -> list[float]:
    """Return how many bytes of weights each accelerator gets, in the order given.

    Where all of it fits the first ones are filled; else each link brings, in the same time, what
    its accelerator cannot hold.
    """
    room = [WEIGHTS_SHARE * device.limit_nbytes for device in accelerators]
    excess_nbytes = total_nbytes - sum(room)
    if excess_nbytes <= 0:
        return room
    links = [device.h2d_bytes_per_s for device in accelerators]
    time_s = excess_nbytes / sum(links)
    return [here + time_s * link for here, link in zip(room, links, strict=True)]


def rounds_of(accelerators: Sequence[DeviceSnapshot], sizes: Sequence[int]) -> int:
    """Return in how many rounds weights are dealt out, each accelerator getting a stretch in each.

    One where all of it fits. Else an accelerator brings what it lacks while the others compute, and
    can have brought no more than it has room for: with `n` rounds the room of a stretch is `1 / n`
    of what it lacks, which it has to bring besides. But a block is used as a whole: a stretch has
    about one of the usual size at least. Layers that are alike are dealt out alike, so that no
    stretch lacks more than the others: one, two, four ... rounds each, or as many layers a round.

    Parameters
    ----------
    sizes : sequence of int
        Of the blocks, in the order of their use.
    """
    total_nbytes = sum(sizes)
    excess_nbytes = total_nbytes - sum(WEIGHTS_SHARE * d.limit_nbytes for d in accelerators)
    links = sum(device.h2d_bytes_per_s for device in accelerators)
    time_ns = max(excess_nbytes, 0) / links * 1e9
    stretch_count = min(STRETCH_COUNT, time_ns / STRETCH_NS, total_nbytes / _usual_nbytes(sizes))
    round_count = max(1.0, stretch_count / len(accelerators))
    layer_count = len(sizes) // (_period_of(sizes) or 1)
    if round_count < 2 or layer_count < 2:
        return int(round_count)
    return max(1, round(layer_count * 2.0 ** round(math.log2(round_count / layer_count))))


def _period_of(sizes: Sequence[int]) -> int:
    """Return after how many blocks their sizes repeat; 0 if they do not."""
    for period in range(1, min(LONGEST_LAYER, len(sizes) // 2) + 1):
        alike = sum(map(operator.eq, sizes, islice(sizes, period, None)))
        if alike >= ALIKE_SHARE * (len(sizes) - period):
            return period
    return 0


def _usual_nbytes(sizes: Sequence[int]) -> int:
    """Return the size such that half of the bytes are in blocks at least as large; 1 of none."""
    ordered = sorted(sizes, reverse=True)
    half = sum(ordered) / 2
    reached = zip(ordered, accumulate(ordered), strict=True)
    return max(1, next((nbytes for nbytes, so_far in reached if so_far >= half), 1))


def moves_to_even_out(
    excess: Mapping[str, float],
    home: Mapping[int, str],
    sizes: Mapping[int, int],
    least_nbytes: float,
) -> Iterator[tuple[int, str]]:
    """Yield (block, accelerator): what moves where, so that all come nearer to their shares.

    Each time the largest block that the one with the most can spare and the one with the least can
    take, of equal ones that in the middle of the program; until that comes to less than half of it,
    or to a least amount.

    Parameters
    ----------
    excess : mapping of str to float
        Bytes that an accelerator has beyond its share; negative where it has fewer.
    home : mapping of int to str
        The accelerator where a block lives.
    sizes : mapping of int to int
        Its bytes, in the order of use.
    """
    left, homes = dict(excess), dict(home)
    while True:
        most, least = max(left, key=left.__getitem__), min(left, key=left.__getitem__)
        fitting_nbytes = min(left[most], -left[least])
        movable = [n for n in sizes if homes[n] == most and sizes[n] <= fitting_nbytes]
        nbytes = max((sizes[n] for n in movable), default=0)
        if nbytes < max(fitting_nbytes / 2, least_nbytes):
            return
        largest = [n for n in movable if sizes[n] == nbytes]
        moved = largest[len(largest) // 2]
        left[most] -= nbytes
        left[least] += nbytes
        homes[moved] = least
        yield moved, least
