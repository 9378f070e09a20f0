"""A middleware that sends operators or modules to a device."""

from __future__ import annotations

import warnings
from typing import Any

from ...base.device_names import kind_of
from ...base.errors import ConfigError
from ...memory.once import frames_of_ours
from .by_name import ByName
from .seen import SeenOperator, device_called


class Place(ByName):
    """Run what matches on a device: operators, or all that a module does.

    Parameters
    ----------
    pattern : str
        An operator (``aten.embedding``), a module (``model.layers.0-3``) or a tensor (``lm_head``):
        see `name_patterns`. Of a backward pass, the operators that use the module's parameters.
    device : str or torch.device
        One that is in use: "cpu", "cuda:1".

    Notes
    -----
    Where an operator runs changes the time it takes. On a real accelerator it changes the last
    bits, too, as with plain torch.

    When its device has left (`tensorsManager.device` was set), it says so and does nothing until
    that is in use again. One that was never there is an error of the first operator.
    """

    def __init__(self, pattern: str, device: Any) -> None:
        super().__init__(pattern, of_operators=True)
        kind_of(str(device), where=f", where {pattern!r} is to be placed")
        self._device = str(device)
        self._has_placed = self._is_away = False

    def before(self, op: SeenOperator) -> None:
        """Place the operator if it matches."""
        super().before(op)
        is_meant = self._matches(op.name) or self._matches(op.module)
        if is_meant or any(self._matches(operand.name) for operand in op.operands):
            self._place(op)

    def _place(self, op: SeenOperator) -> None:
        try:
            op.device = device_called(self._device).name
            self._has_placed, self._is_away = True, False
        except ConfigError as error:
            if not self._has_placed:
                raise
            if not self._is_away:
                self._is_away = True
                warnings.warn(
                    f"{self!r} does nothing: its device has left. {error}",
                    RuntimeWarning,
                    stacklevel=frames_of_ours(),
                )

    def __repr__(self) -> str:
        return f"Place({self._pattern.pattern!r}, {self._device!r})"
