"""Operators whose blocks are chosen by the data: the experts that work for a token.

What such operators use is foretold wrongly most of the time, however steady the program is. They
are told by their kind (operator and size), as a processor's prefetcher tells instructions apart
whose addresses it cannot foretell: each kind has a credit of its own. What they use counts as
farther the less likely it is, and says nothing about the place of the program in its record. A
block that was used where it was foretold is trusted all the same: a matrix of every token may be as
large as those of experts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

#: Weight of the past in a kind's credit, per access.
DECAY = 1 - 1 / 32
#: A kind is routed below the first, and no more above the second.
ROUTED, FORETOLD = 0.4, 0.6
#: Above this one a kind was wrong so rarely that nothing is kept of it.
FORGIVEN = 0.99
#: Accesses that the data chose, passed over at once where a program does without them.
ROUTED_RUN = 512
#: What is less likely than that is as good as not foretold.
LEAST_ODDS = 0.2
#: A block is trusted that has come as foretold so many times in a row.
TRUSTED_COUNT = 3


class Routing:
    """Which blocks are chosen by the data, by the kind of operator and by their own past."""

    def __init__(self) -> None:
        #: Kinds of operators that choose by the data, but for blocks that are trusted.
        self.kinds: set[int] = set()
        self._credit: dict[int, float] = {}  # of kinds that have been wrong: how often right
        self._hit_count: dict[int, int] = {}  # of blocks of these: as foretold, in a row

    def has(self, kind: int, symbol: int) -> bool:
        """Whether an operator of a kind uses a block because the data says so."""
        return kind in self.kinds and self._hit_count.get(symbol, 0) < TRUSTED_COUNT

    def odds(self, kind: int, symbol: int) -> float:
        """Return how likely an operator uses the block that is foretold; 0 for hardly."""
        if not self.has(kind, symbol):
            return 1.0
        return credit if (credit := self._credit[kind]) > LEAST_ODDS else 0.0

    def note_hit(self, kind: int, symbol: int) -> bool:
        """An operator used what was foretold; return whether its kind is routed no more."""
        credit = self._credit.get(kind)
        if credit is None:
            return False
        hit_count = self._hit_count.get(symbol, 0)
        if hit_count >= TRUSTED_COUNT:  # that says nothing about the others
            return False
        self._hit_count[symbol] = hit_count + 1
        credit += (1 - credit) * (1 - DECAY)
        if credit > FORGIVEN:
            del self._credit[kind]
        else:
            self._credit[kind] = credit
        return credit > FORETOLD and self._change(kind, is_routed=False)

    def note_miss(self, kind: int, symbol: int) -> bool:
        """Another block was used than was foretold; return whether the kind is routed now."""
        self._hit_count.pop(symbol, None)
        credit = self._credit[kind] = self._credit.get(kind, 1.0) * DECAY
        return credit < ROUTED and self._change(kind, is_routed=True)

    def _change(self, kind: int, *, is_routed: bool) -> bool:
        if (kind in self.kinds) == is_routed:
            return False
        (self.kinds.add if is_routed else self.kinds.discard)(kind)
        return True

    def beyond(
        self,
        symbols: Sequence[int],
        kinds: Sequence[int],
        first: int,
        symbol: int,
        passes: Container[int],
    ) -> int:
        """Return where a block stands in a record behind what the data chose; -1 if nowhere.

        Parameters
        ----------
        symbols, kinds : sequence of int
            The record: blocks, and the kinds of the operators that used them.
        first : int
            Where to begin.
        symbol : int
            The block.
        passes : container of int
            Other blocks to be passed over.
        """
        for index in range(first, min(first + ROUTED_RUN, len(symbols))):
            other = symbols[index]
            if other == symbol:
                return index
            if other not in passes and not self.has(kinds[index], other):
                break
        return -1

    def keep(self, symbols: Container[int], kinds: Container[int]) -> None:
        """Forget all other blocks and kinds."""
        counts = self._hit_count.items()
        self._hit_count = {symbol: count for symbol, count in counts if symbol in symbols}
        self._credit = {kind: credit for kind, credit in self._credit.items() if kind in kinds}
        self.kinds.intersection_update(self._credit)
