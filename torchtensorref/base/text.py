"""Text of several lines, and lists of lines, that a console or a notebook shows as they are."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

__all__ = ["LINE", "Lines", "Text", "fitted"]

#: Characters in a line, and where the words begin behind the head of one.
LINE = 80
_WORDS_AT = 13


def fitted(lines: Iterable[str], indent: int = _WORDS_AT) -> list[str]:
    """Break lines that are too long for a screen; what follows is indented, as a report's words."""
    return [
        part
        for line in lines
        for part in wrap(line, LINE, subsequent_indent=" " * indent, break_on_hyphens=False)
    ]


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
