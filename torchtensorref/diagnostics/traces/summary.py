"""A timeline as tables: what took the time, what was copied, and what was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...base.text import fitted
from ...base.timeline_tracks import COMPUTE, D2H, H2D, HOST, STALLS, TRACKS
from ...base.units import format_nbytes, format_ns
from .recording import Recording

#: Rows of each table.
ROWS = 8


def headline(recording: Recording) -> str:
    """Say what was run, and what it came to: a line for each accelerator."""
    total_us = recording.end_us
    return "\n".join(
        line for each in recording.each for line in fitted([_came_to(each, total_us)], indent=2)
    )


def _came_to(recording: Recording, total_us: float) -> str:
    about = recording.about
    stalled = 100 * recording.busy_us(STALLS) / total_us if total_us else 0.0
    return (
        f"{about['strategy']} on {about['device']}, {format_nbytes(about['budget_nbytes'])}: "
        f"{format_ns(int(total_us * 1000))}, {stalled:.0f} % stalled, "
        f"{format_nbytes(recording.nbytes(H2D))} fetched, "
        f"{format_nbytes(recording.nbytes(D2H))} written back, "
        f"{recording.evict_count} evictions"
    )


def print_summary(recording: Recording, console: Any) -> None:
    """Print the tables of a recording on a console of rich."""
    console.print(headline(recording), highlight=False, soft_wrap=True)
    clock = recording.about["clock"]
    console.print(f"times by the device's {clock} clock", style="dim")
    if recording.missing:
        console.print(recording.missing, style="red", highlight=False, soft_wrap=True)
    total_us = recording.end_us or 1.0
    engines = [
        (f"{each.about['device']} {name}" if len(recording.each) > 1 and track != HOST else name,
         len(each.slices[track]), _time(each.busy_us(track)),
         f"{100 * each.busy_us(track) / total_us:.0f} %",
         _size(each.nbytes(track)) if track in (H2D, D2H) else "")
        for each in recording.each for track, name in TRACKS.items()
        if track != HOST or each is recording.each[0]
    ]  # fmt: skip
    _print(console, "engines", ("", "count", "time", "busy", "bytes"), engines, most=None)
    for title, track, key in (
        ("operators", COMPUTE, lambda s: s.name),
        ("modules", COMPUTE, lambda s: s.args["module"] or "(none)"),
        ("on the host", HOST, lambda s: s.name),
        ("fetched", H2D, lambda s: s.args["name"]),
        ("written back", D2H, lambda s: s.args["name"]),
        ("stalls: waited for", STALLS, lambda s: s.args.get("name", s.name)),
    ):
        rows = recording.by(track, key)
        if rows:
            width = 3 if track == STALLS else 4  # a wait has no bytes: its copies have
            cells = [(name, count, _time(us), _size(nbytes)) for name, count, us, nbytes in rows]
            _print(
                console, title, ("", "count", "time", "bytes")[:width], [c[:width] for c in cells]
            )
    causes = Counter(one["cause"] for each in recording.each for one in each.evictions)
    _print(console, "evictions", ("", "count"), [(why, n) for why, n in causes.most_common()])


def _print(
    console: Any,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    most: int | None = ROWS,
) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, text in enumerate(head):
        table.add_column(text, justify="right" if number else "left", overflow="fold")
    for row in rows[:most]:
        table.add_row(*map(str, row))
    if len(rows) > (most or len(rows)):
        table.add_row(f"... and {len(rows) - ROWS} more", *[""] * (len(head) - 1))
    console.print(table)


def _time(us: float) -> str:
    return format_ns(int(us * 1000))


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else ""
