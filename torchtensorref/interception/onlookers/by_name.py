"""What acts on modules, tensors or operators by their names says, once, if none has such a name."""

from __future__ import annotations

import re
import warnings

import torch

from ...base.errors import did_you_mean
from ...base.middlewares import Middleware
from ...base.name_patterns import NamePattern
from ...memory.manager import tensorsManager
from ...memory.once import frames_of_ours
from .seen import SeenOperator, module_here

_NUMBER = re.compile(r"\d+")


class ByName(Middleware):
    """Acts on what a pattern of names matches.

    Parameters
    ----------
    pattern : str
        See `name_patterns`.
    of_operators : bool, optional
        It may mean operators, too.

    Notes
    -----
    When the first module is at work, or else at the end, all names that are there are looked
    through. If none of them is matched a warning has those that may have been meant: a misspelt
    pattern would do nothing, and say nothing. A model may also come later, so it is no error.
    """

    def __init__(self, pattern: str, *, of_operators: bool = False) -> None:
        self._pattern = NamePattern(pattern)
        self._is_of_operators = of_operators
        self._has_seen = self._is_sure = False

    def before(self, op: SeenOperator) -> None:
        """Look, once, whether there is what the pattern matches."""
        self._has_seen = True
        if not self._is_sure and module_here(()):
            self._look()

    def leave(self) -> None:
        """Look now, if no module has been at work."""
        if self._has_seen and not self._is_sure:
            self._look()

    def _matches(self, name: str) -> bool:
        found = self._pattern(name)
        self._is_sure |= found
        return found

    def _look(self) -> None:
        self._is_sure = True
        pattern = self._pattern.pattern
        names = tensorsManager.names.known()
        operators = names_of_operators() if self._is_of_operators else []
        if any(map(self._pattern, (*names, *operators))):
            return
        if pattern.startswith(("aten.", "prims.")):
            names = [operator.rpartition(".")[0] for operator in operators]
        alike = {_NUMBER.sub("0", name): name for name in reversed(names)}  # one of many layers
        warnings.warn(
            f"{self!r} matches nothing that is there by now, so it does nothing. "
            + did_you_mean(pattern, alike.values()),
            RuntimeWarning,
            stacklevel=frames_of_ours(),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pattern.pattern!r})"


def names_of_operators() -> list[str]:
    """Return the names of all operators that torch has, as middlewares see them."""
    return [
        (name if "." in name else f"{name}.default").replace("::", ".")
        for name in torch._C._dispatch_get_all_op_names()
    ]
