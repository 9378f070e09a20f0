"""The states of a replica, and which may follow which."""

from __future__ import annotations

from enum import Enum


class ReplicaState(Enum):
    """How far the bytes of a replica can be trusted."""

    INVALID = "invalid"  # stale, given back, or never written
    FILLING = "filling"  # a copy into it is in flight
    CLEAN = "clean"  # readable, and home holds the same bytes (home itself is clean when readable)
    DIRTY = "dirty"  # readable, and newer than home: the only copy there is

    # There is one object of each, and every step of an operator that fetches looks states up:
    # Python's own hash of a member is that of its name, worked out in Python.
    __hash__ = object.__hash__


INVALID, FILLING, CLEAN, DIRTY = ReplicaState

#: An operator may read a replica in one of these.
READABLE = frozenset({CLEAN, DIRTY})

#: What may become what, and the event that does it.
#: (DIRTY, INVALID) is missing on purpose: the only copy would be lost.
#: (FILLING, DIRTY) is missing too: what writes waits for the copy first.
LEGAL_TRANSITIONS = {
    (INVALID, FILLING): "fetch issued",
    (INVALID, DIRTY): "made by an operator here",
    (INVALID, CLEAN): "home received the bytes",
    (FILLING, CLEAN): "the copy has arrived",
    (FILLING, INVALID): "the copy failed, or was given up",
    (CLEAN, DIRTY): "written in place",
    (CLEAN, INVALID): "given back, or written elsewhere",
    (DIRTY, CLEAN): "written back",
}
