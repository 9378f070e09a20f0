"""Whether the host's computing pays, where the links alone would nearly do: both are measured.

Each accelerator's flow decides by itself what is computed at home, as if its own link were all
there is. With several of them that can take longer than to wait: what the host computes for one
holds up all, and no link is given anything meanwhile. So the times of two periods with it are held
against those of two without it, and the better stays; after a switch two pass uncounted. Without
it nothing can be faster than the links bring what is missing: where the host saves more than that
leaves to be gained, as mostly, nothing is tried.
"""

from __future__ import annotations

#: Nothing is tried in the first periods: blocks move to where they live meanwhile.
SETTLED_AFTER = 8
#: So many periods are compared: of two kinds in turn (a weight that is used twice) one of each.
COMPARED = 2
#: What was found holds for so many periods, and after each trial for twice as many.
HOLDS_FOR = 64


class HomeTrial:
    """Which of the two is under way, and what the periods took.

    Attributes
    ----------
    is_allowed : bool
        Whether the host may compute.
    """

    def __init__(self) -> None:
        self.is_allowed = True
        self._holds_for = HOLDS_FOR
        self._waits = SETTLED_AFTER  # periods until another trial
        self._before_ns = 0.0  # what a period took of the other kind; 0 outside a trial
        self._starts_ns: list[int] = []  # when the last periods of this kind began

    def period(self, now_ns: int, least_ns: float, *, is_used: bool) -> bool:
        """Note that a period begins; return whether the host may compute in it.

        Parameters
        ----------
        least_ns : float
            Without the host a period takes at least so long.
        is_used : bool
            The host computes much of what is missing, where it may.
        """
        self._starts_ns.append(now_ns)
        del self._starts_ns[: -2 - COMPARED]
        if self._waits:
            self._waits -= 1
        elif self.is_allowed and not is_used:
            self._starts_ns.clear()
        elif len(self._starts_ns) > COMPARED + 1:
            self._judge(least_ns)
        return self.is_allowed

    def _judge(self, least_ns: float) -> None:
        took_ns = (self._starts_ns[-1] - self._starts_ns[-1 - COMPARED]) / COMPARED
        if not self._before_ns:
            if self.is_allowed and took_ns <= least_ns:
                return  # it is better than the other can be
            self._before_ns = took_ns
            self._switch()
            return
        is_better, self._before_ns = took_ns < self._before_ns, 0.0
        if not is_better:
            self._switch()
        self._waits, self._holds_for = self._holds_for, 2 * self._holds_for

    def _switch(self) -> None:
        self.is_allowed = not self.is_allowed
        self._starts_ns.clear()
