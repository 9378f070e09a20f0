"""Patterns for the names of modules and parameters: `model.layers.0-3`, `*.mlp`, `**.up_proj`."""

from __future__ import annotations

import functools
import re
from fnmatch import translate

from .errors import ConfigError

__all__ = ["NamePattern"]

_RANGE = re.compile(r"(\d+)-(\d+)")


@functools.lru_cache(maxsize=256)
def _parts(pattern: str) -> tuple[object, ...]:
    return tuple(_part(text) for text in pattern.split("."))


def _part(text: str) -> object:
    if text == "**":
        return None
    found = _RANGE.fullmatch(text)
    if found is not None:
        return range(int(found[1]), int(found[2]) + 1)
    return re.compile(translate(text))


def _fits(part: object, name: str) -> bool:
    if isinstance(part, range):
        return name.isdecimal() and int(name) in part
    return part.match(name) is not None  # type: ignore[attr-defined]


def _begins(parts: tuple[object, ...], names: list[str]) -> bool:
    if not parts:
        return True
    if parts[0] is None:
        return any(_begins(parts[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and _fits(parts[0], names[0]) and _begins(parts[1:], names[1:])


class NamePattern:
    """Whether names are matched by a pattern.

    A pattern has the parts of a name, between dots: as they are, with `*` and `?`, as a range of
    numbers such as ``0-3``, or `**` for any number of parts. It matches what it says and all that
    is under it. A name in front of a colon (of several models) may be left out.

    Examples
    --------
    >>> pinned = NamePattern("model.layers.0-3")
    >>> pinned("model.layers.2.mlp.up_proj.weight"), pinned("model.layers.12")
    (True, False)
    >>> NamePattern("**.up_proj")("model.layers.2.mlp.up_proj.weight")
    True
    >>> NamePattern("down_*")("UNet:down_blocks.0"), NamePattern("VAE:**")("UNet:down_blocks.0")
    (True, False)
    """

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str) or not pattern.strip("."):
            raise ConfigError(
                f"A pattern of names is a text such as 'layers.0-3', not {pattern!r}."
            )
        self.pattern = pattern
        self._model, _, rest = pattern.rpartition(":")
        self._parts = _parts(rest)

    def __call__(self, name: str) -> bool:
        """Whether a name is matched; an empty one never is."""
        model, _, rest = name.rpartition(":")
        if not rest or (self._model and self._model != model):
            return False
        return _begins(self._parts, rest.split("."))

    def __repr__(self) -> str:
        return f"NamePattern({self.pattern!r})"
