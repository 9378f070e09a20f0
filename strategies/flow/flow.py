"""Learn the order in which the program uses its blocks; keep what pays, fetch the rest in time.

Evicted is the block with the largest `distance / cost per byte`: the farthest forecast use, less
readily if giving it back takes a copy. Prefetched are the blocks missing, in the order of their
next use, as long as none is given up for one that is used later ("do no harm"). Where the forecast
is not worth following, which two ghost caches and its own record of hits tell, it does as LRU does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from typing import NamedTuple

from ...strategy import (
    PERSISTENT_AFTER,
    Access,
    BlockSnapshot,
    DeviceSnapshot,
    Prefetch,
    Strategy,
)
from ..lru import until_freed
from .by_next_use import Farthest
from .forecaster import Forecaster, Look, look_into, newest_of
from .ghost_cache import Referee
from .history import NEVER, History
from .latest_start import LatestStart
from .scores import (
    DIRTY_COST,
    SMALL_TOTAL_SHARE,
    UNFORESEEN,
    by_score,
    cost_per_byte,
    small_limit_nbytes,
)
from .transient_peak import TransientPeak

MIB = 2**20

#: Copies queued ahead of need: the first always may, others while they are small.
QUEUE_COUNT = 4
QUEUE_NBYTES = 256 * MIB
QUEUE_SHARE = 1 / 64
#: The next victims, as a share of the budget, are copied home early.
WRITE_BACK_SHARE = 3 / 4
#: ... once less than this share is free.
FREE_SHARE = 1 / 2
#: They are queued up to so many, and up to this share of the budget.
WRITE_BACK_COUNT = 4
WRITE_BACK_QUEUE_SHARE = 1 / 4
#: Blocks looked at, in the order of their writing, where the forecast is not followed.
LOOKED_AT_COUNT = 16
#: What is used within so many accesses, or a quarter of the period, may be written again.
SOON = 24
#: Forecasts are followed above the first, and fetched ahead of above the second.
VICTIM_CONFIDENCE = 0.35
PREFETCH_CONFIDENCE = 0.8

#: Looked at again when less than this share of what is looked ahead is known to be there.
LOOK_AGAIN_SHARE = 3 / 4

#: Operators after which a result that is still there is one to be followed: a gradient that is
#: added to, an activation that backward needs.
STAYS_AFTER = 100
#: Results below this share of the budget are nobody's concern.
TINY_SHARE = 1 / 4096


def _later_first(entry: tuple[int, float]) -> float:
    return -entry[1]


class _Wanted(NamedTuple):
    """A block that is missing and will be used."""

    distance: int
    block_id: int
    nbytes: int


class Flow(Strategy):
    """Follow the program's recorded flow; as good as LRU where there is none.

    Parameters
    ----------
    forecaster : Forecaster, optional
        What foretells the accesses; a fresh `History` by default.
    queue_count : int
        The most copies in flight that it asks for ahead of need.
    """

    name = "flow"
    watches_accesses = True

    def __init__(
        self, forecaster: Forecaster | None = None, *, queue_count: int = QUEUE_COUNT
    ) -> None:
        self.history: Forecaster = History() if forecaster is None else forecaster
        self.queue_count = queue_count
        self.referee = Referee(self.history.next_use)
        self._room = TransientPeak()
        self._order = Farthest()
        self._small_order = Farthest()
        self._dirty_order = Farthest()
        self._near = 0.0  # what is used after so many accesses or more may go before long
        self._order_is_void = True
        self._accesses_until_void = 0
        self._small: dict[int, int] = {}
        self._small_nbytes = 0
        self._may_be_dirty: dict[int, None] = {}  # written first comes first
        self._made: set[int] = set()
        self._gate = LatestStart()
        self._limit_nbytes = 0
        self._small_limit = 0
        self._leap_count = 0
        self._present_until = 0  # up to this position all that comes is known to be there
        self._wait_until_ns = 0  # on the compute clock: nothing is urgent before

    # -- what happens ------------------------------------------------------------------------

    def on_access(self, access: Access) -> None:
        """Record it; hold what was fetched against what LRU would have fetched."""
        block_id, nbytes = access.block_id, access.nbytes
        history = self.history
        history.access(block_id, nbytes, access.struct, is_persistent=access.is_persistent)
        if access.is_persistent:
            self._room.advance(history.start, history.end)
        if history.leap_count != self._leap_count:
            self._leap_count = history.leap_count
            self._order_is_void = True
            self._look_again()
        elif not access.was_resident:
            self._look_again()
        self._note_use(access)
        if self._limit_nbytes:
            fetched_nbytes = 0 if access.was_resident else nbytes
            self.referee.access(
                block_id,
                nbytes,
                fetched_nbytes,
                self._limit_nbytes,
                is_followed=history.confidence >= VICTIM_CONFIDENCE,
            )

    def on_birth(self, block_id: int, nbytes: int, place: int) -> int:
        """Record where an operator made a block; say whether such a one stayed before."""
        self._room.birth(block_id, nbytes, self.history.end)
        self._made.add(block_id)
        if self._limit_nbytes:
            self.referee.birth(block_id, nbytes, self._limit_nbytes)
        if nbytes < self._limit_nbytes * TINY_SHARE:
            return PERSISTENT_AFTER
        if not self.history.birth(block_id, nbytes, place):
            return STAYS_AFTER
        self._may_be_dirty[block_id] = None
        if not self._order_is_void:
            self._note_position(block_id, nbytes, is_persistent=True)
        return 0

    def on_death(self, block_id: int) -> None:
        """Forget a block."""
        self.history.death(block_id)
        self._room.death(block_id)
        for order in (self._order, self._small_order, self._dirty_order):
            order.forget(block_id)
        self._small_nbytes -= self._small.pop(block_id, 0)
        self._may_be_dirty.pop(block_id, None)
        self._made.discard(block_id)
        self.referee.death(block_id)

    # -- what to do about it -----------------------------------------------------------------

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the blocks whose next use is farthest, dirty ones later than clean ones."""
        self._set_limit(device.limit_nbytes)
        self._look_again()
        if not self._follows(VICTIM_CONFIDENCE):
            return until_freed(candidates, need_nbytes)
        return list(until_freed(by_score(self.history, device, candidates), need_nbytes))

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        """Return the next blocks missing, each with victims that are used later than it is."""
        self._set_limit(device.limit_nbytes)
        history = self.history
        self._gate.advance(device, history.start, history.end)
        if not self._may_queue(device) or not self._follows(PREFETCH_CONFIDENCE):
            return ()
        if self._present_until > history.end + LOOK_AGAIN_SHARE * self._horizon():
            return ()
        look = look_into(resident)
        wanted = list(islice(self._missing(look), self.queue_count))
        if not wanted or self._can_wait(device, look):
            return ()
        self._put_in_order(resident)
        return self._issue(device, look, wanted, newest_of(resident))

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        """Hold what is fetched ahead against what LRU would have fetched."""
        self.referee.prefetched(nbytes, self._limit_nbytes)

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return the dirty blocks among those that are evicted next, if it will come to that.

        What waits on the link home does not delay what is queued behind it, as long as the other
        engines are not idle meanwhile.
        """
        self._set_limit(device.limit_nbytes)
        busy_until_ns = max(device.now_ns, device.compute_free_ns, device.link_free_ns)
        if not self._may_be_dirty or device.d2h_free_ns > busy_until_ns:
            return ()
        if device.free_nbytes > device.limit_nbytes * FREE_SHARE:
            return ()
        if not self._follows(VICTIM_CONFIDENCE):
            return self._oldest_dirty(look_into(resident))
        self._put_in_order(resident)
        return self._farthest_dirty(device, look_into(resident))

    def _farthest_dirty(self, device: DeviceSnapshot, look: Look) -> list[int]:
        """Return the dirty blocks used last, of those that are among the next victims."""
        queue_nbytes = min(QUEUE_NBYTES, int(device.limit_nbytes * WRITE_BACK_QUEUE_SHARE))
        leaving: list[int] = []
        cursor, order = self.history.cursor, self._dirty_order
        least = max(self._near, min(SOON, self.history.period // 4) + 1)
        for block_id, position in order.descending():
            if position - cursor < least:
                break
            block = look(block_id)
            if block is None or not block.is_dirty:
                order.forget(block_id)
            elif block.is_persistent and not (self._keeps_small and block_id in self._small):
                queue_nbytes -= block.nbytes
                if leaving and queue_nbytes < 0:
                    break
                leaving.append(block_id)
                if len(leaving) >= WRITE_BACK_COUNT:
                    break
        return leaving

    def _oldest_dirty(self, look: Look) -> list[int]:
        """Return the dirty blocks written first, for victims are chosen by age."""
        leaving: list[int] = []
        for block_id in list(islice(self._may_be_dirty, LOOKED_AT_COUNT)):
            block = look(block_id)
            if block is not None and block.is_dirty:
                leaving.append(block_id)
                if len(leaving) >= WRITE_BACK_COUNT:
                    break
            else:
                del self._may_be_dirty[block_id]
        return leaving

    # -- how it is decided -------------------------------------------------------------------

    def _set_limit(self, limit_nbytes: int) -> None:
        if limit_nbytes != self._limit_nbytes:
            self._limit_nbytes = limit_nbytes
            self._small_limit = small_limit_nbytes(limit_nbytes)
            self._order_is_void = True

    def _follows(self, least_confidence: float) -> bool:
        return self.referee.is_followed and self.history.confidence >= least_confidence

    def _note_use(self, access: Access) -> None:
        """Note what follows from a use: when the next one is, and what may be dirty."""
        block_id = access.block_id
        if access.is_persistent and (access.is_write or block_id in self._made):
            self._may_be_dirty.pop(block_id, None)
            self._may_be_dirty[block_id] = None
            self._made.discard(block_id)
        self._accesses_until_void -= 1
        if not self._order_is_void:
            self._note_position(block_id, access.nbytes, is_persistent=access.is_persistent)

    def _note_position(self, block_id: int, nbytes: int, *, is_persistent: bool) -> None:
        history = self.history
        distance = history.next_use(block_id)
        if distance != NEVER:
            position = history.cursor + distance
            if nbytes <= self._small_limit and block_id not in self._small:
                self._small[block_id] = nbytes
                self._small_nbytes += nbytes
                self._order.forget(block_id)
        elif is_persistent:
            position = UNFORESEEN - history.end
        else:
            return
        order = self._small_order if block_id in self._small else self._order
        order.note(block_id, position)
        if block_id in self._may_be_dirty:
            self._dirty_order.note(block_id, position)

    @property
    def _keeps_small(self) -> bool:
        """Whether small blocks that recur are few enough to be kept, all of them."""
        return self._small_nbytes <= self._limit_nbytes * SMALL_TOTAL_SHARE

    def _put_in_order(self, resident: Sequence[BlockSnapshot]) -> None:
        """Work the order out anew where the forecast has changed, and now and then."""
        if not self._order_is_void and self._accesses_until_void > 0:
            return
        self._order_is_void = False
        self._accesses_until_void = self.history.distinct_count + 64
        for order in (self._order, self._small_order, self._dirty_order):
            order.clear()
        nbytes_of = {}
        for block in sorted(resident, key=lambda block: -block.last_use):
            if block.is_dirty:
                self._may_be_dirty.setdefault(block.block_id)
            self._note_position(block.block_id, block.nbytes, is_persistent=block.is_persistent)
            nbytes_of[block.block_id] = block.nbytes
        self._near = self._distance_of_the_next(WRITE_BACK_SHARE * self._limit_nbytes, nbytes_of)

    def _distance_of_the_next(self, nbytes: float, nbytes_of: dict[int, int]) -> float:
        """Return after how many accesses the soonest used of the next victims is used.

        Parameters
        ----------
        nbytes : float
            How many victims: those that come to so many bytes.
        """
        distance = 0.0
        for block_id, position in self._order.descending():
            distance = position - self.history.cursor
            nbytes -= nbytes_of[block_id]
            if nbytes <= 0:
                return distance
        return 0.0

    def _by_distance(
        self, device: DeviceSnapshot, look: Look, dirty_cost: float
    ) -> Iterator[tuple[float, BlockSnapshot]]:
        """Yield (distance, block) of what may be given back ahead of need, best first."""
        cursor = self.history.cursor
        farthest: Iterator[tuple[int, float]] = self._order.descending()
        if not self._keeps_small:
            farthest = merge(farthest, self._small_order.descending(), key=_later_first)
        dearer: list[tuple[float, int, float, BlockSnapshot]] = []
        for block_id, position in farthest:
            block = look(block_id)
            if block is None:
                self._order.forget(block_id)
                self._small_order.forget(block_id)
                continue
            distance = position - cursor
            cost = cost_per_byte(block, device, dirty_cost)
            while dearer and -dearer[0][0] >= distance:
                yield heappop(dearer)[2:]
            heappush(dearer, (-distance / cost, block_id, distance, block))
        while dearer:
            yield heappop(dearer)[2:]

    def _look_again(self) -> None:
        self._present_until = 0
        self._wait_until_ns = 0

    def _horizon(self) -> int:
        """How far to look for missing blocks: long enough to meet each that recurs."""
        return min(self.history.period, 2 * self.history.distinct_count + 32)

    def _may_queue(self, device: DeviceSnapshot) -> bool:
        limit_nbytes = min(QUEUE_NBYTES, device.limit_nbytes * QUEUE_SHARE)
        return device.in_flight_count == 0 or (
            device.in_flight_count < self.queue_count and device.in_flight_nbytes < limit_nbytes
        )

    def _missing(self, look: Look) -> Iterator[_Wanted]:
        """Yield the blocks that will be used and are not there, in the order of use.

        Notes
        -----
        Where nothing is missing is remembered, so that a long run of hits is gone through once.
        """
        history = self.history
        horizon = self._horizon()
        known = max(0, self._present_until - history.end)
        seen: set[int] = set()
        for distance, block_id in history.upcoming(horizon, known):
            if block_id in seen or look(block_id) is not None:
                continue
            if not seen:
                self._present_until = history.end + distance
            seen.add(block_id)
            yield _Wanted(distance, block_id, history.nbytes(block_id))
        if not seen:
            self._present_until = history.end + horizon

    def _can_wait(self, device: DeviceSnapshot, look: Look) -> bool:
        """Say whether compute is so far behind the link that no copy has to start yet."""
        if not device.compute_ns:
            return False
        if device.compute_ns < self._wait_until_ns:
            return True
        queue = ((wanted.distance, wanted.nbytes) for wanted in self._missing(look))
        slack_ns = self._gate.slack_ns(device, self.history.cursor, queue)
        self._wait_until_ns = device.compute_ns + int(slack_ns)
        return slack_ns > 0

    def _issue(
        self, device: DeviceSnapshot, look: Look, wanted: list[_Wanted], newest: int
    ) -> list[Prefetch]:
        """Choose copies and their victims until the queue is full or the next would do harm."""
        history = self.history
        room_nbytes = device.free_nbytes
        queue_nbytes = min(QUEUE_NBYTES, device.limit_nbytes * QUEUE_SHARE)
        queue_nbytes -= device.in_flight_nbytes
        queue_count = self.queue_count - device.in_flight_count
        victims_left = self._at_rest(device, look, newest)
        issued: list[Prefetch] = []
        coming: list[tuple[int, float]] = []
        for distance, block_id, nbytes in wanted:
            is_first = not issued and device.in_flight_count == 0
            if len(issued) >= queue_count or (not is_first and nbytes > queue_nbytes):
                break
            reserve_nbytes = self._room.reserve_nbytes(history.cursor, distance)
            reserve_nbytes = min(reserve_nbytes, device.limit_nbytes // 2)
            victims: list[BlockSnapshot] = []
            room_nbytes -= nbytes
            while room_nbytes < reserve_nbytes:
                next_use, victim = next(victims_left, (0.0, None))
                if victim is None or next_use <= distance:
                    return self._noted(issued, coming, victims_left)
                victims.append(victim)
                room_nbytes += victim.nbytes
            queue_nbytes -= nbytes
            coming.append((block_id, history.cursor + distance))
            issued.append(Prefetch(block_id, tuple(victim.block_id for victim in victims)))
        return self._noted(issued, coming, victims_left)

    def _noted(
        self,
        issued: list[Prefetch],
        coming: list[tuple[int, float]],
        victims_left: Generator[tuple[float, BlockSnapshot], None, None],
    ) -> list[Prefetch]:
        victims_left.close()  # what it has looked at goes back into the order
        for wish in issued:
            for victim in wish.victims:
                self._order.forget(victim)
                self._small_order.forget(victim)
        for block_id, position in coming:
            order = self._small_order if block_id in self._small else self._order
            order.note(block_id, position)
        return issued

    def _at_rest(
        self, device: DeviceSnapshot, look: Look, newest: int
    ) -> Generator[tuple[float, BlockSnapshot], None, None]:
        """Leave out what the last operator uses, if a copy in its place had to wait too long.

        The block used last is the one that is used again last: the best victim, once the operator
        is through. Meanwhile the link idles. To spare the block costs a block's bytes per period.
        """
        dirty_cost = DIRTY_COST
        idle_ns = device.compute_free_ns - max(device.link_free_ns, device.now_ns)
        idle_nbytes = max(0, idle_ns) * device.h2d_bytes_per_s / 1e9
        excess_nbytes = self.history.living_nbytes - device.limit_nbytes
        for distance, block in self._by_distance(device, look, dirty_cost):
            if block.last_use == newest and (
                not device.compute_free_ns or idle_nbytes * excess_nbytes >= block.nbytes**2
            ):
                continue
            yield distance, block
