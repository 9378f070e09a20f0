"""How much host memory is page-locked: one count for the process, whatever card it is for."""

from __future__ import annotations

from collections import deque

from ...base import forking

__all__ = ["LockedBytes", "of_process"]


class LockedBytes:
    """Bytes that are taken of a bound.

    Parameters
    ----------
    within : LockedBytes, optional
        What they are part of, and what the bound is for; by default for these alone.
    """

    def __init__(self, within: LockedBytes | None = None) -> None:
        self._within = within
        self._taken_nbytes = 0
        #: Appended to by finalizers, which run in any thread at any moment and take no lock.
        self._given_back: deque[int] = deque()
        self._lock = forking.Lock()

    @property
    def nbytes(self) -> int:
        """What is taken now."""
        with self._lock:
            return self._settled()

    def is_full(self, nbytes: int, limit_nbytes: int) -> bool:
        """Whether so many more would be beyond the bound."""
        whole = self if self._within is None else self._within
        return whole.nbytes + nbytes > limit_nbytes

    def take(self, nbytes: int, limit_nbytes: int) -> bool:
        """Take some, unless that would be beyond the bound."""
        if self._within is not None and not self._within.take(nbytes, limit_nbytes):
            return False
        with self._lock:
            if self._within is None and self._settled() + nbytes > limit_nbytes:
                return False
            self._taken_nbytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Have some counted no more. Any finalizer may call this."""
        self._given_back.append(nbytes)
        if self._within is not None:
            self._within.give_back(nbytes)

    def _settled(self) -> int:
        while self._given_back:
            self._taken_nbytes -= self._given_back.popleft()
        return self._taken_nbytes


#: What all devices have page-locked: `TTR_PAGE_LOCK` is its bound.
of_process = LockedBytes()
