"""What runs in a seat's process: load, place, then one workload after the other.

Whatever happens is written to the job's file at once, a line of JSON each, so that the process that
waits knows what became of a seat that was killed.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch

from . import timeline
from .contestants import CONTESTANTS, Contestant
from .machine import Machine, StopWatch, open_machine
from .probe import probe
from .scales import SCALES
from .weights import folder_of, load, prepare, verify
from .workloads import ALL, Workload, add_adapters

#: Steps to measure, unless the time for a cell is up before.
WANTED_STEPS = 12
#: Who goes on changing is measured after so many times the seconds of warming up, with a note.
LONGEST_WARM_UP = 4
#: The process's exit status when what it was forked from has touched the accelerator.
BAD_FORK = 41
SPOILED = 42


class Job(TypedDict):
    """What a seat is told."""

    device: str
    scale: str
    family: str
    #: "" for the seat that probes the machine and makes the weights.
    contestant: str
    workloads: list[str]
    #: None: no cap, for the reference.
    cap_nbytes: int | None
    headroom_nbytes: int
    weights: str
    out: str
    #: Folder for results (one file per workload), by the same name as the cell.
    results: dict[str, str]
    #: Seconds for a cell after which no more runs are begun, and those to warm up for before them.
    cell_s: float
    warm_s: float
    #: Workload -> a step longer than this is given a timeline in the file named.
    timelines: dict[str, tuple[float, str]]


def main(job: Job) -> None:
    """Run a seat and end the process."""
    if job["device"].startswith("sim:"):
        torch.set_num_threads(1)
    module = torch.get_device_module(torch.device(_real_device(job)).type)
    if getattr(module, "_is_in_bad_fork", lambda: False)():
        sys.exit(BAD_FORK)
    with open(job["out"], "a", buffering=1) as out:

        def say(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")

        if not job["contestant"]:
            _prepare(job, say)
            return
        _run(job, say)


def _real_device(job: Job) -> str:
    return "cpu" if job["device"].startswith("sim:") else job["device"]


def _prepare(job: Job, say: Callable[..., None]) -> None:
    """Make the weights; probe the machine."""
    scale = SCALES[job["scale"]]
    folder = prepare(Path(job["weights"]), scale, job["family"], _real_device(job))
    machine = open_machine(job["device"], scale, job["family"], is_ours=True)
    say(
        event="probe",
        probe=probe(machine),
        digest=verify(folder),
        hardware=machine.describe(),
        total_nbytes=machine.total_nbytes(),
    )


def _run(job: Job, say: Callable[..., None]) -> None:
    scale, contestant = SCALES[job["scale"]], CONTESTANTS[job["contestant"]]
    machine = open_machine(job["device"], scale, job["family"], is_ours=contestant.is_ours)
    say(event="started", workload=None)
    with tempfile.TemporaryDirectory(prefix="small_gpu_") as scratch:
        try:
            prepared, put, is_capped = _bring(job, contestant, machine, Path(scratch))
        except Exception as error:
            _report_failure(say, None, error)
            sys.exit(SPOILED)
        for name in job["workloads"]:
            say(event="started", workload=name)
            try:
                row = _cell(job, ALL[name], contestant, machine, prepared, put)
            except Exception as error:
                _report_failure(say, name, error)
                sys.exit(SPOILED)  # what it leaves behind must not be in the next cell
            note = contestant.notes(machine)
            say(event="measured", workload=name, is_capped=is_capped, note=note, **row)


def _bring(job: Job, contestant: Contestant, machine: Machine, scratch: Path) -> Any:
    """Load and place the model under the cap."""
    cap = job["cap_nbytes"]
    is_capped = machine.cap(cap) if cap is not None else False
    contestant.begin(machine, cap)
    folder = folder_of(Path(job["weights"]), SCALES[job["scale"]], job["family"])
    model = load(folder, job["family"])
    if job["family"] == "lora":
        model = add_adapters(model)
    room = 2**50 if cap is None else cap - job["headroom_nbytes"]
    put = contestant.place(model, machine, room, scratch)
    return contestant.model_to_run(model), put, is_capped


def _report_failure(say: Callable[..., None], workload: str | None, error: Exception) -> None:
    import traceback

    traceback.print_exc()
    text = " ".join(str(error).split())
    ended = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower()
    say(
        event="out of memory" if ended else "failed",
        workload=workload,
        reason=f"{type(error).__name__}: {text[:300]}",
    )


def _cell(
    job: Job,
    workload: Workload,
    contestant: Contestant,
    machine: Machine,
    model: Any,
    put: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Measure one workload."""
    gc.collect()
    machine.reset_peaks()
    run = workload.prepare(model, SCALES[job["scale"]], put)
    runs: list[StopWatch] = []
    results: list[Any] = []

    def run_once() -> None:
        watch = StopWatch(machine)
        results.append(contestant.plain(run(watch)))
        runs.append(watch)

    is_settled = _warm_up(job, workload, contestant, machine, run_once)
    warm_up_count = len(runs)
    began_s = machine.now_s()
    measured: list[float] = []
    wanted = WANTED_STEPS if machine.is_comparable else 1  # of times that say nothing one is enough
    while not machine.runs_once and len(measured) < wanted:
        run_once()
        measured += runs[-1].steps_s
        if _is_virtual(job, contestant) or machine.now_s() - began_s > job["cell_s"]:
            break
    row = {
        **figures(measured or runs[-1].steps_s),
        "first_s": runs[0].steps_s[0],
        "run_count": len(runs),
        "warm_up_count": warm_up_count,
        "is_settled": is_settled,
        "is_comparable": machine.is_comparable,
        "is_repeatable": workload.is_stateful or all(_same(results[0], r) for r in results[1:]),
        "headroom_nbytes": job["headroom_nbytes"],
        "memory": machine.memory(),
        "counts": contestant.counts(),
    }
    torch.save(results[0], job["results"][workload.name])
    limit_s, path = job["timelines"].get(workload.name, (float("inf"), ""))
    if row["step_s"] > limit_s:
        timeline.write(Path(path), machine, lambda: run(StopWatch(machine)))
        row["timeline"] = Path(path).name
    return row


def _warm_up(
    job: Job,
    workload: Workload,
    contestant: Contestant,
    machine: Machine,
    run_once: Callable[[], None],
) -> bool:
    """Run until it is as it will be: the same runs and seconds for all, longer for who changes.

    Returns
    -------
    bool
        Whether it stopped changing; if not, that is said beside the figures.
    """
    if machine.runs_once:
        run_once()
        return True
    began_s, count = machine.now_s(), 0
    is_settled = False
    while True:
        run_once()
        count += 1
        is_settled = _is_virtual(job, contestant) or contestant.is_settled()
        took_s = machine.now_s() - began_s
        if count < workload.warm_up_runs or took_s < job["warm_s"]:
            continue
        most = workload.warm_up_runs * LONGEST_WARM_UP
        if is_settled or (count >= most and took_s >= job["warm_s"] * LONGEST_WARM_UP):
            return is_settled


def _is_virtual(job: Job, contestant: Contestant) -> bool:
    """Whether one measured run is as good as many: virtual time has no noise."""
    return contestant.is_ours and job["device"].startswith("sim:")


def figures(steps_s: list[float]) -> dict[str, Any]:
    """Median and quartiles of the steps, and the steps themselves for pooling."""
    ordered = sorted(steps_s)
    quarter = len(ordered) // 4
    return {
        "step_s": statistics.median(ordered),
        "low_s": ordered[quarter],
        "high_s": ordered[-1 - quarter],
        "steps_s": [round(s, 9) for s in steps_s],
    }


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(json.loads(Path(sys.argv[1]).read_text()))
