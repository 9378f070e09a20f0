"""Locks that a forked child finds open, and what is to be done there.

A child has all of the memory and one of the threads. What another thread was doing at that moment
is to the child as if an error had ended it there, at any line (`memory/repair.py`): its locks are
open again, and what it has left halfway is repaired.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol


class InChild(Protocol):
    """Who has something to do in a forked child."""

    def begin_in_child(self, *, was_held: bool) -> None:
        """Begin anew; all locks are open, and whether another thread held one of them is said."""


class BeforeFork(Protocol):
    """Who has something to do in a process that is about to fork."""

    def before_fork(self) -> None:
        """Make ready what the child will need; nothing may be raised."""


before: weakref.WeakSet[BeforeFork] = weakref.WeakSet()
in_child: weakref.WeakSet[InChild] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def Lock() -> threading.Lock:
    """Make a lock that is open in a forked child."""
    made = threading.Lock()
    _locks.add(made)
    return made


def RLock() -> Any:
    """Make a lock that is open in a forked child, unless the thread that forks holds it."""
    made = threading.RLock()
    _locks.add(made)
    return made


#: The lock of the books, which ledgers and simulated machines have, too. The collector may run a
#: finalizer under any of these, and an operator of that takes the others: with locks of their own
#: two threads would wait for each other.
shared = RLock()


def is_mine(lock: Any) -> bool:
    """Whether this thread holds an `RLock`: a finalizer may be asking that it runs within us."""
    mine: bool = lock._is_owned()
    return mine


def _begin_anew() -> None:
    was_held = False
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()
            was_held = True
    for one in list(in_child):
        one.begin_in_child(was_held=was_held)


def _make_ready() -> None:
    for one in list(before):
        one.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_make_ready, after_in_child=_begin_anew)
