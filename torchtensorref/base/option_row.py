"""One row of the table of options: as a field of a dataclass, and for those who read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import option_parsers as texts
from .errors import ConfigError

__all__ = ["Option", "row"]


def row(
    default: object,
    parse: Callable[[str], Any],
    values: str,
    effect: str,
    cost: str,
    instead: str | None = None,
) -> Any:
    """One row of the table, as the field of a dataclass.

    An option that says how to begin is of no use in a scope; `instead` is what a program writes,
    "" where there is nothing.
    """
    metadata = {"parse": parse, "values": values, "effect": effect, "cost": cost}
    metadata["instead"] = instead
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One row of the table, for those who read it: parsers, documents, `env`."""

    name: str  # as in `options(trace=2)`
    variable: str  # as in the environment
    values: str
    default: object
    effect: str
    cost: str
    instead: str | None  # what a program writes where a scope is of no use; None: it is of use
    _parse: Callable[[str], Any]

    def parse(self, text: str, asked: str = "") -> Any:
        """Read a value from text.

        Parameters
        ----------
        text : str
            As it stands in the environment.
        asked : str, optional
            What the user wrote it for; the variable, if not given.

        Returns
        -------
        Any
            The value, of the type that the field of `Settings` has.

        Raises
        ------
        ConfigError
            If it is no such value; the message names what was asked for and what it takes.
        """
        asked = asked or self.variable
        try:
            return self._parse(text)
        except texts.BadValueError as why:
            raise ConfigError(f"{asked}={text!r} is not understood: {why}.", name=asked) from None
        except ConfigError as error:
            message = f"{asked}={text!r} is not understood: {error}"
            raise ConfigError(message, **error.__dict__) from None
