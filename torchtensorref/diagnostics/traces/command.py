"""``torchtensorref trace``: look at a timeline, or have another strategy run it again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...base.option_parsers import path_to_write


def add_parser(commands: Any) -> None:
    """Add the command and its three kinds to a parser."""
    trace = commands.add_parser("trace", help="look at a timeline that `trace(path)` has written")
    kinds = trace.add_subparsers(dest="kind", required=True, metavar="kind")
    summary = kinds.add_parser("summary", help="tables: what took the time, and what moved")
    summary.add_argument("file")
    plot = kinds.add_parser("plot", help="a picture: what was resident, what moved, what waited")
    plot.add_argument("file", nargs="+", help="several are drawn side by side")
    plot.add_argument("--output", help="the PNG (the file's name with .png)")
    again = kinds.add_parser("replay", help="what another strategy or budget would come to")
    again.add_argument("file")
    again.add_argument("--strategy", help="a strategy's name (that of the run)")
    again.add_argument("--budget", help="most bytes on the device: 6GiB (that of the run)")
    again.add_argument("--device", help="a simulated one: rtx3060, ... (that of the run)")


def main(chosen: argparse.Namespace) -> int:
    """Do what was asked; ConfigError where a file is no timeline."""
    from .picture import draw  # they load torch, which other commands do without
    from .recording import read
    from .summary import headline, print_summary

    if chosen.kind == "summary":
        from rich.console import Console

        print_summary(read(chosen.file), Console())
    elif chosen.kind == "plot":
        recordings = [read(file) for file in chosen.file]
        output = chosen.output or str(Path(chosen.file[0]).with_suffix(".png"))
        path_to_write(output, "--output")
        draw(recordings, output)
        for recording in recordings:
            print(headline(recording))
            if recording.missing:
                print(recording.missing)
        print(f"drawn into {output}")
    else:
        _replay(chosen)
    return 0


def _replay(chosen: argparse.Namespace) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from .recording import read
    from .replay import replay, rows_of

    recording = read(chosen.file)
    cost, replayer = replay(
        recording, strategy=chosen.strategy, budget=chosen.budget, device=chosen.device
    )
    table = Table("", "recorded", "replayed", box=box.SIMPLE_HEAD)
    for row in rows_of(recording, cost, replayer):
        table.add_row(*row)
    Console().print(table)
    if len(recording.each) > 1:
        names = ", ".join(each.about["device"] for each in recording.each)
        print(f"Recorded on {names}; the replay has one accelerator, as the first of them.")
    if any(each.about["resident_at_first"] for each in recording.each):
        print("What was resident when the timeline began is at home when the replay begins.")
