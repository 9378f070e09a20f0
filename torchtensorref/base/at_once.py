"""Looking through dictionaries that other threads change meanwhile, without a lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def items_at_once(mapping: Mapping[_K, _V]) -> list[tuple[_K, _V]]:
    """Return the items that a dictionary has at one moment.

    `list(d.items())` makes a tuple of each; on Python 3.11 the garbage collector can run in
    between, and in what it calls other threads. Keys or values alone, and copies, are made at once.
    What is no dictionary (of scripted modules) is asked as it is.
    """
    return list((mapping.copy() if isinstance(mapping, dict) else mapping).items())
