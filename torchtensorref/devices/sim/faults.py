"""Faults on request: which allocation and which copy of a simulated device is to fail."""

from __future__ import annotations

from collections.abc import Iterable

from ...base.errors import ConfigError, did_you_mean, nearest
from ...base.options import FAULT_KINDS, parse_faults

__all__ = ["FaultPlan"]


class FaultPlan:
    """The numbers of the allocations and copies that fail. Each fault fires once.

    Parameters
    ----------
    faults : iterable of (str, int)
        Kinds and numbers counted from 1: of allocations (``"alloc"``), of copies (``"copy"``), and
        of those to the device (``"late"``), which fail when they are waited for.

    Examples
    --------
    >>> plan = FaultPlan.parse("copy:17,alloc:3")
    >>> [number for number in range(100) if plan.fire("copy", number)]
    [17]
    """

    def __init__(self, faults: Iterable[tuple[str, int]] = ()) -> None:
        self._numbers: dict[str, set[int]] = {kind: set() for kind in FAULT_KINDS}
        for kind, number in faults:
            self.add(kind, number)

    @classmethod
    def parse(cls, text: str | None) -> FaultPlan:
        """Read a plan as `TTR_FAULTS` holds it; an empty one plans nothing."""
        return cls(parse_faults(text)) if text else cls()

    def add(self, kind: str, number: int) -> None:
        """Plan that the `number`-th `kind`, counted from 1, fails."""
        if kind not in FAULT_KINDS:
            raise ConfigError(
                f"{kind!r} is no kind of fault. {did_you_mean(kind, FAULT_KINDS)}",
                name=kind,
                known=FAULT_KINDS,
                nearest=nearest(kind, FAULT_KINDS),
            )
        if number < 1:
            raise ConfigError(f"{kind}:{number} cannot fail: the first {kind} has number 1.")
        self._numbers[kind].add(number)

    def forget(self, kind: str, number: int) -> None:
        """Let the `number`-th `kind` succeed, if it was planned to fail and has not yet."""
        self._numbers[kind].discard(number)

    def fire(self, kind: str, number: int) -> bool:
        """Whether the `number`-th `kind` fails; a planned fault is used up."""
        if number not in self._numbers[kind]:
            return False
        self._numbers[kind].remove(number)
        return True

    def __repr__(self) -> str:
        parts = [f"{kind}:{n}" for kind in FAULT_KINDS for n in sorted(self._numbers[kind])]
        return f"FaultPlan({','.join(parts)!r})"
