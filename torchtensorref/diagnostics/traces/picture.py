"""A timeline as a picture: what was resident, what moved and where it waited, at a glance.

Above: a row for each module or tensor that the program has named, dark where it is resident.
In the middle: the bytes on the accelerator under the budget. Below: the engines. Several timelines,
and the accelerators of each, stand side by side on one scale of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...base.errors import ConfigError
from ...base.timeline_tracks import COMPUTE, D2H, H2D, HOST, STALLS
from ...base.units import format_nbytes, format_ns
from .recording import Recording

#: Rows of blocks at most; more are put together by the modules that they are in.
ROWS = 32
#: Rows with a smaller share of the named bytes are one row, of that name.
SMALL = 0.003
OTHERS = "small ones"
#: Engine, label, colour.
ENGINES = (
    (COMPUTE, "compute", "#4c72b0"),
    (STALLS, "stalled", "#c44e52"),
    (H2D, "to the device", "#55a868"),
    (D2H, "to the host", "#8172b3"),
    (HOST, "on the host", "#937860"),
)
#: Prefetches differ from fetches that an operator waits for.
DEMANDED, AHEAD = "#dd8452", "#55a868"


def draw(recordings: Sequence[Recording], path: str, *, title: str = "") -> None:
    """Draw timelines side by side into a PNG.

    Raises
    ------
    ConfigError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "Pictures need matplotlib, which is not installed: pip install 'torchTensorRef[plot]'."
        ) from None
    columns = [each for recording in recordings for each in recording.each]
    figure = Figure(figsize=(3.2 + 5.6 * len(columns), 9.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, len(columns), squeeze=False, sharex=True, height_ratios=(6, 2, 2.4))
    groups = groups_of(columns)
    end_us = max(recording.end_us for recording in recordings) or 1.0
    scale, unit = (1e6, "s") if end_us > 1e6 else (1e3, "ms") if end_us > 1e3 else (1.0, "us")
    for column, recording in enumerate(columns):
        top, middle, bottom = axes[:, column]
        _draw_blocks(top, recording, groups, scale, labelled=column == 0)
        _draw_residency(middle, recording, scale, labelled=column == 0)
        _draw_engines(bottom, recording, scale, labelled=column == 0)
        bottom.set_xlabel(f"{recording.about['clock']} time, {unit}")
        bottom.set_xlim(0, end_us / scale)
        top.set_title(caption(recording), fontsize=10, loc="left")
    if len(recordings) > 1:  # one has them above it
        title = f"{title}\n{figures(recordings)}".strip()
    if title:
        figure.suptitle(title, fontsize=13)
    width = 5 if len(columns) == 1 else 9
    figure.legend(
        handles=_legend(), loc="outside lower center", ncols=width, fontsize=9, frameon=False
    )
    figure.savefig(path)


def figures(recordings: Sequence[Recording]) -> str:
    """How long each timeline took, and how much was copied, in one line."""
    return "; ".join(
        f"{recording.about['strategy']} {format_ns(int(recording.end_us * 1000))} and "
        f"{format_nbytes(sum(one.nbytes(H2D) + one.nbytes(D2H) for one in recording.each))} copied"
        for recording in recordings
    )


def caption(recording: Recording) -> str:
    """The figures of a timeline, in two lines above its picture."""
    about, total_us = recording.about, recording.end_us or 1.0
    stalled = 100 * recording.busy_us(STALLS) / total_us
    return (
        f"{about['strategy']}, {format_nbytes(about['budget_nbytes'])} of {about['device']}: "
        f"{format_ns(int(total_us * 1000))}, {stalled:.0f} % stalled\n"
        f"fetched {format_nbytes(recording.nbytes(H2D))}, "
        f"written back {format_nbytes(recording.nbytes(D2H))}, "
        f"{recording.evict_count} evictions"
    )


# -- rows of blocks -------------------------------------------------------------------------------


def groups_of(recordings: Sequence[Recording]) -> dict[str, str]:
    """Say in which row each named block is: by its module, or a larger one where rows are many.

    Rows come in the order of first use; what is too small to matter is one row, the last.
    """
    sizes: dict[str, int] = {}
    for recording in recordings:
        for number in used_blocks(recording):
            name, nbytes, is_persistent = recording.about["blocks"][number]
            if is_persistent and "." in name:
                sizes.setdefault(name, nbytes)
    for depth in range(12, 0, -1):
        groups = {name: ".".join(name.split(".")[:-1][:depth]) for name in sizes}
        totals: dict[str, int] = {}
        for name, row in groups.items():
            totals[row] = totals.get(row, 0) + sizes[name]
        least_nbytes = SMALL * sum(totals.values())
        small = {row for row, nbytes in totals.items() if nbytes < least_nbytes}
        if len(totals) - len(small) < ROWS:
            break
    large = {name: row for name, row in groups.items() if row not in small}
    return large | {name: OTHERS for name, row in groups.items() if row in small}


def used_blocks(recording: Recording) -> list[str]:
    """The numbers of the blocks, in the order of their first use by an operator."""
    ops = sorted(recording.slices[COMPUTE] + recording.slices[HOST], key=lambda s: s.start_us)
    used = dict.fromkeys(str(number) for op in ops for number in op.args["reads"])
    return [number for number in (*used, *recording.about["blocks"])
            if number in recording.about["blocks"]]  # fmt: skip


def spans_of(recording: Recording) -> dict[int, list[tuple[float, float]]]:
    """When each block was resident, as far as copies and evictions tell."""
    since: dict[int, float] = dict.fromkeys(recording.about["resident_at_first"], 0.0)
    spans: dict[int, list[tuple[float, float]]] = {}
    changes = [(s.start_us, 1, s.args["block"]) for s in recording.slices[H2D]]
    changes += [(e["at_us"], 0, e["block"]) for e in recording.evictions if e["kind"] == "evict"]
    for at_us, is_fetched, block in sorted(changes):
        if is_fetched:
            since.setdefault(block, at_us)
        elif block in since:
            spans.setdefault(block, []).append((since.pop(block), at_us))
    for block, at_us in since.items():
        spans.setdefault(block, []).append((at_us, recording.end_us))
    return spans


def share_of(
    spans: list[tuple[float, float, int]], total_nbytes: int
) -> list[tuple[float, float, float]]:
    """Put spans of several blocks together: (begin, end, share of the bytes that is resident)."""
    edges = sorted(
        [(begin, nbytes) for begin, _, nbytes in spans] + [(end, -n) for _, end, n in spans]
    )
    found, held, before = [], 0, 0.0
    for at, change in edges:
        if held and at > before:
            found.append((before, at, min(held / total_nbytes, 1.0)))
        held, before = held + change, at
    return found


def _draw_blocks(
    axes: Any, recording: Recording, groups: dict[str, str], scale: float, *, labelled: bool
) -> None:
    rows = list(dict.fromkeys(groups.values()))
    spans = spans_of(recording)
    by_row: dict[str, list[tuple[float, float, int]]] = {row: [] for row in rows}
    totals = dict.fromkeys(rows, 0)
    for number, (name, nbytes, _) in recording.about["blocks"].items():
        row = groups.get(name)
        if row is not None:
            totals[row] += nbytes
            by_row[row] += [(begin, end, nbytes) for begin, end in spans.get(int(number), ())]
    for place, row in enumerate(rows):
        shares = share_of(by_row[row], totals[row] or 1)
        if not shares:
            axes.text(
                0.01, place, "never resident", transform=axes.get_yaxis_transform(), va="center",
                fontsize=7, color="#777777",
            )  # fmt: skip
        axes.broken_barh(
            [(begin / scale, (end - begin) / scale) for begin, end, _ in shares],
            (place - 0.42, 0.84),
            facecolors=[(0.16, 0.27, 0.46, 0.12 + 0.88 * share) for *_, share in shares],
            linewidth=0,
        )
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [f"{row}  {format_nbytes(totals[row])}" for row in rows] if labelled else [], fontsize=7
    )
    axes.grid(axis="x", alpha=0.3)
    if labelled:
        axes.set_ylabel("what was resident")


def _draw_residency(axes: Any, recording: Recording, scale: float, *, labelled: bool) -> None:
    budget_mib = recording.about["budget_nbytes"] / 2**20
    times = [at / scale for at, _ in recording.residency]
    sizes = [nbytes / 2**20 for _, nbytes in recording.residency]
    axes.fill_between(times, sizes, step="post", color="#4c72b0", alpha=0.55, linewidth=0)
    axes.axhline(budget_mib, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(0, budget_mib * 1.12)
    axes.grid(axis="x", alpha=0.3)
    if labelled:
        axes.set_ylabel("resident, MiB")


def _draw_engines(axes: Any, recording: Recording, scale: float, *, labelled: bool) -> None:
    total_us = recording.end_us or 1.0
    for place, (track, _, colour) in enumerate(ENGINES):
        slices = recording.slices[track]
        colours: Any = colour
        if track == H2D:
            colours = [AHEAD if s.kind == "prefetch" else DEMANDED for s in slices]
        bars = [(s.start_us / scale, s.took_us / scale) for s in slices]
        # Unsnapped: what is narrower than a pixel is pale, not gone.
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colours, linewidth=0, snap=False)
        busy = 100 * recording.busy_us(track) / total_us
        axes.text(
            1.005, place, f"{busy:.0f} %", transform=axes.get_yaxis_transform(), va="center",
            fontsize=8,
        )  # fmt: skip
    axes.set_ylim(len(ENGINES) - 0.5, -0.5)
    axes.set_yticks(range(len(ENGINES)))
    axes.set_yticklabels([name for _, name, _ in ENGINES] if labelled else [], fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    if labelled:
        axes.set_ylabel("engines")


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dark = (0.16, 0.27, 0.46)
    return [
        Patch(color=(*dark, 1.0), label="all of it resident"),
        Patch(color=(*dark, 0.35), label="a part of it"),
        Patch(color="#4c72b0", label="computes"),
        Patch(color="#c44e52", label="stalled"),
        Patch(color=DEMANDED, label="fetched on demand"),
        Patch(color=AHEAD, label="fetched ahead"),
        Patch(color="#8172b3", label="written back"),
        Patch(color="#937860", label="host computes"),
        Line2D([], [], color="black", linestyle="--", label="budget"),
    ]
