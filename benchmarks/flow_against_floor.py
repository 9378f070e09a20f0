"""How near to the floor each strategy comes, at budgets below and above the weights.

`python -m benchmarks.flow_against_floor [--programs decode,training] [--strategies flow,lru]
[--budgets 50] [--write-baseline]` runs every program under every budget and strategy on a simulated
device, in virtual time, and compares the results with plain torch. Per row: time over the floor,
bytes copied over the exact minimum, the share of time that compute stood idle waiting for a copy,
peak within the budget, identical. With the baseline a page for people is written, which shows the
same figures.

The device is an 8 GB card on PCIe 4.0 x8 (rx6600xt) whose speeds are divided so that this small
program has the regime of a model of 16 GB on it: copies of the weights take as long as there.
Latencies are not scaled.

Our own strategies and `stream_ahead` (diffusers pins what it streams) copy from page-locked memory,
without the host waiting. `prefix_resident` stands for accelerate's device map as users have it:
weights that are not on the card lie in ordinary memory, pageable or a mapped file, and each is
copied by a blocking copy when its layer is called. The device models that: 6 GB/s, the high end of
what is found for pageable copies (`sim_spec.py`), and the host waits for each. The row
`prefix_resident_page_locked` is the same strategy with our link, so that both causes can be seen.

Virtual time counts nothing of what our own Python takes. With `--host NAME`, a processor of
`HOST_COSTS`, each cell is measured with that, too, and so is a model of 7 B parameters
(`with_host.py`): another table, with a baseline of its own.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from torchTensorRef import disabled, tensorsManager
from torchTensorRef.devices.sim.cards import SPECS
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.host_costs import host_costs_of
from torchTensorRef.devices.sim.spec import DeviceSpec

from . import with_host
from .baseline import EXACT, WIDTH, Figure, Keeper
from .floor import Recorder
from .programs import PROGRAMS, Program
from .standins import PrefixResident, StreamAhead

#: What the weights would be on the card itself: a model of 8 B parameters in half precision.
REAL_NBYTES = 16e9
BUDGETS = (25, 50, 75, 110)
KEEPER = Keeper("flow_against_floor", "python -m benchmarks.flow_against_floor", EXACT)
#: What the baseline has of each cell: what the page shows.
UNITS = {
    "time_over_floor": "x the floor",
    "bytes_over_min": "x the minimum",
    "stall_share": "of the time",
    "peak_share": "of the budget",
}


class Contender(NamedTuple):
    """One row of the table: a strategy, and the memory at the host's end of its copies."""

    strategy: Any
    page_locked: bool = True


STRATEGIES: dict[str, Contender] = {
    "genoa": Contender("genoa"),
    "lru": Contender("lru"),
    "flow": Contender("flow"),
    "prefix_resident": Contender(PrefixResident, page_locked=False),
    "prefix_resident_page_locked": Contender(PrefixResident),
    "stream_ahead": Contender(StreamAhead),
}


def weights_nbytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def scaled_spec(program: Program, model: nn.Module) -> DeviceSpec:
    """The card, slowed down by the ratio of the weights; compute tuned to the program's regime."""
    card, w_nbytes = SPECS["rx6600xt"], weights_nbytes(model)
    slower = REAL_NBYTES / w_nbytes
    spec = card.scaled(
        capacity=2**40,
        h2d_bytes_per_s=card.h2d_bytes_per_s / slower,
        d2h_bytes_per_s=card.d2h_bytes_per_s / slower,
        pageable_bytes_per_s=card.pageable_bytes_per_s / slower,
        memory_bytes_per_s=card.memory_bytes_per_s / slower,
        host_memory_bytes_per_s=card.host_memory_bytes_per_s / slower,
        host_flops_per_s=card.host_flops_per_s / slower,
        flops_per_s={name: rate / slower for name, rate in card.flops_per_s.items()},
    )
    if program.compute_to_copy is None:
        return spec
    recorder, _ = record(program, model, spec)
    copy_s = recorder.min_nbytes(w_nbytes // 2) / spec.h2d_bytes_per_s
    speed = recorder.flops / (copy_s * program.compute_to_copy)
    return spec.scaled(
        flops_per_s={"default": speed, "float32": speed},
        # Bound by arithmetic, as on the card: the bytes of these small operators must not matter.
        memory_bytes_per_s=spec.memory_bytes_per_s * 1000,
        host_flops_per_s=speed / 10,
    )


def record(program: Program, model: nn.Module, spec: DeviceSpec) -> tuple[Recorder, Any]:
    """Run the program on plain tensors; return what it needs, and its result."""
    recorder = Recorder(spec, list(model.parameters()))
    with disabled(), recorder:
        return recorder, program.run(model)


def identical(expected: Any, found: Any) -> bool:
    """Equal to the bit."""
    a, b = tree_leaves(expected), tree_leaves(tensorsManager.release(found))
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def measure(program: Program, spec: DeviceSpec, budget_nbytes: int, contender: Contender) -> Any:
    """Run the program under a strategy on a fresh device; return its result and the counts."""
    tensorsManager.device = SimDevice(
        spec.scaled(capacity=budget_nbytes),
        name="sim:benchmark",
        page_locked=contender.page_locked,
    )
    tensorsManager.budget = budget_nbytes
    tensorsManager.strategy = contender.strategy
    tensorsManager.reset_stats()
    model = tensorsManager.adopt(program.make())
    found = program.run(model)
    stats = tensorsManager.stats()
    tensorsManager.check()
    return found, stats


class Plain(NamedTuple):
    """What is known of a program without running it under us."""

    program: Program
    spec: DeviceSpec
    recorder: Recorder
    expected: Any
    w_nbytes: int


def plain_run(program: Program) -> Plain:
    """Run a program on plain tensors, and write down what it needs."""
    with disabled():
        spec = scaled_spec(program, program.make())
        model = program.make()
    recorder, expected = record(program, model, spec)
    return Plain(program, spec, recorder, expected, weights_nbytes(model))


def rows_of(
    plain: Plain, budget: int, strategies: list[str], host: str | None
) -> Iterator[tuple[str, Any]]:
    """Measure the cells of one budget: (strategy, row) one after the other."""
    budget_nbytes = plain.w_nbytes * budget // 100
    least_nbytes = plain.recorder.min_nbytes(budget_nbytes)
    floor_ns = plain.recorder.floor_ns(budget_nbytes)
    for strategy in strategies:
        found, stats = measure(plain.program, plain.spec, budget_nbytes, STRATEGIES[strategy])
        moved_nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
        counted = {}
        if host is not None:
            spec = plain.spec.scaled(host_costs=host_costs_of(host))
            by_host, also = measure(plain.program, spec, budget_nbytes, STRATEGIES[strategy])
            assert identical(plain.expected, by_host), (plain.program.name, budget, strategy)
            counted["with_host"] = {
                "with_host": round(also["time_ns"] / floor_ns, 4),
                "host_share": round(also["host_ns"] / also["time_ns"], 4),
                "bound_by": also["bound_by"],
            }
        yield (
            strategy,
            {
                **counted,
                "time_over_floor": round(stats["time_ns"] / floor_ns, 4),
                "bytes_over_min": round(moved_nbytes / least_nbytes, 4),
                "stall_share": round(stats["stall_ns"] / stats["time_ns"], 4),
                "identical": identical(plain.expected, found),
                "peak_share": round(stats["peak_resident_nbytes"] / budget_nbytes, 4),
                "moved_nbytes": moved_nbytes,
                "time_ns": stats["time_ns"],
                "host_fallbacks": stats["host_fallback_count"],
            },
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the comparison with the baseline, and a line RESULT with all as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.flow_against_floor", description=__doc__)
    every = ",".join(p.name for p in PROGRAMS)
    parser.add_argument(
        "--programs", help=f"{every}; with --host {with_host.BASELINE_PROGRAMS} if none are told"
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--host", help="a processor whose own time is counted, too")
    parts = ("programs", "strategies", "budgets")
    options = KEEPER.parse(parser, arguments, defaults=parts)
    if options.write_baseline and options.host not in (None, with_host.BASELINE_HOST):
        parser.error(f"--write-baseline is of --host {with_host.BASELINE_HOST}")
    host_costs_of(options.host)  # a name that nobody knows ends it here
    options.programs = options.programs or (with_host.BASELINE_PROGRAMS if options.host else every)
    results = measured(options)
    if options.host is not None:
        return with_host.conclude(results, options)
    Console(width=WIDTH).print(table_of(results))
    if options.write_baseline:
        KEEPER.path.with_suffix(".md").write_text(markdown_of(results))
    return KEEPER.conclude(figures_of(results), results, settings={}, writes=options.write_baseline)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cells chosen: program -> budget -> strategy -> row."""
    programs = [p for p in PROGRAMS if p.name in options.programs.split(",")]
    strategies = options.strategies.split(",")
    budgets = [int(budget) for budget in options.budgets.split(",")]
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(programs) * len(budgets) * len(strategies))
        for program in programs:
            plain = plain_run(program)
            for budget in budgets:
                progress.update(task, description=f"{program.name} {budget} %")
                for strategy, row in rows_of(plain, budget, strategies, options.host):
                    results.setdefault(program.name, {}).setdefault(budget, {})[strategy] = row
                    progress.advance(task)
                rows = results[program.name][budget].items()
                times = ", ".join(f"{name} {row['time_over_floor']:.3f}" for name, row in rows)
                progress.console.print(f"{program.name} {budget} %: {times}", soft_wrap=True)
    return results


def figures_of(results: dict[str, Any]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures: dict[str, Figure] = {}
    for program, by_budget in results.items():
        for budget, by_strategy in by_budget.items():
            for strategy, row in by_strategy.items():
                cell = f"{program}/{budget}/{strategy}"
                for name, unit in UNITS.items():
                    bound = 1.0 if name == "peak_share" else None
                    figures[f"{cell}/{name}"] = Figure(row[name], unit, bound)
                figures[f"{cell}/differs"] = Figure(not row["identical"], "yes or no", False)
    return figures


def table_of(results: dict[str, Any]) -> Table:
    """One row per program, budget and strategy."""
    table = Table(title="virtual time over the floor, bytes over the exact minimum")
    for heading in ("program", "strategy", "budget", "time", "bytes", "stalled", "peak", "same"):
        table.add_column(heading, justify="left" if heading in ("program", "strategy") else "right")
    for program, by_budget in results.items():
        for budget, by_strategy in by_budget.items():
            for strategy, row in by_strategy.items():
                table.add_row(
                    program,
                    strategy,
                    f"{budget} %",
                    f"{row['time_over_floor']:.3f}",
                    f"{row['bytes_over_min']:.3f}",
                    f"{row['stall_share']:.1%}",
                    f"{row['peak_share']:.1%}",
                    str(row["identical"]),
                )
        table.add_section()
    return table


def markdown_of(results: dict[str, Any]) -> str:
    """The table as a page, with what it was measured on."""
    card = SPECS["rx6600xt"]
    lines = [
        "# Flow against the floor",
        "",
        f"Written by `{KEEPER.command} --write-baseline`; its docstring and that of",
        "`floor.py` say what the columns mean. Virtual time: the same on every machine.",
        "",
        f"Device: {card.name} with speeds divided by (16 GB / weights), h2d and d2h "
        f"{card.h2d_bytes_per_s / 1e9:g} GB/s, memory {card.memory_bytes_per_s / 1e9:g} GB/s, host "
        f"memory {card.host_memory_bytes_per_s / 1e9:g} GB/s, pageable copies "
        f"{card.pageable_bytes_per_s / 1e9:g} GB/s (only `prefix_resident`: the host waits for",
        "each; its twin `_page_locked` has the link of all others).",
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| program | budget | strategy | time / floor | bytes / min | stalled | peak | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for program, by_budget in results.items():
        for budget, by_strategy in by_budget.items():
            for strategy, row in by_strategy.items():
                lines.append(
                    f"| {program} | {budget} % | {strategy} | {row['time_over_floor']:.3f} "
                    f"| {row['bytes_over_min']:.3f} | {row['stall_share']:.1%} "
                    f"| {row['peak_share']:.1%} | {row['identical']} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
