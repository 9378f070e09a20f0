"""The page: what was measured, on what, and why cells are missing."""

from __future__ import annotations

from typing import Any

from ..baseline import versions
from .compare import Comparison
from .plan import NO_CAP, Selection
from .scales import WORKLOADS
from .weights import sizes_of

HEADINGS = (
    "workload",
    "cap",
    "contestant",
    "step",
    "quartiles",
    "first",
    "of bound",
    "of floor",
    "allocated",
    "reserved",
    "RSS",
    "page-locked",
    "staged",
    "retries",
    "same",
    "note",
)


def seconds(s: float | None) -> str:
    """A time with three figures.

    Examples
    --------
    >>> seconds(0.0123456), seconds(1.5), seconds(None)
    ('12.3 ms', '1.5 s', '-')
    """
    if s is None:
        return "-"
    if s >= 1:
        return f"{s:.3g} s"
    return f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us"


def nbytes(n: int | None) -> str:
    """A size with three figures.

    Examples
    --------
    >>> nbytes(14_483_464_192), nbytes(900), nbytes(None)
    ('14.5 GB', '900 B', '-')
    """
    if n is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def sameness(same: dict[str, Any]) -> str:
    """What became of the comparison with the reference."""
    if not same:
        return "no reference"
    if same["bits"]:
        return "bits"
    words = f"differs by {same['largest']:.2g}"
    return words if same["tokens"] is None else f"tokens {same['tokens']}; {words}"


def cells_of(row: dict[str, Any]) -> list[str]:
    """One row of the table, as text."""
    start = [row["workload"], f"{row['cap']} %", row["contestant"]]
    if row["status"] != "measured":
        return [*start, *["-"] * (len(HEADINGS) - 4), f"{row['status']}: {row['reason']}"]
    times = [seconds(row["step_s"]), f"{seconds(row['low_s'])} to {seconds(row['high_s'])}"]
    times.append(seconds(row["first_s"]))
    if not row["is_comparable"]:
        times = [f"({text})" for text in times]
    memory = row["memory"]
    allocated = nbytes(memory["allocated"])
    if memory["allocated"] is not None and row["cap_nbytes"]:
        allocated += f" ({memory['allocated'] / row['cap_nbytes']:.0%})"
    counted = row.get("counts", {})
    page_locked = memory["page_locked"]
    for name, value in counted.items():
        if "page_locked" in name and isinstance(value, int):
            page_locked = (page_locked or 0) + value
    return [
        *start,
        *times,
        *(f"{row[share]:.1%}" if share in row else "-" for share in ("of_bound", "of_floor")),
        allocated,
        nbytes(memory["reserved"]),
        nbytes(memory["rss"]),
        nbytes(page_locked),
        nbytes(counted.get("staged_nbytes")),
        "-" if memory.get("retries") is None else str(memory["retries"]),
        sameness(row["same"]),
        "; ".join(_notes(row)),
    ]


def _notes(row: dict[str, Any]) -> list[str]:
    notes = [row["note"]] if row.get("note") else []
    if not row["is_repeatable"]:
        notes.append("two runs differed")
    if not row.get("is_settled", True):
        notes.append("still changing when it was measured")
    if row["headroom_nbytes"]:
        notes.append(f"headroom {nbytes(row['headroom_nbytes'])}")
    if row.get("counts", {}).get("host_fallbacks"):
        notes.append(f"{row['counts']['host_fallbacks']} operators on the host")
    if row.get("timeline"):
        notes.append(f"timeline: {row['timeline']}")
    return notes


def unexplained(rows: list[dict[str, Any]]) -> list[str]:
    """Name the cells that have neither figures nor a reason."""
    return [
        f"{row['workload']}/{row['cap']}/{row['contestant']}"
        for row in rows
        if not (row["status"] == "measured" and row.get("step_s", 0) > 0)
        and not str(row.get("reason", "")).strip()
    ]


def page(comparison: Comparison, selection: Selection, command: str) -> str:
    """Return the whole page in Markdown."""
    rows = comparison.rows(selection)
    lines = [
        "# Models larger than the accelerator's budget",
        "",
        f"Written by `{command}`. `docs/benchmarks.md` says what the columns mean.",
        "",
        *_machine(comparison),
        "",
        *_workloads(comparison, selection),
        "",
        *_grid(HEADINGS, [cells_of(row) for row in rows]),
        "",
        "## Targets",
        "",
        *_grid(
            ("workload", "cap", "what", "wanted", "found", "met"),
            [
                [t["workload"], f"{t['cap']} %", t["what"], t["wanted"], t["found"], _met(t["met"])]
                for t in comparison.targets(selection)
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def _met(met: bool | None) -> str:
    return {True: "yes", False: "no", None: "not measured"}[met]


def _grid(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]


def _machine(comparison: Comparison) -> list[str]:
    """Hardware, versions, and what the probe found."""
    lines = []
    for family, found in comparison.state.probes.items():
        what = ", ".join(f"{name}: {text}" for name, text in found["hardware"].items())
        probe = found["probe"]
        lines += [
            f"* {family}: {what}; weights {found['digest']}.",
            f"  Reached: h2d {probe['h2d_bytes_per_s'] / 1e9:.3g} GB/s, d2h "
            f"{probe['d2h_bytes_per_s'] / 1e9:.3g} GB/s, device memory "
            f"{probe['memory_bytes_per_s'] / 1e9:.4g} GB/s, "
            f"{probe['flops_per_s'] / 1e12:.3g} TFLOP/s in bfloat16.",
        ]
        for name, by_size in probe["link"].items():
            rates = ", ".join(
                f"{int(size) / 2**20:g} MiB {rate / 1e9:.3g}" for size, rate in by_size.items()
            )
            lines.append(f"  {name}, GB/s by size: {rates}.")
    lines.append("* " + ", ".join(f"{name} {text}" for name, text in versions().items()) + ".")
    if comparison.is_dry:
        lines.append(
            "* A dry run: times of ours are virtual; those of the others are the host's, in "
            "parentheses, and say nothing."
        )
    if comparison.is_rehearsal:
        lines.append(
            "* A rehearsal without an accelerator: all times are the host's, and say nothing."
        )
    return lines


def _workloads(comparison: Comparison, selection: Selection) -> list[str]:
    """What the bound is made of."""
    rows = []
    for workload in selection.workloads:
        sizes = sizes_of(comparison.scale, WORKLOADS[workload])
        needs, reference = comparison.needs(workload), comparison.reference(workload)
        alone = comparison.state.row(workload, NO_CAP, "lru" if comparison.is_dry else "plain")
        is_measured = alone is not None and alone["status"] == "measured"
        rows.append(
            [
                workload,
                nbytes(sizes.nbytes),
                nbytes(needs.read_nbytes * needs.passes),
                nbytes(needs.other_nbytes),
                nbytes(comparison.needs(workload, "between_steps").other_nbytes),
                seconds(needs.compute_s) + ("" if is_measured else " (roofline)"),
                reference.words if reference else "none",
            ]
        )
    return _grid(
        (
            "workload",
            "weights",
            "read per step",
            "beside them in a step",
            "between steps",
            "all resident",
            "same as",
        ),
        rows,
    )
