"""Text of several lines, and lists of lines, that a console or a notebook shows as they are."""

from __future__ import annotations

__all__ = ["Lines", "Text"]


class Text(str):
    """A string whose representation is what it says: the value of an expression is read, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)


class Lines(list[str]):
    """A list of lines that is shown one below the other."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(self) or "(nothing has happened)"
