"""What our patches do around optimizers: their state is named, their lists are divided.

With `foreach=True` and `fused=True` each operator takes all parameters, gradients or moments at
once: where these do not fit, they pass the link once for each operator, or it runs on the host.
Torch groups the lists by device and dtype, and goes through one group after the other; so it does
to clip gradients and to average weights. While memory is short, or where a group is more than there
is at all, we make of it several that fit. A kernel of lists computes tensor by tensor, so it does
not matter to the bits in which lists they come, unless two have memory in common (parameters tied
by their data): torch has written all of a list before it goes on, so such a group stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from sys import _getframe
from typing import Any

from torch import strided

from ..memory.names import names
from .hooks import is_ref, load
from .unpickled import adopt_all, adopts_unpickled

#: Most that a group takes of the budget, all of its lists together.
GROUP_SHARE = 1 / 8


class _Key(tuple[Any, ...]):
    """The device and dtype of one group among several that have the same."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def state_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `Optimizer._patch_step_function()`, which each does as it is made or unpickled."""
    result = wrapped(*args, **kwargs)
    names.note_optimizer(instance)
    had = vars(instance).get("state")  # of one that is just made there is none yet
    if had and adopts_unpickled(_getframe(1)):
        for of_one in had.values():
            if isinstance(of_one, dict):
                adopt_all(of_one.values())
    return result


def groups_wrapper(
    wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `_group_tensors_by_device_and_dtype(lists, with_indices)`."""
    groups = wrapped(*args, **kwargs)
    limit_nbytes, is_pressed = _room()
    if not limit_nbytes:
        return groups
    found: dict[Any, Any] = {}
    for key, (lists, indices) in groups.items():
        has_room = not is_pressed and _roughly_nbytes(lists) <= limit_nbytes
        if has_room or not all(map(_is_of_one_kind, lists)) or _has_overlaps(lists):
            found[key] = lists, indices
            continue
        for part in _parts(_sizes_of(lists), GROUP_SHARE * limit_nbytes):
            found[_Key(key)] = [tensors[part] for tensors in lists], indices[part]
    return found


def _room() -> tuple[int, bool]:
    """Return how much there is, 0 if that is not known, and whether it is short."""
    manager = load(".memory.manager").tensorsManager
    recorder = None if manager.promises is None else manager.promises.recorder
    if recorder is not None:
        return recorder.room()  # type: ignore[no-any-return]
    residency = manager._residency
    ledger = None if residency is None else residency.books.ledgers.get(residency.books.main)
    return (0, False) if ledger is None else (ledger.limit_nbytes, residency.books.is_pressed)


def _is_of_one_kind(tensors: Sequence[Any]) -> bool:
    """Whether a list is of one layout, or empty: torch refuses others before it writes anything."""
    return len({None if x is None else x.layout for x in tensors}) <= 1


def _has_overlaps(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether two of all these tensors have memory in common, as far as their extents tell."""
    extent_of, extents = load(".memory.adoption").extent_of, dict[Any, list[tuple[int, int]]]()
    for x in chain.from_iterable(lists):
        if x is not None and x.layout is strided and x.numel():
            memory = x._ttr_block if is_ref(x) else x.untyped_storage()._cdata
            extents.setdefault(memory, []).append(extent_of(x))
    neighbours = chain.from_iterable(pairwise(sorted(found)) for found in extents.values())
    return any(start < end for (_, end), (start, _) in neighbours)


def _roughly_nbytes(lists: Sequence[Sequence[Any]]) -> int:
    """Return what lists take if all are as large as the first: each step asks for it."""
    first_nbytes: int = sum(x.nbytes for x in lists[0] if is_ref(x))
    return first_nbytes * len([1 for tensors in lists if tensors])


def _sizes_of(lists: Sequence[Sequence[Any]]) -> list[int]:
    """Return for each place the bytes of what the lists have there; some have nothing at all."""
    full = [tensors for tensors in lists if tensors]
    return [sum(x.nbytes for x in together if is_ref(x)) for together in zip(*full, strict=True)]


def _parts(sizes: Sequence[int], most_nbytes: float) -> Iterator[slice]:
    """Yield the places of one group after the other: as many as fit, one at least."""
    first, nbytes = 0, 0
    for place, size in enumerate(sizes):
        if place > first and nbytes + size > most_nbytes:
            yield slice(first, place)
            first, nbytes = place, 0
        nbytes += size
    yield slice(first, len(sizes))
