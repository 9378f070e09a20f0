"""What Flow asks of a forecast, and of what the manager shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ...strategy import BlockSnapshot

#: Describes a block that the device holds; None for any other.
Look = Callable[[int], BlockSnapshot | None]
#: A block that is missing and will be used: after how many accesses, its number, its bytes.
Wanted = tuple[int, int, int]


class Forecaster(Protocol):
    """What Flow asks of a forecast. `History` is the one; tests plug in worse ones."""

    start: int
    end: int
    cursor: int
    leap_count: int
    living_nbytes: int
    largest_nbytes: int

    def access(
        self, block_id: int, nbytes: int, struct: int, *, is_persistent: bool = True
    ) -> None:
        """Note that the program uses a block."""

    def expect_the_beginning(self) -> None:
        """Expect the program to do again what is recorded, from its first access on."""

    def birth(self, block_id: int, nbytes: int, place: int = 0) -> bool:
        """Note that an operator has made a block; say whether it is to be taken for persistent."""

    def death(self, block_id: int) -> None:
        """Note that a block is gone."""

    def next_use(self, block_id: int) -> float:
        """Return after how many accesses a block is used."""

    def is_chosen(self, block_id: int) -> bool:
        """Say whether the data chooses if a block is used where it is foreseen."""

    def next_end(self, block_id: int) -> float:
        """Return after how many accesses a block is gone, or another takes its place."""

    def upcoming(self, limit: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (distance, block) of the accesses to come, from `first` to before `limit`."""

    def next_ones(self, limit: int) -> Iterator[int]:
        """Yield the next accesses, as (block, struct), while they are of living blocks."""

    def nbytes(self, block_id: int) -> int:
        """Return the size of a living block."""

    @property
    def distinct_count(self) -> int:
        """How many identities are known."""

    @property
    def period(self) -> int:
        """How many accesses the forecast reaches ahead before it repeats itself."""

    @property
    def confidence(self) -> float:
        """How often it has been right of late."""


def horizon_of(forecaster: Forecaster) -> int:
    """Return how far to look for missing blocks: far enough to meet each that recurs."""
    return min(forecaster.period, 2 * forecaster.distinct_count + 32)


def look_into(resident: Sequence[BlockSnapshot]) -> Look:
    """Return a function that describes one block, or says that it is not there."""
    look: Look | None = getattr(resident, "get", None)
    return look or {block.block_id: block for block in resident}.get


def newest_of(resident: Sequence[BlockSnapshot]) -> int:
    """Return the number of the last operator."""
    newest: int | None = getattr(resident, "newest", None)
    if newest is None:
        newest = max((block.last_use for block in resident), default=0)
    return newest
