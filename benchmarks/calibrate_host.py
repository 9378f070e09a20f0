"""What management takes of the host's own time by path, measured on this machine.

`python -m benchmarks.host_time --calibrate [--processor NAME] [--save FILE]` prints a `HostCosts`
of `torchtensorref/devices/sim/host_costs.py`; `TTR_CORE=python` measures the path in Python.

All of it is one program: ``x + w`` for each of many small blocks `w` in turn, on the adapter for
real accelerators over the host (`overhead_of_dispatch`), under Flow, which is told of every use
(leases are switched off: an operator under one is not decided about). What differs is how much room
there is:

* all blocks fit, and always have: less what plain torch takes, the operator is *ready*;
* all fit, after memory was short: the strategy is told and asked, *decided*, and nothing moves;
* all fit, and all are at home: each is *fetched*, by its operator or ahead of it;
* half of them fit: what comes and goes is counted, and what is left after the three is *evicted*.

Each sweep is measured many times, in processor time of this one thread, and the shortest counts:
whatever else runs on the machine makes a sweep longer and none shorter. The medians are printed
beside, for who wonders how quiet the machine was.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchTensorRef import disabled, tensorsManager
from torchTensorRef.devices.sim.host_costs import HostCosts
from torchTensorRef.memory import core

from .overhead_of_dispatch import ROOM_NBYTES, bring, keep_what_is_freed, open_device

#: Blocks of a sweep, and the bytes of each.
COUNT, NBYTES = 200, 256
ROUNDS = 60


class Took(NamedTuple):
    """What a sweep took, in ns: the shortest, and the median."""

    least: float
    median: float


class Sweeps:
    """The blocks, and the programs over them."""

    def __init__(self) -> None:
        with disabled():
            self._plain = [torch.rand(NBYTES // 4) for _ in range(COUNT)]
            self._x = torch.rand(NBYTES // 4)
        open_device("adapter")
        tensorsManager.residency.books.main.decision_nbytes = 0  # no leases
        tensorsManager.strategy = "flow"
        self._weights = [bring(w.clone()) for w in self._plain]
        self._activation = bring(self._x.clone()).toGPU()
        gc.collect()
        gc.freeze()

    def plain(self) -> None:
        """All operators, by plain torch."""
        x = self._x
        with disabled():
            for w in self._plain:
                x + w

    def managed(self) -> None:
        """All operators, under management."""
        x = self._activation
        for w in self._weights:
            x + w

    @staticmethod
    def room_for(share: float) -> None:
        """Set the budget so that a share of the blocks fits."""
        tensorsManager.budget = int(COUNT * NBYTES * share)


def shortest(run: Callable[[], None], before: Callable[[], None] | None = None) -> Took:
    """Measure a sweep many times, each after what has to be done before it."""
    times = []
    for _ in range(ROUNDS):
        if before is not None:
            before()
        start = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - start)
    return Took(min(times), statistics.median(times))


@contextmanager
def counted(name: str) -> Iterator[list[float]]:
    """Count what is added to one of the statistics, per sweep."""
    found = [0.0]
    before = tensorsManager.stats()[name]
    yield found
    found[0] = (tensorsManager.stats()[name] - before) / ROUNDS


def measured() -> tuple[dict[str, Took], dict[str, float]]:
    """Measure the sweeps; return what each took, and the moves of one in which half fit."""
    sweeps = Sweeps()
    for _ in range(4):
        sweeps.plain()
        sweeps.managed()
    took = {"plain": shortest(sweeps.plain), "ready": shortest(sweeps.managed)}

    sweeps.room_for(0.5)
    for _ in range(8):  # the flow is learned, and followed
        sweeps.managed()
    moves = {}
    with counted("fetch_count") as fetched, counted("evict_count") as evicted:
        took["half"] = shortest(sweeps.managed)
    moves["half fetched"], moves["half evicted"] = fetched[0], evicted[0]

    def still_short() -> None:  # else the strategy is told of nothing any more, after a while
        tensorsManager.residency.books.short_at = tensorsManager.residency.books.tick

    def all_at_home() -> None:
        sweeps.room_for(0.02)
        sweeps.room_for(4)
        still_short()

    with counted("fetch_count") as fetched:
        took["fetched"] = shortest(sweeps.managed, all_at_home)
    moves["fetched"] = fetched[0]

    sweeps.managed()
    with counted("fetch_count") as fetched, counted("ready_op_count") as ready:
        took["decided"] = shortest(sweeps.managed, still_short)
    moves["decided fetched"], moves["decided ready"] = fetched[0], ready[0]
    tensorsManager.budget = ROOM_NBYTES
    return took, moves


def costs_of(took: dict[str, Any], moves: dict[str, float], processor: str) -> HostCosts:
    """Return what each path takes, from what the sweeps took."""
    ready = took["ready"] - took["plain"]
    decided = took["decided"] - took["ready"]
    fetched = (took["fetched"] - took["decided"]) / moves["fetched"]
    rest = took["half"] - took["decided"] - fetched * moves["half fetched"]
    evicted = rest / moves["half evicted"]
    return HostCosts(
        ready_ns=max(0, round(ready / COUNT)),
        decided_ns=max(0, round(decided / COUNT)),
        fetched_ns=max(0, round(fetched)),
        evicted_ns=max(0, round(evicted)),
        processor=processor,
    )


def calibrate(processor: str, save: str | None) -> int:
    """Measure, print, and write a file where one is asked for."""
    keep_what_is_freed()
    torch.set_num_threads(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # budgets far too small are what this is about
        took, moves = measured()
    costs = costs_of({name: one.least for name, one in took.items()}, moves, processor)
    medians = costs_of({name: one.median for name, one in took.items()}, moves, processor)
    print(
        f"operators: {core.path_in_words()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    for name, one in took.items():
        print(f"  {name:8} {one.least / COUNT / 1e3:7.1f} us an operator, median "
              f"{one.median / COUNT / 1e3:.1f}")  # fmt: skip
    print("  per sweep: " + ", ".join(f"{name} {count:g}" for name, count in moves.items()))
    print(f"from medians: {medians}")
    print(costs)
    if save is not None:
        Path(save).write_text(json.dumps(asdict(costs), indent=2) + "\n")
    print("RESULT " + json.dumps(asdict(costs)), flush=True)
    return 0
