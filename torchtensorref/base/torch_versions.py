"""What differs between the versions of torch: one table, which all who care about one ask.

A version that lacks something is a row here and no `if` elsewhere. Nothing here imports torch.
"""

from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int]


class Difference(NamedTuple):
    """Something that some versions have and others do not."""

    #: What it is called by those who ask for it; a patch by what it changes.
    name: str
    #: The first version that has it, and the last; None: all before, or all after.
    first: Version | None
    last: Version | None
    #: Why the others do not, and what becomes of a program there.
    reason: str

    def is_in(self, version: str) -> bool:
        """Whether a torch of that version has it; what came with some version, "" has not."""
        numbers = numbers_of(version)
        if self.first is not None and numbers < self.first:
            return False
        return self.last is None or numbers <= self.last

    @property
    def torches(self) -> str:
        """The versions that have it, in words."""
        first, last = (version and ".".join(map(str, version)) for version in self[1:3])
        if first and last:
            return f"{first} to {last}"
        return f"{first} or later" if first else f"{last} or earlier"


MANAGEMENT = "management"
TRACED_CLASSES = "torch._functorch._aot_autograd.runtime_wrappers.HANDLED_TYPES"
DEFAULT_DEVICE = "`torch.get_default_device()` after `torch.set_default_device(None)`"

ROWS = {
    row.name: row
    for row in (
        Difference(
            MANAGEMENT,
            (2, 9),
            None,
            "older ones have never been tried: one warning, and every tensor stays plain",
        ),
        Difference(
            TRACED_CLASSES,
            (2, 11),
            (2, 14),
            "2.9, 2.10 and 2.15 have no check by the class of a tensor there that has to be told "
            "of TensorRefs",
        ),
        Difference(
            DEFAULT_DEVICE,
            (2, 10),
            None,
            "in 2.9 that raises, in plain torch, too, and so does who asks, such as transformers' "
            "models when they are made",
        ),
    )
}


#: What is asked for where there is no torch.
WANTED = f"torch {ROWS[MANAGEMENT].torches}"


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; fewer where it has fewer."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def has(name: str, version: str) -> bool:
    """Whether a torch of that version has what a row of the table is about."""
    return ROWS[name].is_in(version)


def lacking(version: str) -> dict[str, Difference]:
    """Return the rows that a torch of that version does not have, by name."""
    return {name: row for name, row in ROWS.items() if not row.is_in(version)}
