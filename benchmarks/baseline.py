"""What a benchmark found when it was last written down, and how this run compares with that.

A benchmark's baseline is a file in `results/`: figures by name, each with its unit, and on what
they were measured. Of every figure less is better. A run ends with a table of the measured figures
beside the baseline's and their bounds, and fails if a figure is worse than its baseline by more
than the benchmark tolerates, or over its bound. Only `--write-baseline` writes the file, and only
after a whole run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

#: Columns of what is printed, so that a log looks as the screen does.
WIDTH = 110
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "peft", "safetensors")


class Figure(NamedTuple):
    """One thing measured; a bool (unit "yes or no") says whether something bad is so."""

    value: float
    unit: str
    #: What it may be at most, whatever it was before.
    bound: float | None = None


class Tolerance(NamedTuple):
    """How far above its baseline a figure may be: a share of it or so much in its unit."""

    share: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        if self == EXACT:
            return "figures must be equal"
        amount = f" and more than {self.amount:g}" if self.amount else ""
        return f"worse: more than {self.share:.0%}{amount} above the baseline"

    def of(self, baseline: float) -> float:
        """Return how much that is; nothing for what is or is not so."""
        return 0.0 if isinstance(baseline, bool) else max(self.share * baseline, self.amount)


#: In virtual time nothing varies, so a change for the better is one to be written down, too.
EXACT = Tolerance()


@dataclass(frozen=True)
class Baseline:
    """What is in the file.

    Attributes
    ----------
    settings : dict
        What a run has to have in common with the baseline to be compared with it.
    measured_on : dict
        The machine and the versions, for a reader who wonders about a difference.
    figures : dict
        Name -> figure, without bounds: those are the benchmark's.
    """

    settings: dict[str, Any]
    measured_on: dict[str, str]
    figures: dict[str, Figure]

    @classmethod
    def read(cls, path: Path) -> Baseline | None:
        """Read a file; None if there is none."""
        if not path.exists():
            return None
        kept = json.loads(path.read_text())
        figures = {name: Figure(**one) for name, one in kept["figures"].items()}
        return cls(kept["settings"], kept["measured_on"], figures)

    def write(self, path: Path) -> None:
        """Write the file, a figure a line, so that a difference of two versions can be read."""
        figures = [
            f"    {json.dumps(name)}: {json.dumps({'value': one.value, 'unit': one.unit})}"
            for name, one in self.figures.items()
        ]
        head = {"settings": self.settings, "measured_on": self.measured_on}
        start = json.dumps(head, indent=2).removesuffix("\n}")
        path.write_text(start + ',\n  "figures": {\n' + ",\n".join(figures) + "\n  }\n}\n")


@dataclass(frozen=True)
class Row:
    """A figure beside its baseline."""

    name: str
    figure: Figure
    #: None: the baseline does not have it.
    baseline: float | None
    tolerance: Tolerance

    @property
    def is_above(self) -> bool:
        """Worse than the baseline by more than tolerated."""
        if self.baseline is None:
            return False
        return self.figure.value > self.baseline + self.tolerance.of(self.baseline)

    @property
    def is_below(self) -> bool:
        """Better by as much as would be too much if it were worse: time for a new baseline."""
        if self.baseline is None:
            return False
        return self.figure.value < self.baseline - self.tolerance.of(self.baseline)

    @property
    def is_over(self) -> bool:
        """Whether the bound is exceeded, whatever the baseline says."""
        return self.figure.bound is not None and self.figure.value > self.figure.bound

    @property
    def contradicts(self) -> bool:
        """Whether the baseline is no longer true."""
        return self.is_above or (self.is_below and self.tolerance == EXACT)

    @property
    def verdict(self) -> str:
        """What is to be said of it; nothing where it is as before and within the bound."""
        words = "WORSE" if self.is_above else "better" if self.is_below else ""
        return ", ".join(filter(None, [words, "OVER THE BOUND" if self.is_over else ""]))

    @property
    def difference(self) -> str:
        """The measured figure less the baseline."""
        if self.baseline is None or isinstance(self.baseline, bool):
            return "-"
        difference = self.figure.value - self.baseline
        share = f" ({difference / self.baseline:+.1%})" if self.baseline else ""
        return f"{difference:+.4g}{share}"


def compare(
    figures: dict[str, Figure], baseline: Baseline | None, tolerance: Tolerance
) -> list[Row]:
    """Put each measured figure beside the baseline's; those that were not measured are left out."""
    before = {} if baseline is None else baseline.figures
    return [
        Row(name, figure, before[name].value if name in before else None, tolerance)
        for name, figure in figures.items()
    ]


@dataclass(frozen=True)
class Keeper:
    """Keeps the baseline of one benchmark.

    Attributes
    ----------
    name : str
        Of the file, without its ending.
    command : str
        What runs the whole benchmark.
    tolerance : Tolerance
        Of every figure.
    binding : tuple of str
        Packages whose versions decide what is done: with another one nothing is compared.
    """

    name: str
    command: str
    tolerance: Tolerance
    folder: Path = RESULTS
    binding: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.name}.json"

    @staticmethod
    def parse(
        parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, defaults: Iterable[str]
    ) -> argparse.Namespace:
        """Read the command line, to which `--write-baseline` is added.

        A baseline is of a whole run: with the default of each of the options in `defaults`. Any
        other ends the program here, before it measures anything.
        """
        parser.add_argument(
            "--write-baseline", action="store_true", help="what is measured is the new baseline"
        )
        chosen = parser.parse_args(arguments)
        others = [n for n in defaults if getattr(chosen, n) != parser.get_default(n)]
        if chosen.write_baseline and others:
            names = ", ".join("--" + name.replace("_", "-") for name in others)
            parser.error(f"--write-baseline needs a whole run, without {names}")
        return chosen

    def conclude(
        self,
        figures: dict[str, Figure],
        result: Any,
        *,
        settings: dict[str, Any],
        writes: bool,
    ) -> int:
        """Print the comparison, the line RESULT, and what is wrong; write the baseline if asked to.

        Returns
        -------
        int
            The exit status: 1 if a figure is over its bound, or worse than the baseline without
            becoming the baseline itself, or if nothing was measured.

        Notes
        -----
        RESULT is the last line of the standard output; what is wrong goes to the standard error.
        """
        baseline, here = Baseline.read(self.path), measured_on()
        is_alike = baseline is not None and baseline.settings == settings
        comparable = baseline if is_alike and not self._unlike(baseline, here) else None
        rows = compare(figures, comparable, self.tolerance)
        screen = Console(width=WIDTH, highlight=False, markup=False)
        screen.print(self._table(rows))
        for line in [*self._remarks(baseline, settings, here), *_left_out(rows, comparable)]:
            screen.print(line)
        print("RESULT " + json.dumps(result), flush=True)
        said = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        for line in _wrong(rows):
            said.print(line)
        if not rows:
            said.print("Nothing was measured: is a name misspelt?")
            return 1
        if writes:
            Baseline(settings, here, figures).write(self.path)
            said.print(f"written: {self.path}")
        return int(any(row.is_over or (row.contradicts and not writes) for row in rows))

    def _unlike(self, baseline: Baseline | None, here: dict[str, str]) -> list[str]:
        """Name the packages that bind and are of another version than the baseline's."""
        before = {} if baseline is None else baseline.measured_on
        return [name for name in self.binding if here.get(name) != before.get(name)]

    def _table(self, rows: list[Row]) -> Table:
        """All figures; of those that must be equal and are, only the number."""
        shown = [row for row in rows if self.tolerance != EXACT or row.verdict]
        table = Table(title=f"{self.name}: {self.tolerance}")
        table.add_column("figure", overflow="fold")
        for heading in ("measured", "baseline", "bound", "difference"):
            table.add_column(heading, justify="right")
        for heading in ("unit", ""):
            table.add_column(heading)
        for row in shown:
            numbers = (row.figure.value, row.baseline, row.figure.bound)
            last = (row.difference, row.figure.unit, row.verdict)
            table.add_row(row.name, *map(number, numbers), *last)
        if len(shown) < len(rows):
            table.caption = f"{len(rows) - len(shown)} more figures with nothing to say of them"
        return table

    def _remarks(
        self, baseline: Baseline | None, settings: dict[str, Any], here: dict[str, str]
    ) -> Iterator[str]:
        """Say what the baseline is, and how what it was measured on differs from this."""
        if baseline is None:
            yield f"No baseline yet; write one with: {self.command} --write-baseline"
        elif baseline.settings != settings:
            yield f"Not compared: the baseline is of {baseline.settings}, this run of {settings}."
        else:
            others = self._unlike(baseline, here)
            if others:
                yield f"Not compared: other versions of {', '.join(others)} do other things."
            for name, before in baseline.measured_on.items():
                if here.get(name) != before:
                    yield f"{name}: the baseline's was {before}, here it is {here.get(name)}"


def _left_out(rows: list[Row], baseline: Baseline | None) -> Iterator[str]:
    """Count the figures that only one side has."""
    if baseline is None:
        return
    new = [row.name for row in rows if row.baseline is None]
    if new:
        yield f"Not in the baseline: {', '.join(new)}"
    missing = len(baseline.figures) - (len(rows) - len(new))
    if missing:
        yield f"{missing} figures of the baseline were not measured in this run."


def _wrong(rows: list[Row]) -> Iterator[str]:
    """Name the figures that a run fails for."""
    for words, those in (
        ("Worse than the baseline", [row for row in rows if row.is_above]),
        ("Better, but not equal", [row for row in rows if row.is_below and row.contradicts]),
        ("Over the bound", [row for row in rows if row.is_over]),
    ):
        if those:
            yield f"{words}: {', '.join(map(_named, those))}"


def _named(row: Row) -> str:
    return f"{row.name} ({number(row.figure.value)})"


def number(value: float | None) -> str:
    """A figure for people.

    Examples
    --------
    >>> number(None), number(False), number(12345.678), number(1.03), number(1512345678)
    ('-', 'no', '12345.7', '1.03', '1512345678')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def versions() -> dict[str, str]:
    """What is installed here."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        is_there = importlib.util.find_spec(name) is not None
        found[name] = importlib.metadata.version(name) if is_there else "not installed"
    return found


def measured_on() -> dict[str, str]:
    """Return this machine, and what is installed on it."""
    return {
        "system": platform.platform(),
        "processor": f"{os.cpu_count()} x {processor()}",
        **versions(),
    }


def processor() -> str:
    """Name the processor; platform.processor() does not on Linux."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
