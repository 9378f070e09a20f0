"""What Flow knows to be on the device and what to be missing, each in the order of its next use.

It is told what comes and goes, and looks at all of it only now and then, so that an event takes
O(log n) in the long run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from ...strategy import Access, BlockSnapshot
from .by_next_use import ByKey
from .eviction_order import EvictionOrder, Placed
from .forecaster import Forecaster, Look, Wanted, horizon_of
from .history import NEVER
from .positions import is_foreseen, position_of
from .small_blocks import SmallBlocks

#: The next victims, as a share of the budget, are copied home early.
WRITE_BACK_SHARE = 3 / 4
#: The order is worked out anew at most once in so many accesses, as a share of what is there, in
#: the long run; so often in a row.
RENEWAL_SHARE = 1 / 64
RENEWALS_IN_A_ROW = 8
#: Of more than so many blocks, there and foreseen, it is worked out still less often.
MANY_COUNT = 1024
#: Dirty blocks looked at, in the order of their writing.
LOOKED_AT_COUNT = 16
#: How often the reach of early copies home is worked out, likewise.
NEAR_SHARE = 1 / 16


class Stock:
    """Blocks that last, on the device and missing, and the temporaries on it.

    Attributes
    ----------
    is_void : bool
        The forecast has changed: positions worked out before mean nothing.
    may_be_dirty : dict of int to None
        Blocks that are perhaps newer than their home, written first first.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        self.is_void = True
        self.may_be_dirty: dict[int, None] = {}
        self._forecaster = forecaster
        self._order = EvictionOrder()
        self._dirty = ByKey()  # by the position of the next use, negated
        self._due = ByKey()  # what is there and foreseen, by the position of the next use
        self._missing = ByKey()  # what is not, likewise
        #: What lasts or is foreseen -> position of its last access, bytes.
        self._there: dict[int, tuple[int, int]] = {}
        self._temporaries: set[int] = set()  # those of it that need not last
        self._made: set[int] = set()  # by operators, and not accessed as what lasts
        self._small = SmallBlocks()
        self._limit_nbytes = self._decision_nbytes = 0
        self._near = 0.0  # what is used after so many accesses or more may go before long
        self._near_at = 0  # the position at which that is worked out anew
        self._has_counted, self._count_at = False, 0
        self._renewals_until = 0.0  # the position that pays for what was worked out so far

    def set_limit(self, limit_nbytes: int, decision_nbytes: int = 0) -> None:
        """Work with another budget from now on, on a device where decisions cost so much."""
        self._limit_nbytes, self._decision_nbytes = limit_nbytes, decision_nbytes
        self._small.set_limit(limit_nbytes)
        self.is_void = True

    # -- what happens ------------------------------------------------------------------------

    def use(self, access: Access) -> None:
        """Note a use, which brings the block here if it was missing."""
        block_id = access.block_id
        if access.is_at_home and not access.was_resident:
            if access.is_persistent:
                self._note_missing(block_id)
            return
        if not access.is_persistent:
            self._use_temporary(block_id, access.nbytes)
            return
        self._temporaries.discard(block_id)
        if block_id in self._made:
            self._made.discard(block_id)
            self._order.forget(block_id)
            self._note_written(block_id)
        elif access.is_write:
            self._note_written(block_id)
        self.arrive(block_id, access.nbytes)

    def birth(self, block_id: int, nbytes: int, *, stays: bool) -> None:
        """Note a result of an operator: one that will stay, or a temporary."""
        if stays:
            self.may_be_dirty[block_id] = None
            self.arrive(block_id, nbytes)
        else:
            self._use_temporary(block_id, nbytes)
        self._made.add(block_id)

    def _use_temporary(self, block_id: int, nbytes: int) -> None:
        """Put a temporary where it is foreseen, or else by its age."""
        if is_foreseen(self._forecaster, block_id):
            self._temporaries.add(block_id)
            self.arrive(block_id, nbytes)
        elif block_id not in self._there:
            self._order.note_fresh(block_id)

    def arrive(self, block_id: int, nbytes: int) -> None:
        """Note that a block which lasts is there, or about to be."""
        self._there[block_id] = (self._forecaster.end, nbytes)
        self._missing.forget(block_id)
        if self.is_void:
            return
        self._put(block_id, nbytes)

    def _put_passed_again(self) -> None:
        """Put what was not used where it was foreseen where it is foreseen now, if it is."""
        for passed in self._due.take_below(self._forecaster.cursor):
            is_named = self._order.is_named(passed)
            if not self._is_over(passed):
                self._put(passed, self._there[passed][1], is_named=is_named)

    def _note_missing(self, block_id: int) -> None:
        """Put a block that is not there where it is used next, if it is."""
        distance = self._forecaster.next_use(block_id)
        if distance == NEVER or self._forecaster.is_chosen(block_id):
            self._missing.forget(block_id)
        else:
            self._missing.note(block_id, self._forecaster.cursor + distance)

    def name(self, block_id: int) -> None:
        """Leave a block out of what may be given back ahead of need, until it is used."""
        if block_id in self._there:
            self._order.name(block_id, self._there[block_id][1])

    def evict(self, block_id: int) -> None:
        """Note that a block is not there any more."""
        self._order.forget(block_id)
        self._due.forget(block_id)
        self.note_clean(block_id)
        is_temporary = block_id in self._temporaries
        self._temporaries.discard(block_id)
        if self._there.pop(block_id, None) is None or is_temporary:
            return
        self._note_missing(block_id)

    def death(self, block_id: int) -> None:
        """Forget a block."""
        self._order.forget(block_id)
        self._due.forget(block_id)
        self.note_clean(block_id)
        self._there.pop(block_id, None)
        self._missing.forget(block_id)
        self._made.discard(block_id)
        self._temporaries.discard(block_id)
        self._small.forget(block_id)

    def note_clean(self, block_id: int) -> None:
        """Note that a block has a current copy at home."""
        self.may_be_dirty.pop(block_id, None)
        self._dirty.forget(block_id)

    def _note_written(self, block_id: int) -> None:
        self.may_be_dirty.pop(block_id, None)
        self.may_be_dirty[block_id] = None

    # -- in order ----------------------------------------------------------------------------

    def is_in_order(self, blocks: Sequence[BlockSnapshot], *, is_all: bool = False) -> bool:
        """Put into order what has to be, and say whether it could be.

        Parameters
        ----------
        blocks : sequence of BlockSnapshot
            What the device holds, or those of it that nobody keeps there.
        is_all : bool, optional
            It is all that the device holds.

        Notes
        -----
        All that is there is gone through once in as many accesses. Where the forecast changes more
        often than that, there is none to follow.
        """
        end = self._forecaster.end
        if not self._has_counted or (is_all and end >= self._count_at):
            self._count(blocks, is_all=is_all)
        elif not self.is_void:
            return True
        count = len(self._there)
        price = RENEWAL_SHARE * count * max(1, (count + horizon_of(self._forecaster)) / MANY_COUNT)
        if self._renewals_until > end + RENEWALS_IN_A_ROW * price:
            return False
        self._renewals_until = max(self._renewals_until, end) + price
        self._renew()
        return True

    def _count(self, blocks: Sequence[BlockSnapshot], *, is_all: bool) -> None:
        """Go through all that is there: some may have come or gone unheard."""
        known, self.is_void = self._there, True
        if is_all:
            self._there = {}
            self._has_counted = True
        for block in sorted(blocks, key=lambda block: block.last_use):
            block_id = block.block_id
            if block.is_persistent or block_id in known:
                if block.is_persistent:
                    self._temporaries.discard(block_id)
                self._there[block_id] = (known.get(block_id, (0,))[0], block.nbytes)
                if block.is_dirty:
                    self.may_be_dirty.setdefault(block_id)
                else:
                    self.note_clean(block_id)
            else:
                self._order.note_fresh(block_id)
        self._count_at = self._forecaster.end + self._forecaster.distinct_count + 64

    def _renew(self) -> None:
        """Work out every position anew."""
        forecaster = self._forecaster
        self.is_void = False
        self._order.clear(self._limit_nbytes, self._decision_nbytes)
        self._small.clear()
        for block_id in self._order.fresh.numbers():
            if is_foreseen(forecaster, block_id):
                self._order.forget(block_id)
                self._temporaries.add(block_id)
                self._there[block_id] = (0, forecaster.nbytes(block_id))
        due: dict[int, float] = {}
        placed: list[Placed] = []
        for block_id, (_, nbytes) in list(self._there.items()):
            if block_id not in self._temporaries or not self._is_over(block_id):
                position, again, is_dirty = self._position(block_id, nbytes)
                is_small = block_id in self._small.numbers
                placed.append((block_id, nbytes, position, is_dirty, is_small))
                if again is not None:
                    due[block_id] = again
        dirty = {
            block_id: -position
            for block_id, nbytes, position, is_dirty, _ in placed
            if is_dirty and nbytes > self._decision_nbytes
        }
        self._order.fill(placed)
        self._due.fill(due)
        self._dirty.fill(dirty)
        missing: dict[int, float] = {}
        for distance, block_id in forecaster.upcoming(horizon_of(forecaster)):
            if block_id not in self._there and block_id not in missing:
                missing[block_id] = forecaster.cursor + distance
                self._small.note(block_id, forecaster.nbytes(block_id))
        self._missing.fill(missing)

    def _is_over(self, block_id: int) -> bool:
        """Whether nothing is foreseen of a temporary; then it goes by its age from now on."""
        if block_id not in self._temporaries or is_foreseen(self._forecaster, block_id):
            return False
        del self._there[block_id]
        self._temporaries.discard(block_id)
        self._order.forget(block_id)
        self._order.note_fresh(block_id)
        return True

    def _put(self, block_id: int, nbytes: int, *, is_named: bool = False) -> None:
        """Put a block where its next use says."""
        position, again, is_dirty = self._position(block_id, nbytes)
        if again is not None:
            self._due.note(block_id, again)
        self._order.note(
            block_id,
            nbytes,
            position,
            is_dirty=is_dirty,
            is_small=block_id in self._small.numbers,
            is_named=is_named,
        )
        if is_dirty and nbytes > self._decision_nbytes:
            self._dirty.note(block_id, -position)

    def _position(self, block_id: int, nbytes: int) -> tuple[float, float | None, bool]:
        """Return a block's position, the one at which it is put anew, and whether it is dirty."""
        is_dirty = block_id in self.may_be_dirty
        position, again, is_used = position_of(
            self._forecaster,
            block_id,
            nbytes,
            self._there[block_id][0],
            is_dirty=is_dirty,
            is_temporary=block_id in self._temporaries,
            decision_nbytes=self._decision_nbytes,
        )
        if is_used:
            self._small.note(block_id, nbytes)
        return position, again, is_dirty

    def _distance_of_the_next(self, nbytes: float) -> float:
        """Return after how many accesses the soonest used of the next victims is used.

        Parameters
        ----------
        nbytes : float
            How many victims: those that come to so many bytes.

        Notes
        -----
        Worked out anew once in so many accesses, as a share of what is there.
        """
        end = self._forecaster.end
        if end < self._near_at:
            return self._near
        self._near_at, self._near = end + int(NEAR_SHARE * len(self._there)) + 1, 0.0
        there, cursor = self._there, self._forecaster.cursor
        small = self._small.numbers if self._small.are_kept else ()
        for position, block_id in self._order.farthest_first():
            if block_id in there and block_id not in small:
                nbytes -= there[block_id][1]
                if nbytes <= 0:
                    self._near = position - cursor
                    break
        return self._near

    def has(self, block_id: int) -> bool:
        """Whether a block that lasts is there, or about to be."""
        return block_id in self._there

    # -- looked at ---------------------------------------------------------------------------

    def victims(self, look: Look, newest: int) -> Iterator[tuple[float, BlockSnapshot]]:
        """Yield (distance, block) of what may be given back ahead of need, best first."""
        self._put_passed_again()
        kinds = {"with_small": not self._small.are_kept, "with_fresh": False, "with_named": False}
        return self._order.best_first(self._forecaster.cursor, newest, look, **kinds)

    def all_victims(self, look: Look, newest: int) -> Iterator[BlockSnapshot]:
        """Yield what may be given back, best first, and at last what is small and recurs."""
        self._put_passed_again()
        keeps_small, yielded = self._small.are_kept, set()
        cursor, end = self._forecaster.cursor, self._forecaster.end
        best_first = partial(self._order.best_first, cursor, newest, look, end=end, with_fresh=True)
        for _, block in best_first(with_small=not keeps_small):
            yielded.add(block.block_id)
            yield block
        for _, block in best_first(with_small=True) if keeps_small else ():
            if block.block_id not in yielded:
                yield block

    @property
    def missing_count(self) -> int:
        """How many blocks are foreseen and not there."""
        return len(self._missing)

    def missing(self) -> Iterator[Wanted]:
        """Yield what is foreseen and not there, in the order of use."""
        forecaster = self._forecaster
        cursor = forecaster.cursor
        for passed in self._missing.take_below(cursor):
            self._note_missing(passed)  # it was not used where it was foreseen
        limit = cursor + horizon_of(forecaster)
        for position, block_id in self._missing.ascending():
            if position >= limit:
                return
            yield int(position) - cursor, block_id, forecaster.nbytes(block_id)

    def oldest_dirty(self, look: Look) -> Iterator[BlockSnapshot]:
        """Yield dirty blocks, those written first first, of which `dirty_ones` says as much."""
        for block_id in list(islice(self.may_be_dirty, LOOKED_AT_COUNT)):
            block = look(block_id)
            if block is None or not block.is_dirty:
                self.note_clean(block_id)
            elif block.nbytes > self._decision_nbytes:
                yield block

    def dirty_ones(self, look: Look, soon: int) -> Iterator[BlockSnapshot]:
        """Yield the dirty blocks among the next victims, the farthest first.

        Without those that are copied home in less time than it takes to decide about them: there
        is nothing to be gained by doing that early, and they may be written again.

        Parameters
        ----------
        soon : int
            What is used after fewer accesses is left out: it may be written again.
        """
        if not self._dirty:
            return
        self._put_passed_again()
        near = self._distance_of_the_next(WRITE_BACK_SHARE * self._limit_nbytes)
        cursor, least = self._forecaster.cursor, max(near, soon)
        for key, block_id in self._dirty.ascending():
            if -key - cursor < least:
                return
            block = look(block_id)
            if block is None or not block.is_dirty:
                self.note_clean(block_id)
            elif self._small.are_kept and block_id in self._small.numbers:
                self._dirty.forget(block_id)  # until it is used again
            elif block.is_persistent:
                yield block
