"""The command line: `python -m benchmarks.small_gpu --help`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..baseline import EXACT, Keeper
from . import archive, table
from .compare import Comparison, figures_of_ours
from .contestants import CONTESTANTS, reason_not
from .plan import NO_CAP, Seat, Selection, State, seats, selection_of, workloads_of
from .processes import Ending, Processes
from .scales import SCALES, WORKLOADS
from .seat import Job

#: The exit status of a run that has to be gone on with: EX_TEMPFAIL.
UNFINISHED = 75
#: Times of other devices are those of one machine, and their pages say which.
#: Other versions of what the models are made of run other operators.
BINDING = ("torch", "transformers", "peft")
KEEPER = Keeper("small_gpu_dry", "python -m benchmarks.small_gpu --dry", EXACT, binding=BINDING)


class OutOfTime(Exception):
    """The minutes of this call are used up; `events` is what a process had found by then."""

    def __init__(self, reason: str, events: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(reason)
        self.events = events


class Bench:
    """One call of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.scale = SCALES[options.scale]
        self.folder: Path = options.folder
        self.selection: Selection = options.only
        self.deadline_s = time.perf_counter() + options.minutes * 60
        what = {"device": options.device, "scale": options.scale}
        # What is in one file is gone on with: to begin again, remove it.
        is_kept = options.archive is not None and archive.unpack(options.archive, self.folder)
        is_resuming = bool(options.resume) or is_kept
        if not is_resuming:
            shutil.rmtree(self.folder / "run", ignore_errors=True)
        self.state = State.open(self.folder / "run" / "state.json", what, resume=is_resuming)
        self.results = self.folder / "run" / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        self.comparison = Comparison(self.state, self.results)
        self.processes = Processes(self.folder / "run" / "seats", is_forking=self.state.is_forking)
        self.console = Console(stderr=True)

    def run(self) -> bool:
        """Run every seat that has not been; return whether all have."""
        try:
            self._prepare()
            references = ("plain", "lru") if self.comparison.is_dry else ("plain",)
            for seat in seats(self.selection, self.options.rounds, references):
                self._run_seat(seat)
        except OutOfTime as reason:
            self.console.print(f"not finished: {reason}")
            return False
        finally:
            self._save()
        return True

    def _save(self) -> None:
        """Write down what is known, also into the archive if there is one."""
        self.state.save()
        if self.options.archive is not None:
            archive.pack(self.options.archive, self.folder, self.comparison.is_needed)

    def _prepare(self) -> None:
        """Make the weights and probe the machine: for each family, where it is simulated."""
        families = {WORKLOADS[w]: None for w in self.selection.workloads}
        for family in families:
            stands_for = family if self.comparison.is_dry or family != "lora" else "llama"
            known = self.state.probes.get(stands_for)
            if known is not None and self._has_weights(stands_for):
                continue
            found, ending = self._probe(stands_for)
            if found is None and self.processes.is_forking and not self.comparison.is_dry:
                # A library may open the accelerator when it is imported, without torch's knowing.
                self.processes.is_forking = False
                found, ending = self._probe(stands_for)
            self.state.is_forking = self.processes.is_forking
            if found is None:
                raise RuntimeError(f"the probe {ending.status}; see {self.processes.folder}")
            if known is not None and known["digest"] != found["digest"]:
                raise RuntimeError(
                    f"the weights made here ({found['digest']}) are not those of the run that is "
                    f"gone on with ({known['digest']}); begin again with another --state"
                )
            self.state.probes.setdefault(stands_for, found)
            self._save()

    def _has_weights(self, family: str) -> bool:
        from .weights import folder_of

        folder = folder_of(self.folder / "weights", self.scale, family)
        return self.options.archive is None or (folder / "manifest.json").exists()

    def _probe(self, family: str) -> tuple[dict[str, Any] | None, Ending]:
        expected_s = self.options.expected_seconds
        ending = self._process(f"probe_{family}", self._job(family, "", []), expected_s)
        return next((e for e in ending.events if e["event"] == "probe"), None), ending

    def _job(self, family: str, contestant: str, workloads: list[str]) -> Job:
        return Job(
            device=self.options.device,
            scale=self.options.scale,
            family=family,
            contestant=contestant,
            workloads=workloads,
            cap_nbytes=None,
            headroom_nbytes=0,
            weights=str(self.folder / "weights"),
            out="",
            results={},
            cell_s=self.options.cell_seconds,
            warm_s=self.options.warm_seconds,
            timelines={},
        )

    def _process(self, name: str, job: Job, expected_s: float) -> Ending:
        """Run a process, unless there is no time for it.

        Raises
        ------
        OutOfTime
            It was not begun, or had to be stopped because this call is over.
        """
        left_s = self.deadline_s - time.perf_counter()
        if left_s < expected_s:
            raise OutOfTime(f"{name} may take {expected_s:.0f} s, {max(0, left_s):.0f} are left")
        limit_s = min(left_s, self.options.seat_seconds)
        ending = self.processes.run(name, job, limit_s)
        self.state.took_s[name] = ending.took_s
        if ending.status.startswith("stopped") and limit_s < self.options.seat_seconds:
            # The next call expects as much; a seat that no call has room for ends by its own limit.
            raise OutOfTime(f"{name} was {ending.status}", ending.events)
        return ending

    def _run_seat(self, seat: Seat) -> None:
        """Run a seat, in as many processes as it needs."""
        contestant = CONTESTANTS[seat.contestant]
        pending = self.state.pending(seat, workloads_of(seat, self.selection))
        for workload in list(pending):
            nbytes, cap = self._nbytes(seat.family), self.comparison.cap_nbytes(workload, seat.cap)
            room = 2**60 if cap is None else cap
            reason = reason_not(contestant, workload, room, nbytes, self.options.device)
            if reason is not None:
                self.state.put(seat, workload, {"status": "skipped", "reason": reason})
                pending.remove(workload)
        if not pending:
            return
        cap = self.comparison.cap_nbytes(pending[0], seat.cap)
        headrooms = contestant.headrooms(2**60 if cap is None else cap, self._nbytes(seat.family))
        while pending:
            job = self._job(seat.family, seat.contestant, pending)
            job["cap_nbytes"], job["headroom_nbytes"] = cap, headrooms[0]
            for workload in pending:
                path = self.comparison.path_of(workload, seat.cap, seat.contestant)
                job["results"][workload] = str(path)
            job["timelines"] = self._timelines(seat, pending)
            expected_s = self.state.expected_s(seat, self.options.expected_seconds)
            try:
                ending = self._process(seat.name, job, expected_s)
            except OutOfTime as cut:
                for event in cut.events:
                    self._put_measured(seat, event)
                self._save()
                raise
            pending, headrooms = self._take(seat, pending, headrooms, ending)
            self._save()
            done = f"{seat.name:40} {ending.took_s:6.1f} s  {ending.status}"
            self.console.print(done, highlight=False)

    def _nbytes(self, family: str) -> int:
        from .weights import sizes_of

        return sizes_of(self.scale, family).nbytes

    def _timelines(self, seat: Seat, workloads: list[str]) -> dict[str, tuple[float, str]]:
        if seat.contestant != "flow" or seat.cap == NO_CAP:
            return {}
        folder = self.folder / "timelines"
        limits = {w: self.comparison.slowest_allowed_s(w, seat.cap) for w in workloads}
        return {
            w: (limit, str(folder / f"{self.scale.name}_{w}_{seat.cap}.jsonl"))
            for w, limit in limits.items()
            if limit is not None
        }

    def _take(
        self, seat: Seat, pending: list[str], headrooms: list[int], ending: Ending
    ) -> tuple[list[str], list[int]]:
        """Write down what a process found; return what is left to do, and with which headrooms."""
        left = list(pending)
        current: str | None = None
        for event in ending.events:
            workload = event.get("workload")
            if event["event"] == "started":
                current = workload
            elif event["event"] == "measured":
                self._put_measured(seat, event)
                left.remove(event["workload"])
            elif event["event"] == "out of memory" and len(headrooms) > 1:
                return left, headrooms[1:]
            else:
                reason = event["reason"]
                if len(headrooms) == 1 and event["event"] == "out of memory" and headrooms[0]:
                    reason = f"with every headroom tried, {reason}"
                return self._fail(seat, left, workload, reason), headrooms
        if left:
            reason = f"its process {ending.status}; {self.processes.last_line(seat.name)}"
            left = self._fail(seat, left, current, reason)
        return left, headrooms

    def _put_measured(self, seat: Seat, event: dict[str, Any]) -> None:
        if event["event"] == "measured":
            row = {k: v for k, v in event.items() if k not in ("event", "workload")}
            workload = event["workload"]
            self.state.put(seat, workload, {"status": "measured", **row})
            same = self.comparison.sameness(workload, seat.cap, seat.contestant)
            self.state.put(seat, workload, {"status": "measured", **row, "same": same})

    def _fail(self, seat: Seat, left: list[str], workload: str | None, reason: str) -> list[str]:
        """Write a failure down: of one workload, or of all that are left if it was none's."""
        for name in left if workload is None else [workload]:
            self.state.put(seat, name, {"status": "failed", "reason": reason})
        return [] if workload is None else [name for name in left if name != workload]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.small_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, xpu:0, mps, cpu, sim:NAME")
    parser.add_argument(
        "--scale", choices=SCALES, help="full; small in a dry run, tiny in a rehearsal"
    )
    parser.add_argument("--dry", action="store_true", help="--device sim:rx6600xt")
    parser.add_argument("--only", type=selection_of, default=Selection(), help="decode1,50,flow")
    parser.add_argument("--rounds", type=int, default=1, help="visits to each seat (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where the last call ended")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing later")
    parser.add_argument("--cell-seconds", type=float, default=15, help="no more runs then")
    parser.add_argument(
        "--warm-seconds", type=float, help="each cell is warmed up so long (full scale: 10)"
    )
    parser.add_argument("--seat-seconds", type=float, default=300, help="stopped then")
    parser.add_argument(
        "--state",
        type=Path,
        help="a folder (.cache/small_gpu/DEVICE_SCALE), or one file NAME.tar.gz to go on with",
    )
    parser.add_argument("--write", type=Path, help="also write the page to this file or folder")
    whole = ("device", "scale", "only", "rounds")
    options = KEEPER.parse(parser, arguments, defaults=whole)
    if options.write_baseline and not options.dry:
        parser.error("only a dry run has a baseline")
    if options.dry:
        options.device = "sim:rx6600xt"
    if options.write_baseline and options.write is None:
        options.write = KEEPER.path.with_suffix(".md")
    is_dry, is_rehearsal = options.device.startswith("sim:"), options.device == "cpu"
    if options.scale is None:
        options.scale = "small" if is_dry else "tiny" if is_rehearsal else "full"
    if options.warm_seconds is None:
        usual = {"full": 10.0, "medium": 5.0}
        options.warm_seconds = 0.0 if is_dry else usual.get(options.scale, 0.0)
    options.expected_seconds = {"full": 60.0, "medium": 15.0}.get(options.scale, 2.0)
    return _place(options)


def _place(options: argparse.Namespace) -> argparse.Namespace:
    """Find the folder to work in, and the file to keep it in where one was named."""
    usual = Path(".cache/small_gpu") / f"{options.device.replace(':', '_')}_{options.scale}"
    is_one_file = options.state is not None and archive.is_archive(options.state)
    options.archive = options.state.resolve() if is_one_file else None
    options.folder = (usual if is_one_file or options.state is None else options.state).resolve()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what is left to run, and print the page and a line RESULT with the same as JSON.

    Returns
    -------
    int
        0; 75 when this call's minutes were not enough; 1 when a cell has neither figures nor a
        reason, or a dry run contradicts its baseline.
    """
    options = parse(arguments)
    bench = Bench(options)
    is_finished = bench.run()
    if not bench.state.probes:
        return UNFINISHED
    rows = bench.comparison.rows(options.only)
    page = table.page(bench.comparison, options.only, _command(options))
    print(page)
    if options.write:
        path = page_path(options.write, bench.state)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)
    missing = table.unexplained(rows)
    status = _conclude(bench, rows, is_finished)
    if missing:
        print(f"cells without figures and without a reason: {', '.join(missing)}", file=sys.stderr)
        return 1
    return status


def _conclude(bench: Bench, rows: list[dict[str, Any]], is_finished: bool) -> int:
    """Print RESULT, for a whole dry run after its comparison with the baseline."""
    result = _result(bench, rows, is_finished)
    of_ours = figures_of_ours(rows) if is_finished and bench.comparison.is_dry else {}
    if of_ours:
        writes = bench.options.write_baseline
        return KEEPER.conclude(of_ours, result, settings=bench.state.options, writes=writes)
    print("RESULT " + json.dumps(result))
    return 0 if is_finished else UNFINISHED


def page_path(wished: Path, state: State) -> Path:
    """Return where the page goes: in a folder, a file with the name of the device and the scale."""
    if not wished.is_dir():
        return wished
    device = next(iter(state.probes.values()))["hardware"]["device"]
    name = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return wished / f"small_gpu_{name}_{state.options['scale']}.md"


def _command(options: argparse.Namespace) -> str:
    return f"python -m benchmarks.small_gpu --device {options.device} --scale {options.scale}"


def _result(bench: Bench, rows: list[dict[str, Any]], is_finished: bool) -> dict[str, Any]:
    left_out = ("steps_s", "workload", "cap", "contestant")
    cells: dict[str, Any] = {}
    for row in rows:
        by_cap = cells.setdefault(row["workload"], {}).setdefault(str(row["cap"]), {})
        by_cap[row["contestant"]] = {k: v for k, v in row.items() if k not in left_out}
    return {
        **bench.state.options,
        "is_finished": is_finished,
        "cells": cells,
        "targets": bench.comparison.targets(bench.selection),
    }


if __name__ == "__main__":
    sys.exit(main())
