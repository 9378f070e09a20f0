"""A timeline read from its file: slices by track, evictions, residency, and its own words."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...interception.onlookers.chrome import COMPUTE, D2H, H2D, HOST, STALLS


@dataclass(frozen=True, slots=True)
class Slice:
    """One operator, copy or stall; times in microseconds from the beginning."""

    name: str
    kind: str
    start_us: float
    end_us: float
    args: dict[str, Any]

    @property
    def took_us(self) -> float:
        """How long it took."""
        return self.end_us - self.start_us


@dataclass
class Recording:
    """A timeline: what it says of itself, and what happened in the order of time."""

    about: dict[str, Any]
    slices: dict[int, list[Slice]] = field(default_factory=dict)
    evictions: list[dict[str, Any]] = field(default_factory=list)
    #: (microseconds, bytes), after each operator.
    residency: list[tuple[float, int]] = field(default_factory=list)

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the recorded time."""
        stats: dict[str, Any] = self.about["stats"]
        return stats

    @property
    def end_us(self) -> float:
        """When the last thing ended."""
        return max((s.end_us for track in self.slices.values() for s in track), default=0.0)

    def busy_us(self, track: int) -> float:
        """How long an engine worked."""
        return sum(s.took_us for s in self.slices.get(track, ()))

    def nbytes(self, track: int) -> int:
        """Bytes that an engine copied."""
        return sum(s.args["nbytes"] for s in self.slices.get(track, ()))

    def name_of(self, block_id: int) -> str:
        """The name of a block."""
        row = self.about["blocks"].get(str(block_id))
        return row[0] if row else f"b{block_id}"

    def by(self, track: int, key: Any) -> list[tuple[str, int, float, int]]:
        """Sum slices of a track by a key: (key, count, microseconds, bytes), longest first."""
        count: Counter[str] = Counter()
        took: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for one in self.slices.get(track, ()):
            count[key(one)] += 1
            took[key(one)] += one.took_us  # type: ignore[assignment]
            nbytes[key(one)] += one.args.get("nbytes", 0)
        rows = [(name, count[name], took[name], nbytes[name]) for name in count]
        return sorted(rows, key=lambda row: (-row[2], row[0]))


def read(path: str | Path) -> Recording:
    """Read a timeline.

    Raises
    ------
    ConfigError
        There is no such file, or it is none of ours.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except ValueError:
        value = None
    if not isinstance(value, dict) or "torchTensorRef" not in value:
        raise ConfigError(
            f"{str(path)!r} is no timeline of ours. Make one with "
            "`with tensorsManager.trace('run.json'):` or `torchtensorref run --timeline run.json`."
        )
    return recording_of(value)


def recording_of(value: dict[str, Any]) -> Recording:
    """Take a trace apart."""
    found = Recording(value["torchTensorRef"], {t: [] for t in (COMPUTE, STALLS, H2D, D2H, HOST)})
    begun: dict[int, dict[str, Any]] = {}
    for event in value["traceEvents"]:
        if event["ph"] == "B":
            begun[event["tid"]] = event
        elif event["ph"] == "E":
            head = begun.pop(event["tid"])
            found.slices[event["tid"]].append(
                Slice(head["name"], head["cat"], head["ts"], event["ts"], head["args"])
            )
        elif event["ph"] == "C":
            found.residency.append((event["ts"], event["args"]["bytes"]))
        elif event["ph"] == "i":
            found.evictions.append({"at_us": event["ts"], "kind": event["cat"], **event["args"]})
    return found
