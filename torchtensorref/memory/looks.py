"""Which bytes of a block a look at a tensor needs: those it covers, and of a long text its ends."""

from __future__ import annotations

from typing import Any

from .transfer import Look

#: A gap so large is not copied along: to begin one more copy takes no longer than it.
GAP_NBYTES = 64 << 10
#: Where more copies than these would be needed, the gaps are copied along.
MOST_PARTS = 256

#: Its first byte, and the one behind its last.
Part = tuple[int, int]


def look_at(ref: Any, edge: int | None) -> Look | None:
    """Return what a look at a TensorRef needs; None for all of its block.

    Parameters
    ----------
    ref : TensorRef
        What is looked at.
    edge : int or None
        Of each dimension that is longer than twice that, only so many at both ends are read; of 0
        all that the tensor covers. None is for who wants the block itself.
    """
    if edge is None:
        return None
    width = ref.element_size()
    start = ref.storage_offset() * width
    if not ref.numel():
        return Look(start, start, ())
    parts = [(0, width)]
    dims = sorted(zip(ref.stride(), ref.size(), strict=True))
    extent = width + sum((size - 1) * stride * width for stride, size in dims)
    if start + extent > ref._ttr_block.nbytes:
        return None  # it is torch that says so, of the view
    for stride, size in dims:
        parts = _repeated(parts, stride * width, size, edge)
        if not 0 < len(parts) <= MOST_PARTS:
            return Look.at_range(start, start + extent)
    return Look(start, start + extent, [(start + a, start + b) for a, b in parts])


def _repeated(parts: list[Part], step: int, size: int, edge: int) -> list[Part]:
    """Repeat parts along one dimension, or at its ends; none where there are far too many."""
    runs = [range(edge), range(size - edge, size)] if 0 < 2 * edge < size else [range(size)]
    (first, _), (_, last) = parts[0], parts[-1]
    if len(parts) == 1 and first + step - last < GAP_NBYTES:
        return _joined([(run[0] * step + first, run[-1] * step + last) for run in runs])
    starts = [at * step for run in runs for at in run[: MOST_PARTS**2 + 1]]
    if len(parts) * len(starts) > MOST_PARTS**2:
        return []
    return _joined(sorted((start + a, start + b) for start in starts for a, b in parts))


def _joined(parts: list[Part]) -> list[Part]:
    """Make one of those that are close to one another."""
    joined = parts[:1]
    for start, stop in parts[1:]:
        if start - joined[-1][1] < GAP_NBYTES:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined
