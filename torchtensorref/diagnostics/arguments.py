"""Arguments of the command line: what is misspelt is answered with what was probably meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from ..base.errors import nearest

__all__ = ["Parser"]

_NO_CHOICE = re.compile(r"invalid choice: '?([\w-]+)")


class Parser(argparse.ArgumentParser):
    """A parser, as are those of its commands, that names the nearest option or command."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read arguments; what is left over is said by the command that it was meant for."""
        chosen, left = self.parse_known_args(args, namespace)
        if left:
            self._command_of(chosen).refuse(left)
        return chosen

    def _command_of(self, chosen: argparse.Namespace) -> Parser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices[getattr(chosen, action.dest)]._command_of(chosen)  # type: ignore[no-any-return]
        return self

    def refuse(self, left: list[str]) -> NoReturn:
        """End with status 2, and name the option that is nearest to the first that is left over."""
        option = next((one.partition("=")[0] for one in left if one.startswith("--")), "")
        self._end(f"unrecognized arguments: {' '.join(left)}", option, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """End with status 2, and name the nearest of the choices, if it was one."""
        given = _NO_CHOICE.search(message)
        choices = [name for action in self._actions for name in action.choices or ()]
        self._end(message, given[1] if given else "", choices)

    def _end(self, message: str, given: str, known: Any) -> NoReturn:
        meant = nearest(given, known) if given else None
        super().error(message if meant is None else f"{message}. Did you mean {meant!r}?")
