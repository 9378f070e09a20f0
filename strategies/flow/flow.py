"""Learn the order in which the program uses its blocks; keep what pays, fetch the rest in time.

Evicted is the block with the largest `distance / cost per byte`: the farthest forecast use, less
readily if giving it back takes a copy. Prefetched are the blocks missing, in the order of their
next use, as long as none is given up for one that is used later ("do no harm"). Where the forecast
is not worth following, which two ghost caches and its own record of hits tell, it does as LRU does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile

from ...strategy import (
    Access,
    Birth,
    BlockSnapshot,
    Death,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
    until_freed,
)
from .alike import Alike
from .at_home import AtHome
from .forecaster import Forecaster, Look, Wanted, horizon_of, look_into, newest_of
from .ghost_cache import Referee
from .guess import EXPECTED_COUNT, Guess
from .history import History
from .latest_start import LatestStart
from .link_queue import LONG_QUEUE_COUNT, QUEUE_COUNT, QUEUE_NBYTES, LinkQueue
from .stock import Stock
from .transient_peak import TransientPeak

#: What is dirty is copied home, while that link idles, once less than this share is free.
FREE_SHARE = 1 / 2
#: They are queued up to so many, and up to this share of the budget.
WRITE_BACK_COUNT = 4
WRITE_BACK_QUEUE_SHARE = 1 / 4
#: What is used within so many accesses, or a quarter of the period, may be written again.
SOON = 24
#: Forecasts are followed above the first, and fetched ahead of above the second.
VICTIM_CONFIDENCE = 0.35
PREFETCH_CONFIDENCE = 0.8
#: Below this one, what is missing may as well not be used: what comes after it is expected, too.
EXACT_CONFIDENCE = 0.95
#: Looked at again when less than this share of what is looked ahead is known to be there.
LOOK_AGAIN_SHARE = 3 / 4

#: Operators after which a result that is still there is one to be followed: a gradient that is
#: added to, an activation that backward needs.
STAYS_AFTER = 100


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
    mixes_devices = True

    def __init__(
        self, forecaster: Forecaster | None = None, *, queue_count: int = QUEUE_COUNT
    ) -> None:
        self.history: Forecaster = History() if forecaster is None else forecaster
        self.referee = Referee(self.history.next_use)
        self._room = TransientPeak()
        self._stock = Stock(self.history)
        self._gate = LatestStart()
        self._queue = LinkQueue(queue_count)
        self._at_home = AtHome()
        self._guess = Guess()
        self._limit_nbytes = 0
        self._leap_count = 0
        self._present_until = 0  # up to this position all that comes is known to be there
        self._wait_until_ns = 0  # on the compute clock: nothing is urgent before

    # -- what happens ------------------------------------------------------------------------

    def on_access(self, access: Access) -> None:
        """Record it; hold what was fetched against what LRU would have fetched."""
        block_id, nbytes = access.block_id, access.nbytes
        if access.is_in_part:  # no reason to fetch all of it the next time
            self._stock.use(access)
            return
        history = self.history
        history.access(block_id, nbytes, access.struct, is_persistent=access.is_persistent)
        if access.is_persistent:
            self._room.advance(history.start, history.end)
        if history.leap_count != self._leap_count:
            self._leap_count = history.leap_count
            self._stock.is_void = True
            self._look_again()
        elif not (access.was_resident or access.is_at_home):
            self._look_again()
        self._stock.use(access)
        if access.is_persistent:
            self._at_home.use(access)
        if self._limit_nbytes:
            fetched_nbytes = 0 if access.was_resident or access.is_at_home else nbytes
            self._queue.moved(fetched_nbytes)
            self.referee.access(
                block_id,
                nbytes,
                fetched_nbytes,
                self._limit_nbytes,
                is_followed=history.confidence >= VICTIM_CONFIDENCE,
            )

    def on_foretold(self, events: Sequence[Access | Birth | Death]) -> None:
        """Record what is to come, and expect it from now on."""
        history, room = self.history, self._room
        for event in events:
            if isinstance(event, Access):
                block_id, nbytes, struct, is_persistent = event[:4]
                history.access(block_id, nbytes, struct, is_persistent=is_persistent)
                if is_persistent:
                    room.advance(history.start, history.end)
            elif isinstance(event, Birth):
                room.birth(event.block_id, event.nbytes, history.end)
                history.birth(*event)
            else:
                room.death(event.block_id)
                history.death(event.block_id)
        history.expect_the_beginning()
        self._stock.is_void = True
        self._look_again()

    def on_birth(self, block_id: int, nbytes: int, place: int) -> int:
        """Record where an operator made a block; say whether such a one stayed before."""
        self._room.birth(block_id, nbytes, self.history.end)
        if self._limit_nbytes:
            self.referee.birth(block_id, nbytes, self._limit_nbytes)
        stays = self.history.birth(block_id, nbytes, place)
        self._stock.birth(block_id, nbytes, stays=stays)
        return 0 if stays else STAYS_AFTER

    def on_evict(self, block_id: int) -> None:
        """Note that a block is missing from now on."""
        self._stock.evict(block_id)

    def on_death(self, block_id: int) -> None:
        """Forget a block."""
        self.history.death(block_id)
        self._room.death(block_id)
        self._stock.death(block_id)
        self._at_home.death(block_id)
        self.referee.death(block_id)

    # -- what to do about it -----------------------------------------------------------------

    def place(self, op: OpSnapshot) -> str:
        """Return the host for an operator whose weights are there, where it ends sooner."""
        offer = self._at_home.wants(op)
        return op.default_device if offer is None else offer.device

    def let_home_compute(self, is_allowed: bool) -> bool:
        """Say whether the host may compute from now on; return whether it did much of it."""
        was_open, self._at_home.is_allowed = self._at_home.is_open, is_allowed
        return was_open

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the blocks whose next use is farthest, dirty ones later than clean ones."""
        self._set_limit(device)
        self._look_again()
        is_lost = self.history.cursor < 0 or not self._follows(VICTIM_CONFIDENCE)
        if is_lost or not self._stock.is_in_order(candidates):
            return until_freed(candidates, need_nbytes)
        look, newest = look_into(candidates), newest_of(candidates)
        victims = Alike(device, ((0.0, one) for one in self._stock.all_victims(look, newest)))
        return until_freed(iter(lambda: victims.take(need_nbytes, -1.0), None), need_nbytes)

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        """Return the next blocks missing, each with victims that are used later than it is."""
        self._set_limit(device)
        history = self.history
        self._gate.advance(device, history.start, history.end)
        self._queue.look_at(device, history.end)
        if not self._may_queue(device) or not self._follows(PREFETCH_CONFIDENCE):
            return ()
        horizon = horizon_of(history)
        if self._present_until > history.end + LOOK_AGAIN_SHARE * horizon:
            return ()
        if device.compute_ns < self._wait_until_ns:
            return ()
        if not self._stock.is_in_order(resident, is_all=True):
            return ()
        look = look_into(resident)
        wanted = self._wanted(device, look)
        if not wanted:
            self._present_until = history.end + horizon
            return ()
        distance, *_ = wanted[0]
        self._present_until = history.end + distance
        if self._can_wait(device):
            return ()
        return self._issue(device, look, wanted, newest_of(resident))

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        """Hold what is fetched ahead against what LRU would have fetched."""
        self.referee.prefetched(nbytes, self._limit_nbytes)
        self._queue.moved(nbytes)
        self._stock.arrive(block_id, nbytes)

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return the dirty blocks among those that are evicted next, if it will come to that.

        What waits on the link home does not delay what is queued behind it, as long as the other
        engines are not idle meanwhile.
        """
        self._set_limit(device)
        busy_until_ns = max(device.now_ns, device.compute_free_ns, device.link_free_ns)
        if not self._stock.may_be_dirty or device.d2h_free_ns > busy_until_ns:
            return ()
        if device.free_nbytes > device.limit_nbytes * FREE_SHARE:
            return ()
        if self._follows(VICTIM_CONFIDENCE) and self._stock.is_in_order(resident, is_all=True):
            return self._farthest_dirty(device, look_into(resident))
        oldest = islice(self._stock.oldest_dirty(look_into(resident)), WRITE_BACK_COUNT)
        return [block.block_id for block in oldest]

    def _farthest_dirty(self, device: DeviceSnapshot, look: Look) -> list[int]:
        """Return the dirty blocks used last, of those that are among the next victims."""
        queue_nbytes = min(QUEUE_NBYTES, int(device.limit_nbytes * WRITE_BACK_QUEUE_SHARE))
        leaving: list[int] = []
        soon = min(SOON, self.history.period // 4) + 1
        for block in islice(self._stock.dirty_ones(look, soon), WRITE_BACK_COUNT):
            queue_nbytes -= block.nbytes
            if leaving and queue_nbytes < 0:
                break
            leaving.append(block.block_id)
        return leaving

    def expects(self, device: DeviceSnapshot) -> list[int]:
        """Return the blocks that are there and used next, as long as nothing is to be decided.

        That is while they are small, not worth a decision about each (`LinkQueue.brief_nbytes`). On
        a real accelerator also while nothing that is missing is urgent, or the link is busy with
        all that may be queued. And where nothing is fetched ahead.
        """
        history, has, most = self.history, self._stock.has, self._queue.brief_nbytes(device)
        likely = history.next_ones(EXPECTED_COUNT)
        if not self._follows(PREFETCH_CONFIDENCE):  # nothing is fetched ahead
            self._queue.is_brief = False
            return self._guess.these(filter(has, likely), history.end)
        briefly = takewhile(lambda one: history.nbytes(one) <= most, likely)
        small = list(dict.fromkeys(briefly))
        self._queue.is_brief = len(small) > 1
        if not (self._queue.is_brief or device.knows_compute_end):
            meanwhile = list(takewhile(has, self._meanwhile(device)))
            if meanwhile:
                return meanwhile
        if history.confidence < EXACT_CONFIDENCE:
            return self._guess.these(filter(has, small), history.end)
        return list(takewhile(has, small))

    def _meanwhile(self, device: DeviceSnapshot) -> Iterator[int]:
        """Yield what is used next, until something has to be decided."""
        quiet_ns: float = self._wait_until_ns - device.compute_ns
        if quiet_ns <= 0:
            if not self._may_queue(device):
                quiet_ns = self._queue.busy_ns(device)
            elif not self._stock.is_void and self._can_wait(device):
                quiet_ns = self._wait_until_ns - device.compute_ns
        history, compute_ns = self.history, self._gate.compute_ns
        if compute_ns(history.cursor, EXPECTED_COUNT):  # else nobody knows yet how long they take
            for ahead, block_id in enumerate(history.next_ones(EXPECTED_COUNT), 1):
                if compute_ns(history.cursor, ahead) > quiet_ns:
                    return
                yield block_id

    # -- how it is decided -------------------------------------------------------------------

    def _set_limit(self, device: DeviceSnapshot) -> None:
        if device.limit_nbytes != self._limit_nbytes:
            self._limit_nbytes = device.limit_nbytes
            self._stock.set_limit(device.limit_nbytes, device.decision_nbytes)

    def _follows(self, least_confidence: float) -> bool:
        return self.referee.is_followed and self.history.confidence >= least_confidence

    def _look_again(self) -> None:
        self._present_until = 0
        self._wait_until_ns = 0
        self._queue.next_nbytes = 0

    def _may_queue(self, device: DeviceSnapshot) -> bool:
        if self._at_home.is_open and device.in_flight_count:
            at_home = self._at_home
            is_near = at_home.idle_nbytes(device, at_home.longest_ns) > 0
            return is_near and device.in_flight_count < LONG_QUEUE_COUNT
        return self._queue.is_open(device)

    def _to_fetch(self, device: DeviceSnapshot) -> Iterator[Wanted]:
        """Yield of the blocks missing those that are not better used at home."""
        missing = self._stock.missing()
        if not self._at_home.is_open:
            return missing
        return self._at_home.in_time(device, self._gate, self.history.cursor, missing)

    def _wanted(self, device: DeviceSnapshot, look: Look) -> list[Wanted]:
        """Return the first blocks to fetch, as many as may be queued."""
        wanted = list(islice(self._to_fetch(device), self._queue.count))
        here = [block_id for _, block_id, _ in wanted if look(block_id) is not None]
        for block_id in here:
            self._stock.arrive(block_id, self.history.nbytes(block_id))
        return self._wanted(device, look) if here else wanted

    def _can_wait(self, device: DeviceSnapshot) -> bool:
        """Say whether compute is so far behind the link that no copy has to start yet."""
        if not device.compute_ns:
            return False
        history = self.history
        decisions_nbytes = device.decision_nbytes * self._stock.missing_count
        bounds = (
            history.living_nbytes + decisions_nbytes,
            history.largest_nbytes + device.decision_nbytes,
        )
        slack_ns = self._gate.slack_ns(device, history.cursor, self._to_fetch(device), bounds)
        if not device.knows_compute_end:
            # By the host's clock: the host may wait for the program's own reasons, and nothing is
            # started meanwhile.
            ahead = EXPECTED_COUNT if self._queue.is_brief else 1
            slack_ns = max(0.0, slack_ns - self._gate.compute_ns(history.cursor, ahead))
        self._wait_until_ns = device.compute_ns + int(slack_ns)
        return slack_ns > 0

    def _issue(
        self, device: DeviceSnapshot, look: Look, wanted: list[Wanted], newest: int
    ) -> list[Prefetch]:
        """Choose copies and their victims until the queue is full or the next would do harm."""
        history, room_nbytes = self.history, device.free_nbytes
        queue_nbytes = self._queue.nbytes(device) - device.in_flight_nbytes
        queue_count = self._queue.count - device.in_flight_count
        is_open = self._at_home.is_open
        if is_open:
            queue_nbytes = self._at_home.idle_nbytes(device, self._at_home.next_ns)
            queue_count = LONG_QUEUE_COUNT - device.in_flight_count
        self._queue.next_nbytes = 0
        issued: list[Prefetch] = []
        victims_left = Alike(device, self._at_rest(device, look, newest))
        for distance, block_id, nbytes in wanted:
            is_first = not issued and device.in_flight_count == 0
            is_too_much = queue_nbytes <= 0 if is_open else nbytes > queue_nbytes
            if len(issued) >= queue_count or (is_too_much and not is_first):
                self._queue.next_nbytes = nbytes
                break
            reserve_nbytes = self._room.reserve_nbytes(history.cursor, distance)
            reserve_nbytes = min(reserve_nbytes, device.limit_nbytes // 2)
            victims: list[BlockSnapshot] = []
            room_nbytes -= nbytes
            while room_nbytes < reserve_nbytes:
                victim = victims_left.take(nbytes, distance)
                if victim is None:
                    return self._named(issued)
                victims.append(victim)
                room_nbytes += victim.nbytes
            queue_nbytes -= nbytes
            issued.append(Prefetch(block_id, tuple(victim.block_id for victim in victims)))
        return self._named(issued)

    def _named(self, issued: list[Prefetch]) -> list[Prefetch]:
        """Name no victim twice: what is still on its way cannot go, and would stop all others."""
        for victim in chain.from_iterable(wish.victims for wish in issued):
            self._stock.name(victim)
        return issued

    def _at_rest(
        self, device: DeviceSnapshot, look: Look, newest: int
    ) -> Iterator[tuple[float, BlockSnapshot]]:
        """Leave out what the last operator uses, if a copy in its place had to wait too long.

        The block used last is the one that is used again last: the best victim, once the operator
        is through. Meanwhile the link idles. To spare the block costs a block's bytes per period.
        """
        idle_ns = device.compute_free_ns - max(device.link_free_ns, device.now_ns)
        idle_nbytes = max(0, idle_ns) * device.h2d_bytes_per_s / 1e9
        excess_nbytes = self.history.living_nbytes - device.limit_nbytes
        for distance, block in self._stock.victims(look, newest):
            if block.last_use == newest and (
                not device.knows_compute_end or idle_nbytes * excess_nbytes >= block.nbytes**2
            ):
                continue
            yield distance, block
