"""A timeline read from its file: slices by track, evictions, residency, and its own words.

Of several accelerators each has a recording of its own; that of the first has the host, too.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.timeline_tracks import COMPUTE, D2H, H2D, HOST, STALLS, VERSION

#: How the file of a timeline begins.
BEGINNING = '{"traceEvents"'


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
    #: Those of all accelerators, in their order, this one included.
    each: list[Recording] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Take it for that of the only accelerator until others are said."""
        self.each = self.each or [self]

    @property
    def operators(self) -> list[Slice]:
        """Those of all accelerators and of the host, in the order in which they were called."""
        tracks = [each.slices[track] for each in self.each for track in (COMPUTE, HOST)]
        return sorted((s for track in tracks for s in track), key=lambda s: s.args["place"])

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the recorded time."""
        stats: dict[str, Any] = self.about["stats"]
        return stats

    @property
    def evict_count(self) -> int:
        """How many replicas this accelerator has given up."""
        return sum(one["kind"] == "evict" for one in self.evictions)

    @property
    def end_us(self) -> float:
        """When the last thing ended, on whatever accelerator."""
        tracks = [track for each in self.each for track in each.slices.values()]
        return max((s.end_us for track in tracks for s in track), default=0.0)

    @property
    def missing(self) -> str:
        """What a timeline lacks that was cut, in words; "" if it has all."""
        if not self.about["is_cut"]:
            return ""
        return (
            f"The timeline was cut: it has {len(self.operators):,} of "
            f"{self.stats['op_count']:,} operators. trace(path, limit=...) keeps more events."
        )

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
        """Sum slices of a track by a key: (key, count, microseconds, bytes), longest first.

        Those of all accelerators.
        """
        count: Counter[str] = Counter()
        took: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for one in (s for each in self.each for s in each.slices.get(track, ())):
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
        There is no such file, it is none of ours, or a part of it is missing.
    """
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        if text.startswith(BEGINNING):
            at = f"at character {error.pos:,}" if isinstance(error, json.JSONDecodeError) else ""
            raise _damaged(path, f"it breaks off {at} of {len(text):,}") from None
        value = None
    if not isinstance(value, dict) or "torchTensorRef" not in value:
        raise ConfigError(
            f"{str(path)!r} is no timeline of ours. Make one with "
            "`with tensorsManager.trace('run.json'):` or `torchtensorref run --timeline run.json`."
        )
    version = value["torchTensorRef"].get("version")
    if version != VERSION:
        raise ConfigError(
            f"{str(path)!r} is a timeline of format {version}; this torchTensorRef reads format "
            f"{VERSION}. Read it with the one that has written it, or record it again."
        )
    found, loose_count = _taken_apart(value)
    if loose_count:
        raise _damaged(path, f"{loose_count:,} operators or copies have lost their begin or end")
    return found


def _damaged(path: str | Path, what: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is not whole: {what}. Copy it again from where it was written, or record "
        "it again."
    )


def recording_of(value: dict[str, Any]) -> Recording:
    """Take a trace apart."""
    return _taken_apart(value)[0]


def _taken_apart(value: dict[str, Any]) -> tuple[Recording, int]:
    """Take a trace apart; say how many slices have no begin, or no end."""
    about = value["torchTensorRef"]
    every = [_empty(about), *(_empty({**about, **other}) for other in about.get("others", ()))]
    begun: dict[tuple[int, int], dict[str, Any]] = {}
    loose_count = 0
    for event in value["traceEvents"]:
        found, track = every[event["pid"] - 1], (event["pid"], event.get("tid"))
        if event["ph"] == "B":
            loose_count += track in begun
            begun[track] = event
        elif event["ph"] == "E" and track not in begun:
            loose_count += 1
        elif event["ph"] == "E":
            head = begun.pop(track)
            found.slices[event["tid"]].append(
                Slice(head["name"], head["cat"], head["ts"], event["ts"], head["args"])
            )
        elif event["ph"] == "C":
            found.residency.append((event["ts"], event["args"]["bytes"]))
        elif event["ph"] == "i":
            found.evictions.append({"at_us": event["ts"], "kind": event["cat"], **event["args"]})
    for one in every:
        one.each = every
    return every[0], loose_count + len(begun)


def _empty(about: dict[str, Any]) -> Recording:
    return Recording(about, {track: [] for track in (COMPUTE, STALLS, H2D, D2H, HOST)})
