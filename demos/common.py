"""What the demos share: options, the runs of a job, and the table that compares them.

A demo is a *job*: plain torch code that returns a tensor. It is run as it is in a process that
never imports torchTensorRef, and once per strategy in one that does; each begins with nothing on
the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    # How a demo calls itself: the runs of one process, and the folder for their answers.
    parser.add_argument("--runs", nargs="+", default=(), help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser


def main(job: Job, parser: argparse.ArgumentParser) -> int:
    """Compare a job under torchTensorRef with the same job under plain torch.

    Returns
    -------
    int
        The exit status: 1 if a number differs or a budget was exceeded.
    """
    chosen = parser.parse_args()
    if chosen.runs:
        run_here(job, chosen)
        return 0
    names = (chosen.strategy,) if chosen.strategy else STRATEGIES
    if chosen.strategy:  # before the runs, which take long: it says what is wrong with the name
        from torchTensorRef.strategy.choice import make_strategy

        with refused_in_a_sentence():
            make_strategy(chosen.strategy)  # without torch, which the runs import
    with tempfile.TemporaryDirectory() as folder:
        # One process for all strategies: it takes longer to load what a job needs than to run it.
        runs = run_in_a_process((PLAIN,), Path(folder)) + run_in_a_process(names, Path(folder))
        pictures = draw(runs[1:], chosen.out)
    print("\n".join(runs[-1]["lines"]))
    for run in runs[1:] if chosen.report else ():
        print(f"\n{run['report']}")
    status = show(runs[0], runs[1:])
    print("\n".join(pictures))
    return status


def run_here(job: Job, chosen: argparse.Namespace) -> None:
    """Do these runs in this process; each leaves what came out in its folder for the answer."""
    for name in chosen.runs:
        answer = folder_of(name, chosen.answers)
        answer.mkdir()
        manager = None if name == PLAIN else managed(chosen, name)
        timeline = nullcontext() if manager is None else manager.trace(answer / "timeline.json")
        with timeline:
            result, lines, model = job(chosen)
        told = {"name": name, "lines": lines, "shape": list(result.shape)}
        if manager is not None:
            told |= {"stats": manager.stats(), "report": manager.report()}
        (answer / "bytes").write_bytes(result.numpy().tobytes())
        (answer / "answer.json").write_text(json.dumps(told))
        del model, result  # they had to live until here: a report is about what is alive
        gc.collect()  # the next run begins with nothing


def folder_of(name: str, answers: Path) -> Path:
    """Return where the run of that name leaves its answer."""
    return answers / name.replace("/", "_")


def managed(chosen: argparse.Namespace, strategy: str) -> Any:
    """Put this process under torchTensorRef: all that a program needs to add."""
    import torchTensorRef

    use(strategy, device=chosen.device, budget=chosen.budget)
    torchTensorRef.tensorsManager.reset_stats()
    torchTensorRef.injectTo.append("transformers")
    return torchTensorRef.tensorsManager


def use(strategy: str, **settings: str) -> None:
    """Set the manager's strategy and more; end with a sentence where one is not understood."""
    import torchTensorRef

    with refused_in_a_sentence():
        for name, value in {**settings, "strategy": strategy}.items():
            setattr(torchTensorRef.tensorsManager, name, value)


@contextmanager
def refused_in_a_sentence() -> Iterator[None]:
    """End with what is wrong with a setting, and nothing else."""
    from torchTensorRef import TensorRefError

    try:
        yield
    except TensorRefError as error:
        raise SystemExit(str(error)) from None


def run_in_a_process(names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Do runs of this demo in a process of their own; return their answers."""
    # Nothing is downloaded; and the plain run must not meet a torchTensorRef that is set to be on.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, *sys.argv, "--runs", *names, "--answers", str(folder)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        said = ", ".join(names)
        raise SystemExit(f"The run of {said} ended with status {done.returncode}, see above.")
    return [answer_in(folder_of(name, folder)) for name in names]


def answer_in(folder: Path) -> dict[str, Any]:
    """Read what a run has left."""
    return json.loads((folder / "answer.json").read_text()) | {
        "bytes": (folder / "bytes").read_bytes(),
        "timeline": folder / "timeline.json",
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
