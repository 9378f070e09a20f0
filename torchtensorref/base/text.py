"""Text of several lines that a console or a notebook shows as it is."""

from __future__ import annotations

__all__ = ["Text"]


class Text(str):
    """A string whose representation is what it says: the value of an expression is read, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)
