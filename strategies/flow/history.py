"""The recorded flow of a program, and what it says about the time to come.

The record is the sequence of accesses to persistent blocks. A *sticky cursor* points into its own
past: the future is taken to be what followed there. While the program does what it did then, the
cursor only moves on, through nested periods too (the optimizer after four micro-steps, the decoder
after twenty denoising steps). An access to another block by an equal operator is a substitution
and moves it on as well, unless the record knows the last accesses in this very order; results that
are accessed now and were not then are passed over (`tolerance.py`); anything else puts it where the
recent past agrees with the record longest.

A record is a hint. It never holds a block alive, and a wrong forecast may cost time, nothing else.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator

from .allocation_sites import AllocationSites
from .places import Places
from .routing import Routing
from .tolerance import PROGRAM_AGREEMENT, Tolerance

#: Accesses after a lost place whose contexts are indexed; what follows can be reached from them.
INDEXED_RUN = 24
#: Accesses to results of operators that may be missing from what was foreseen, one after another.
MADE_RUN = 8
#: So many accesses before the place and behind it are close by.
NEAR_RUN = 8
#: Weight of the past in `History.confidence`, per access.
CONFIDENCE_DECAY = 1 - 1 / 48

#: Distance of what the forecast does not contain.
NEVER = math.inf


class History:
    """The order in which a program uses its blocks, and a forecast of how it goes on.

    Parameters
    ----------
    capacity : int
        The most accesses kept. Beyond it the older half is forgotten.

    Notes
    -----
    *Identity.* A persistent block is known by its number. A block that an operator made is known
    by its allocation site: the cursor's position, how many operators after the last access it was
    made (`place`), and its rank among those made there. So the tensor that a step makes anew each
    time has one identity, whatever its number and size.

    *Slots.* Positions count accesses to persistent blocks. What happens to temporaries between
    access n - 1 and access n happens in slot n.

    One thread at a time; no method blocks, and none but a trim of the record (once in
    `capacity / 2` accesses) takes longer than the cursor's search for a place.
    """

    def __init__(self, capacity: int = 2**18) -> None:
        self.capacity = capacity
        #: Position of the oldest access kept, and of the next one to come.
        self.start = 0
        self.end = 0
        #: Position that the next access is expected to repeat; -1 while nothing is expected.
        self.cursor = -1
        #: Grows whenever the cursor leaps: positions worked out before it are void.
        self.leap_count = 0
        #: Bytes of the blocks that the record has seen and that are not gone.
        self.living_nbytes = 0
        #: Of the largest that there has been.
        self.largest_nbytes = 0
        self._symbols: list[int] = []
        self._structs = array("q")
        self._uses: dict[int, array[int]] = {}
        self._places = Places(self._symbols, capacity)
        self._index_until = INDEXED_RUN
        self._tolerance = Tolerance()
        self._routing = Routing()
        self._temporary_count = 0  # entries that belong to temporaries
        self._names = AllocationSites()
        self._symbol_of, self._bearer_of = self._names.symbol_of, self._names.bearer_of
        self._nbytes: dict[int, int] = {}  # living blocks
        self._foreseen_nbytes = self._judged_nbytes = 0.0

    # -- recording ---------------------------------------------------------------------------

    def access(
        self, block_id: int, nbytes: int, struct: int, *, is_persistent: bool = True
    ) -> None:
        """Note that the program uses a block."""
        symbol = self._symbol_of.get(block_id, block_id)
        if self._bearer_of.get(symbol, block_id) != block_id:
            symbol = self._names.separate(block_id)
        if nbytes != self._nbytes.get(block_id):
            self._set_nbytes(block_id, nbytes)
        if not is_persistent:
            self._note_temporary_use(symbol)
            return
        is_new = block_id in self._names.made and self._names.stays(block_id, symbol)
        index = self.cursor - self.start
        if self.cursor >= 0 and self._symbols[index] == symbol:
            self._append(symbol, struct)
            self.cursor += 1
            self._tolerance.match()
            self.leap_count += self._routing.note_hit(struct, symbol)
            if self.end <= self._index_until:
                self._places.note(self.end)
            self._judge(nbytes, nbytes)
        elif not (
            self._access_made(block_id, symbol, nbytes, struct, is_new=is_new)
            or self._access_beside_routed(symbol, nbytes, struct)
        ):
            self._access_unforeseen(symbol, nbytes, struct, index)
        if self.end - self.start + self._temporary_count > self.capacity:
            self._trim()

    def expect_the_beginning(self) -> None:
        """Expect the program to do again what is recorded, from its first access on."""
        self.cursor = self.start if self._symbols else -1
        self.leap_count += 1

    def birth(self, block_id: int, nbytes: int, place: int = 0) -> bool:
        """Note that an operator has made a block: give it the identity of its allocation site.

        Parameters
        ----------
        place : int
            How many operators after the last access to a persistent block it was made.

        Returns
        -------
        bool
            Whether what was born there before became persistent.
        """
        self._set_nbytes(block_id, nbytes)
        self._temporary_count += 1
        return self._names.birth(block_id, nbytes, place, slot=self.end, before=self.cursor)

    def death(self, block_id: int) -> None:
        """Note that the program has let go of a block: it is forecast no more."""
        self.living_nbytes -= self._nbytes.pop(block_id, 0)
        self._names.death(block_id, self.end)

    def _access_made(
        self, block_id: int, symbol: int, nbytes: int, struct: int, *, is_new: bool
    ) -> bool:
        """Record an access that differs from the forecast only in what operators have made.

        Which results stay long enough to be followed can change from one period to the next, and
        one may not have been recognised at its birth. So such accesses may be missing from the
        record, or be there without being made again; and one that is made where the record has the
        use of another, gone by now, in an equal operator, is that one. So is one of another size
        than before, as caches are that grow, if no other is.
        """
        if self.cursor < 0:
            return False
        is_made = block_id in self._names.made
        index = self._made_before(symbol, nbytes, struct, is_made=is_made)
        if index >= 0:
            other = self._symbols[index]
            if other != symbol and is_new:
                symbol = self._names.rename(block_id, symbol, other)
            self.cursor = self.start + index + 1
            self._judge(nbytes, nbytes)
        elif is_made and self._tolerance.takes_extra:
            self._tolerance.note_extra()
        else:
            return False
        self._append(symbol, struct)
        self._index_until = self.end + INDEXED_RUN
        self._places.note(self.end)
        return True

    def _made_before(self, symbol: int, nbytes: int, struct: int, *, is_made: bool) -> int:
        """Return where the record soon has this access to what an operator made; -1 if nowhere."""
        first, names, grown = self.cursor - self.start, self._names, -1
        for index in range(first, min(first + MADE_RUN, len(self._symbols))):
            other = self._symbols[index]
            if other == symbol:
                return index
            if other not in names.born_at:
                break
            if is_made and self._bearer_of.get(other, other) not in self._nbytes:
                if self._structs[index] == struct:
                    return index
                if grown < 0 and names.is_alike(other, nbytes):
                    grown = index
        return grown

    def _access_beside_routed(self, symbol: int, nbytes: int, struct: int) -> bool:
        """Record an access that differs from the forecast only in what the data chooses.

        That says nothing about the place: others may be used there, or more of them, or fewer.
        """
        routing = self._routing
        if self.cursor < 0 or not routing.kinds:
            return False
        first, is_routed = self.cursor - self.start, routing.has(struct, symbol)
        made = () if is_routed else self._names.born_at
        index = routing.beyond(self._symbols, self._structs, first, symbol, passes=made)
        if index >= 0:
            for passed in range(first, index):
                kind, other = self._structs[passed], self._symbols[passed]
                if routing.has(kind, other):
                    routing.note_miss(kind, other)
            self.cursor = self.start + index + 1
            self.leap_count += routing.note_hit(struct, symbol)
        elif not is_routed:
            return False
        elif routing.has(struct, self._symbols[first]) and self._structs[first] == struct:
            self.cursor += 1
            if symbol in self._uses:
                routing.note_miss(struct, self._symbols[first])
        if symbol in self._uses:
            self._judge(nbytes, 0 if is_routed else nbytes)
        self._append(symbol, struct)
        return True

    def _access_unforeseen(self, symbol: int, nbytes: int, struct: int, index: int) -> None:
        """Record an access that the cursor did not expect, and find it a new place."""
        if symbol in self._uses:  # a block never seen could not be foreseen
            self._judge(nbytes, 0)
        is_substitute = self.cursor >= 0 and self._structs[index] == struct
        if is_substitute and self._may_be_chosen(symbol, index):
            self.leap_count += self._routing.note_miss(struct, self._symbols[index])
        self._append(symbol, struct)
        self._index_until = self.end + INDEXED_RUN
        is_in_place = is_substitute and self._tolerance.takes_substitute
        least = PROGRAM_AGREEMENT if is_in_place else 1
        place = self._places.find(self.start, self.end, self._uses[symbol], least)
        if is_in_place and place < 0:
            self.cursor += 1
            self._tolerance.note_substitute()
        else:
            before, self.cursor = self.cursor, place
            self._tolerance.begin()
            self.leap_count += before >= 0 or self.cursor >= 0
        self._places.note(self.end)

    def _may_be_chosen(self, symbol: int, index: int) -> bool:
        """Whether it may be by the data that a block is used, and not the one of the record.

        Not where the record has it close by, or after the one used last: a layer was left out.
        """
        uses, symbols = self._uses.get(symbol), self._symbols
        if not uses or symbol in symbols[max(0, index - NEAR_RUN) : index + NEAR_RUN]:
            return False
        before = uses[-1] - self.start - 1
        follows = before >= 0 and symbols[before] == symbols[-1]
        return not follows or self._routing.has(self._structs[-1], symbols[-1])

    def _set_nbytes(self, block_id: int, nbytes: int) -> None:
        self.living_nbytes += nbytes - self._nbytes.get(block_id, 0)
        self.largest_nbytes = max(self.largest_nbytes, nbytes)
        self._nbytes[block_id] = nbytes

    def _append(self, symbol: int, struct: int) -> None:
        self._symbols.append(symbol)
        self._structs.append(struct)
        self._uses.setdefault(symbol, array("q")).append(self.end)
        self.end += 1

    def _judge(self, nbytes: int, foreseen_nbytes: int) -> None:
        if not self._judged_nbytes:  # begin with some trust: the first mistake says little
            self._judged_nbytes = self._foreseen_nbytes = float(24 * nbytes)
        self._judged_nbytes = self._judged_nbytes * CONFIDENCE_DECAY + nbytes
        self._foreseen_nbytes = self._foreseen_nbytes * CONFIDENCE_DECAY + foreseen_nbytes

    def _note_temporary_use(self, symbol: int) -> None:
        uses = self._uses.setdefault(symbol, array("q"))
        if not uses or uses[-1] != self.end:
            uses.append(self.end)
            self._temporary_count += 1

    # -- forecast ----------------------------------------------------------------------------

    @property
    def distinct_count(self) -> int:
        """How many identities the record knows."""
        return len(self._uses)

    @property
    def period(self) -> int:
        """How many accesses lie between the cursor and the present; 0 without a forecast."""
        return self.end - self.cursor if self.cursor >= 0 else 0

    @property
    def confidence(self) -> float:
        """Share of the recently accessed bytes whose access had been foreseen exactly."""
        return self._foreseen_nbytes / self._judged_nbytes if self._judged_nbytes else 1.0

    def nbytes(self, block_id: int) -> int:
        """Return the size of a living block as last seen; 0 for any other."""
        return self._nbytes.get(block_id, 0)

    def next_use(self, block_id: int) -> float:
        """Return after how many accesses a block is forecast to be used; `NEVER` if it is not.

        What the data chooses is that much farther as it is less likely.
        """
        distance, odds = self._next(block_id)
        return distance / odds if odds else NEVER

    def is_chosen(self, block_id: int) -> bool:
        """Whether it is the data that says if a block is used where it is forecast to be."""
        return self._next(block_id)[1] < 1

    def _next(self, block_id: int) -> tuple[float, float]:
        """Return after how many accesses a block is used next, and how likely that is."""
        cursor, symbol = self.cursor, self._symbol_of.get(block_id, block_id)
        uses = self._uses.get(symbol)
        if cursor < 0 or not uses or uses[-1] < cursor:
            return NEVER, 1.0
        use = uses[bisect_left(uses, cursor)]
        names = self._names
        if (symbol in names.born_at or symbol in names.others_born_at) and names.is_another(
            block_id, symbol, cursor, use, self.end
        ):
            return NEVER, 1.0  # to be made there until then
        # A temporary's may be behind the record's last access.
        kind = self._structs[use - self.start] if use < self.end else -1
        is_routed = kind in self._routing.kinds
        return use - cursor, self._routing.odds(kind, symbol) if is_routed else 1.0

    def next_end(self, block_id: int) -> float:
        """Return after how many accesses a result is likely to be gone, or another in its place."""
        symbol = self._symbol_of.get(block_id, block_id)
        if self.cursor < 0:
            return NEVER
        return self._names.next_end(block_id, symbol, self.cursor, self.end)

    def upcoming(self, limit: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the accesses forecast, as (distance, block), from `first` to before `limit`.

        Where the record ends, the forecast starts over at the cursor: a period. Blocks that the
        program has let go of are left out.
        """
        if self.cursor < 0:
            return
        distance, names, routed = first, self._names, self._routing.kinds
        while distance < limit:
            index = self.cursor - self.start + distance % self.period
            part = slice(index, index + limit - distance)
            for kind, symbol in zip(self._structs[part], self._symbols[part], strict=True):
                block_id = self._bearer_of.get(symbol, symbol)
                is_routed = kind in routed and self._routing.has(kind, symbol)
                if (block_id in self._nbytes and not is_routed) and (
                    symbol not in names.born_at
                    or names.next_birth(symbol, self.cursor) > self.cursor + distance
                ):
                    yield distance, block_id
                distance += 1

    def next_ones(self, limit: int) -> Iterator[int]:
        """Yield the blocks whose accesses are forecast next, of so many accesses.

        What is to be made until then is passed over, and what is gone: the program will use what it
        makes instead.
        """
        cursor, names = self.cursor, self._names
        if cursor < 0:
            return
        first = cursor - self.start
        for position, symbol in enumerate(self._symbols[first : first + limit], cursor):
            if symbol in names.born_at and names.next_birth(symbol, cursor) <= position:
                continue
            block_id = self._bearer_of.get(symbol, symbol)
            if block_id in self._nbytes:
                yield block_id

    # -- bounds ------------------------------------------------------------------------------

    def _trim(self) -> None:
        """Forget the older half of the record, or nearly all where temporaries fill it."""
        count = len(self._symbols)
        kept = count // 2 if self._temporary_count < count else 0
        self.start = self.end - kept
        del self._symbols[: count - kept]
        del self._structs[: count - kept]
        self._uses = self._kept_uses()
        self._names.forget_before(self.start, self._uses)
        self._routing.keep(self._uses, set(self._structs))
        self._temporary_count = sum(map(len, self._uses.values())) - kept + self._names.birth_count
        self._places.forget_half()
        if self.cursor < self.start or not kept:
            self.cursor = -1
            self.leap_count += 1
        # What has matched for long was indexed long ago: index it again as it comes round.
        self._index_until = self.end + max(self.period, INDEXED_RUN)

    def _kept_uses(self) -> dict[int, array[int]]:
        kept = {}
        for symbol, uses in self._uses.items():
            newer = uses[bisect_left(uses, self.start) :]
            if newer:
                kept[symbol] = newer
        return kept
