"""Which seats there are, in which order; and the state file, so that a run can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .contestants import CONTESTANTS
from .scales import CAPS, FAMILIES, WORKLOADS
from .seat import figures

#: The cap of the reference.
NO_CAP = 0


class Seat(NamedTuple):
    """One contestant, one family of models, one cap (percent; `NO_CAP` for none), in one round."""

    round: int
    family: str
    cap: int
    contestant: str

    @property
    def name(self) -> str:
        """For file names."""
        who = self.contestant.replace(" ", "_")
        return f"{self.round}_{self.family}_{self.cap or 'none'}_{who}"


class Selection(NamedTuple):
    """What `--only` leaves."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    caps: tuple[int, ...] = CAPS
    contestants: tuple[str, ...] = tuple(CONTESTANTS)


def selection_of(text: str) -> Selection:
    """Read `--only`: names of workloads, caps and contestants, separated by commas.

    Of each kind that is mentioned only those mentioned are left.

    Raises
    ------
    ValueError
        A name that is none of them.

    Examples
    --------
    >>> selection_of("decode1,50,flow").caps
    (50,)
    >>> selection_of("decode1,flow").caps
    (50, 25, 75, 110)
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    everything = Selection()
    known = {str(name): name for kind in everything for name in kind}
    # "diffusers" stands for both of its ways.
    groups = {"diffusers": [name for name in CONTESTANTS if name.startswith("diffusers")]}
    chosen: list[Any] = []
    for word in words:
        if word not in known and word not in groups:
            raise ValueError(f"{word!r} is none of {', '.join([*known, *groups])}")
        chosen += groups.get(word, [known.get(word)])
    kinds = [tuple(x for x in kind if x in chosen) or kind for kind in everything]
    return Selection(*kinds)


def seats(selection: Selection, rounds: int, references: Sequence[str]) -> list[Seat]:
    """Return all seats in order: references first, then caps with the contestants rotated.

    The order is another one at each cap, and turned around in every other round, so that a machine
    that gets slower or faster does so to nobody in particular.
    """
    families = [f for f in FAMILIES if any(WORKLOADS[w] == f for w in selection.workloads)]
    found = [Seat(0, family, NO_CAP, who) for family in families for who in references]
    for round_ in range(rounds):
        for family in families:
            for place, cap in enumerate(selection.caps):
                order = list(selection.contestants)
                shift = (place + round_) % len(order)
                order = order[shift:] + order[:shift]
                if round_ % 2:
                    order.reverse()
                found += [Seat(round_, family, cap, who) for who in order]
    return found


def workloads_of(seat: Seat, selection: Selection) -> list[str]:
    """Return the workloads of a seat, in order."""
    return [w for w in selection.workloads if WORKLOADS[w] == seat.family]


def key_of(workload: str, cap: int, contestant: str) -> str:
    """Name a cell."""
    return f"{workload}/{cap}/{contestant}"


class State:
    """What has been found so far, in a file.

    Attributes
    ----------
    options : dict
        What must be the same for a run to be gone on with.
    probes : dict
        Family -> what the probe's seat said.
    cells : dict
        Cell -> round -> row.
    took_s : dict
        Seat -> seconds.
    is_forking : bool
        False once a process forked from the preloaded one could not use the accelerator.
    """

    KEPT = ("options", "probes", "cells", "took_s", "is_forking")

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self.probes: dict[str, Any] = {}
        self.cells: dict[str, dict[str, Any]] = {}
        self.took_s: dict[str, float] = {}
        self.is_forking = True

    @classmethod
    def open(cls, path: Path, options: dict[str, Any], *, resume: bool) -> State:
        """Read the file, or begin a new one.

        Raises
        ------
        ValueError
            The file is of a run with other options.
        """
        state = cls(path, options)
        if resume and path.exists():
            kept = json.loads(path.read_text())
            if kept["options"] != options:
                raise ValueError(
                    f"{path} is of a run with {kept['options']}, not {options}; "
                    "leave out --resume to begin again, or give another --state"
                )
            for name in cls.KEPT:
                setattr(state, name, kept[name])
        return state

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        kept = {name: getattr(self, name) for name in self.KEPT}
        unfinished.write_text(json.dumps(kept))
        os.replace(unfinished, self.path)

    def put(self, seat: Seat, workload: str, row: dict[str, Any]) -> None:
        """Write down a cell's row in the seat's round."""
        key = key_of(workload, seat.cap, seat.contestant)
        self.cells.setdefault(key, {})[str(seat.round)] = row

    def pending(self, seat: Seat, workloads: Iterable[str]) -> list[str]:
        """Which of a seat's workloads have no row yet."""
        return [
            w
            for w in workloads
            if str(seat.round) not in self.cells.get(key_of(w, seat.cap, seat.contestant), {})
        ]

    def row(self, workload: str, cap: int, contestant: str) -> dict[str, Any] | None:
        """Return a cell's row over all rounds: steps pooled, peaks the highest.

        None if there is none. A cell that did not succeed in some round did not succeed.
        """
        rounds = self.cells.get(key_of(workload, cap, contestant))
        if not rounds:
            return None
        rows = list(rounds.values())
        for row in rows:
            if row["status"] != "measured":
                return dict(row)
        memory = {
            name: max(
                (r["memory"][name] for r in rows if r["memory"][name] is not None), default=None
            )
            for name in rows[0]["memory"]
        }
        pooled = figures([s for r in rows for s in r["steps_s"]])
        steady = all(r["is_repeatable"] for r in rows)
        return {**rows[0], **pooled, "memory": memory, "is_repeatable": steady}

    def expected_s(self, seat: Seat, default_s: float) -> float:
        """How long a seat is expected to take, from those that were like it."""
        alike = [
            took_s
            for name, took_s in self.took_s.items()
            if name.endswith(seat.contestant.replace(" ", "_")) and f"_{seat.family}_" in name
        ]
        return max(alike, default=default_s)
