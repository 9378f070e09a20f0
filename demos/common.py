"""What the demos share: options, one fresh process per run, and the table that compares them.

A demo is a *job*: plain torch code that returns a tensor. It is run as it is in a process that
never imports torchTensorRef, and once per strategy in one that does. All begin equally cold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

#: The run that the others are compared with.
PLAIN = "plain"
STRATEGIES = ("genoa", "lru", "flow")
#: Where pictures and timelines are left; git does not look there.
OUT = Path(__file__).with_name("out")

#: Gets the options; returns the tensor to compare, the lines to show, and what the report is about.
Job = Callable[[argparse.Namespace], tuple[Any, list[str], Any]]


def options(text: str, budget: str) -> argparse.ArgumentParser:
    """Make the parser of the options that every demo has."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--device", default="sim", help="sim, sim:rtx3060, cuda, ... (%(default)s)")
    parser.add_argument("--budget", default=budget, help="most bytes there (%(default)s)")
    parser.add_argument("--strategy", help=f"one strategy only (else {' and '.join(STRATEGIES)})")
    parser.add_argument("--report", action="store_true", help="what each run reports, too")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the picture (%(default)s)")
    # How a demo calls itself: one run, and the folder for its answer.
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser


def main(job: Job, parser: argparse.ArgumentParser) -> int:
    """Compare a job under torchTensorRef with the same job under plain torch.

    Returns
    -------
    int
        The exit status: 1 if a number differs or a budget was exceeded.
    """
    chosen = parser.parse_args()
    if chosen.run:
        return run_here(job, chosen)
    names = (PLAIN, *((chosen.strategy,) if chosen.strategy else STRATEGIES))
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_in_a_process(name, Path(folder)) for name in names]
        pictures = draw(runs[1:], chosen.out)
    print("\n".join(runs[-1]["lines"]))
    for run in runs[1:] if chosen.report else ():
        print(f"\n{run['report']}")
    status = show(runs[0], runs[1:])
    print("\n".join(pictures))
    return status


def run_here(job: Job, chosen: argparse.Namespace) -> int:
    """Run the job in this process and write what came out into the folder for the answer."""
    manager = None if chosen.run == PLAIN else managed(chosen)
    timeline = nullcontext() if manager is None else manager.trace(chosen.answer / "timeline.json")
    with timeline:
        result, lines, model = job(chosen)
    answer = {"name": chosen.run, "lines": lines, "shape": list(result.shape)}
    if manager is not None:
        answer |= {"stats": manager.stats(), "report": manager.report()}
    del model  # it had to live until here: a report is about what is alive
    (chosen.answer / "bytes").write_bytes(result.numpy().tobytes())
    (chosen.answer / "answer.json").write_text(json.dumps(answer))
    return 0


def managed(chosen: argparse.Namespace) -> Any:
    """Put this process under torchTensorRef: all that a program needs to add."""
    import torchTensorRef

    try:
        torchTensorRef.tensorsManager.device = chosen.device
        torchTensorRef.tensorsManager.budget = chosen.budget
        torchTensorRef.tensorsManager.strategy = chosen.run
    except torchTensorRef.TensorRefError as error:
        raise SystemExit(str(error)) from None
    torchTensorRef.injectTo.append("transformers")
    return torchTensorRef.tensorsManager


def run_in_a_process(name: str, folder: Path) -> dict[str, Any]:
    """Run this demo once in a process of its own; return its answer."""
    answer = folder / name.replace("/", "_")
    answer.mkdir()
    # Nothing is downloaded; and the plain run must not meet a torchTensorRef that is set to be on.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, *sys.argv, "--run", name, "--answer", str(answer)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"The run of {name} ended with status {done.returncode}, see above.")
    return json.loads((answer / "answer.json").read_text()) | {
        "bytes": (answer / "bytes").read_bytes(),
        "timeline": answer / "timeline.json",
    }


def draw(runs: Sequence[dict[str, Any]], out: Path) -> list[str]:
    """Leave the picture of all runs and their timelines; return what to say of that.

    The timeline without a strategy in its name is that of the last run.
    """
    from torchTensorRef import TensorRefError
    from torchTensorRef.diagnostics.traces import picture, recording

    out.mkdir(parents=True, exist_ok=True)
    demo = Path(sys.argv[0]).stem
    for run in runs:
        last = "" if run is runs[-1] else f"-{run['name']}"
        shutil.copyfile(run["timeline"], out / f"{demo}{last}.json")
    lines = [f"timeline: {out / demo}.json (open it at https://ui.perfetto.dev)"]
    try:
        title = f"{demo}: what was resident, what moved, and where it waited"
        recordings = [recording.read(run["timeline"]) for run in runs]
        picture.draw(recordings, str(out / f"{demo}.png"), title=title)
    except TensorRefError as error:
        return [*lines, f"no picture: {error}"]
    return [f"picture:  {out / demo}.png", *lines]


def show(plain: dict[str, Any], runs: Sequence[dict[str, Any]]) -> int:
    """Print the table and the verdicts; return the exit status."""
    for run in runs:
        stats = run["stats"]
        run["identical"] = (run["bytes"], run["shape"]) == (plain["bytes"], plain["shape"])
        run["within"] = stats["peak_resident_nbytes"] <= stats["budget_nbytes"]
    print()
    Console().print(table_of(runs))
    for run in runs:
        print(
            f"{run['name']}: identical to plain torch: {run['identical']}, "
            f"peak within budget: {run['within']}"
        )
        for reason, count in run["stats"]["host_fallback_reasons"].items():
            print(f"  {count} operators on the host: {reason}")
    return 0 if all(run["identical"] and run["within"] for run in runs) else 1


def table_of(runs: Sequence[dict[str, Any]]) -> Table:
    """Lay the runs out, one row each, in 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("strategy")
    for heading in ("peak\nresident\nMiB", "budget\nMiB", "fetched\nMiB", "written\nback\nMiB"):
        table.add_column(heading, justify="right")
    for heading in ("stalled\n%", "oper-\nators", "host\nfallbacks"):
        table.add_column(heading, justify="right")
    table.add_column("same\nbits")
    for run in runs:
        stats = dict(run["stats"])
        stats["fetched_nbytes"] += stats["prefetched_nbytes"]
        names = ("peak_resident", "budget", "fetched", "written_back")
        sizes = [f"{stats[f'{name}_nbytes'] / 2**20:.2f}" for name in names]
        share = stats["stall_ns"] / max(stats["time_ns"], 1)
        sizes.append(f"{100 * share:.0f}")
        counts = [str(stats[name]) for name in ("op_count", "host_fallback_count")]
        table.add_row(run["name"], *sizes, *counts, str(run["identical"]))
    return table
