"""How far a program may differ from the record and still be where the cursor is.

*Another block by an equal operator* comes in the place of the one foreseen. *A result of an
operator* is accessed or not, by what room there was: where the program has been followed for long,
many of those are no evidence of another place. In a training step all activations of a layer may be
such, and its equal, with the same activations, is the layer of another micro-step.
"""

from __future__ import annotations

#: So many accesses in the order of the record are the program's order; fewer may be routed alike.
PROGRAM_AGREEMENT = 96
#: Substitutions tolerated among the last 16 accesses.
SUBSTITUTION_LIMIT = 10
#: Results of operators in a row that were not foreseen, in a program that is followed.
EXTRA_LIMIT = 16


class Tolerance:
    """What has differed since the cursor was put where it is."""

    def __init__(self) -> None:
        self._differed = 0  # one bit per access, newest lowest
        self._extra_count = 0  # results in a row that were not foreseen
        self._exact_count = 0  # accesses as foreseen

    def begin(self) -> None:
        """The cursor has been put somewhere else."""
        self._differed = self._extra_count = self._exact_count = 0

    def match(self) -> None:
        """An access has come as foreseen."""
        self._differed = (self._differed << 1) & 0xFFFF
        self._extra_count = 0
        self._exact_count += 1

    @property
    def takes_substitute(self) -> bool:
        """Whether another block may have come in the place of the one foreseen."""
        return self._differed.bit_count() < SUBSTITUTION_LIMIT

    def note_substitute(self) -> None:
        """It has."""
        self._differed = (self._differed << 1 | 1) & 0xFFFF

    @property
    def takes_extra(self) -> bool:
        """Whether a result of an operator may be accessed that was not foreseen."""
        is_followed = self._exact_count >= PROGRAM_AGREEMENT
        return self.takes_substitute or (is_followed and self._extra_count < EXTRA_LIMIT)

    def note_extra(self) -> None:
        """It has been."""
        self.note_substitute()
        self._extra_count += 1
