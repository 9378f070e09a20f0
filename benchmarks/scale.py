"""What an operator, a birth and a death cost when there are many blocks, half of which fit.

    python -m benchmarks.scale [--counts 1000,100000] [--strategies lru,flow] [--write-baseline]

So many small tensors are taken under management, and a program goes through all of them again and
again, adding to each: every operator fetches a block and evicts another one. Then each tensor is
copied (births), and the copies are let go of (deaths). Figures are microseconds of processor time,
medians over runs of a few hundred, and the bytes of host memory that management takes per tensor:
once it is adopted ("memory"), and once it has been used ("used"), the bytes of replicas left out.
The simulated device is in them, whose clock and allocator are instruments. Each number of blocks
and strategy has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from torchTensorRef import disabled, tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from .baseline import Figure, Keeper, Tolerance

KEEPER = Keeper("scale", "python -m benchmarks.scale", Tolerance(share=0.2, amount=5))
RESULT = "FIGURES "
COUNTS = (1_000, 10_000)
STRATEGIES = ("genoa", "lru", "flow")
NUMEL = 64
#: Operators in a run, and runs measured.
RUN_LENGTH, RUN_COUNT = 200, 9
#: Sweeps before anything is measured: a flow is learned in the first, and recognised in the second.
LEARNING_SWEEPS = 2
#: Most microseconds that an operator may take which fetches and evicts, and most bytes per tensor.
BOUNDS = {"operator": 60.0, "memory": 900.0, "used": 900.0}


def median_us(work: Callable[[Any], None], items: Sequence[Any]) -> float:
    """Microseconds of processor time per item: the median of runs of `RUN_LENGTH`."""
    found = []
    for first in range(0, RUN_COUNT * RUN_LENGTH, RUN_LENGTH):
        run = items[first : first + RUN_LENGTH]
        if not run:
            break
        start_ns = time.process_time_ns()
        for item in run:
            work(item)
        found.append((time.process_time_ns() - start_ns) / len(run) / 1000)
    return statistics.median(found)


def measure(count: int, strategy: str) -> dict[str, float]:
    """Measure in this process: what is taken per operator, birth, death, and of memory."""
    torch.set_num_threads(1)
    with disabled():
        plain = [torch.rand(NUMEL) for _ in range(count)]
    nbytes = plain[0].nbytes
    capacity_nbytes = count * nbytes // 2
    tensorsManager.device = SimDevice(
        DeviceSpec(name="scale", capacity_nbytes=capacity_nbytes), name="sim:scale"
    )
    tensorsManager.budget = capacity_nbytes
    tensorsManager.strategy = strategy
    process = psutil.Process()
    gc.collect()
    before_nbytes = process.memory_full_info().uss
    refs = [tensorsManager.adopt(x) for x in plain]
    taken_nbytes = process.memory_full_info().uss - before_nbytes
    del plain
    gc.freeze()  # what is there stays: nobody looks through all of it while we measure

    def work(ref: Any) -> None:
        ref.add_(1)

    for _ in range(LEARNING_SWEEPS):
        for ref in refs:
            work(ref)
    used_nbytes = process.memory_full_info().uss - before_nbytes - capacity_nbytes
    operator_us = median_us(work, refs)
    copies: list[Any] = []
    birth_us = median_us(lambda ref: copies.append(ref * 2), refs)
    death_us = median_us(lambda _: copies.pop(), range(len(copies)))
    return {
        "operator": operator_us,
        "birth": birth_us,
        "death": death_us,
        "memory": taken_nbytes / count,
        "used": used_nbytes / count,
    }


UNITS = {"operator": "us", "birth": "us", "death": "us", "memory": "bytes", "used": "bytes"}


def figures_elsewhere(count: int, strategy: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--here", str(count), strategy]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    found: dict[str, float] = json.loads(lines[-1].removeprefix(RESULT))
    return found


def rows(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, Figure]]:
    """All figures by name."""
    for cell, figures in found.items():
        for name, value in figures.items():
            yield f"{cell} {name}", Figure(round(value, 2), UNITS[name], BOUNDS.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="(%(default)s)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="(%(default)s)")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    chosen = KEEPER.parse(parser, None, defaults=["counts", "strategies"])
    if chosen.here:
        print(RESULT + json.dumps(measure(int(chosen.here[0]), chosen.here[1])), flush=True)
        return 0
    pairs = [(s, int(n)) for s in chosen.strategies.split(",") for n in chosen.counts.split(",")]
    found: dict[str, dict[str, float]] = {}
    table = Table("strategy", "blocks", *(f"{name}, {unit}" for name, unit in UNITS.items()))
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("scale", total=len(pairs))
        for strategy, count in pairs:
            progress.update(task, description=f"{strategy}, {count:,} blocks")
            figures = found[f"{strategy} {count}"] = figures_elsewhere(count, strategy)
            table.add_row(strategy, f"{count:,}", *(f"{x:.1f}" for x in figures.values()))
            progress.advance(task)
    Console(width=100).print(table)
    return KEEPER.conclude(dict(rows(found)), found, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    raise SystemExit(main())
