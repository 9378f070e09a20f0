"""What computing at home gains: the host works too, while the link brings weights.

`python -m benchmarks.placement [--rows decode-1-50,prefill-1] [--write-baseline]` lets Flow run
programs of real sizes on simulated machines, without bytes (a recorded program, `Replayer`), with
placement and without. Virtual time: the same on every machine.

* ``decode-M-B``: Llama-3-8B in bfloat16, all of its matrices, batch 1, with a budget of
  B % of its weights, on the three machines M of link / kernels of the host / memory of
  the host: 1 is 25 / 50 / 60 GB/s, 2 is 12 / 35 / 40, 3 is 25 / 150 / 200. The
  bound is THEORY.md, 3.2: ``S / min(b_link + b_host, b_dram)``, S the bytes of weights
  beyond the budget, with nothing for what the accelerator itself takes and for what crosses.
  "Over the floor" is with the first of these, and with the room of what is on its way
  (`floor_ns`). How far that floor lies above the bound stands beside it: in a steady state nothing
  can go below it.
* ``context-M-25``: the same with 16,384 tokens in the caches, which have 2 GB together: what of
  them is at home is attended there, where fetching it takes longer.
* ``experts-M-50``: a mixture of experts, two of eight chosen at random.
* ``prefill-M-50``, ``diffusion-M-50``: 512 tokens at once, and a denoiser: bound by compute or
  near it. There is nothing to be gained, and nothing may be lost.

The accelerator has the link of the machine and else is an h200, whose own time is short beside the
bound; for prefill and diffusion an rtx3090, whose is not. The host computes 1 TFLOP/s. Times
are those of the later half of the steps, in which Flow knows the program.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import torchTensorRef.tensor.install  # noqa: F401 (promises need operators to come to us)
from torchTensorRef import options
from torchTensorRef.devices.sim.cards import SPECS
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.promises.record import Record
from torchTensorRef.promises.recording import record_of
from torchTensorRef.promises.replayer import Replayer, StepCost

from .baseline import EXACT, WIDTH, Figure, Keeper
from .programs import DecoderLayer

KEEPER = Keeper("placement", "python -m benchmarks.placement", EXACT)
#: Link, kernels of the host, memory of the host, in GB/s.
MACHINES = {"1": (25, 50, 60), "2": (12, 35, 40), "3": (25, 150, 200)}
STEPS = 8
#: A copy of at most so many bytes passes those that are queued: activations, no weights.
URGENT_NBYTES = 1 << 20


class Llama(nn.Module):
    """The shapes of Llama-3-8B, but for the table of its tokens, of which a step reads one row."""

    def __init__(
        self, layers: int = 32, hidden: int = 4096, inner: int = 14336, vocabulary: int = 128_256
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(hidden, inner, 4) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, caches: Any) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, cache)
        return self.head(x[:, -1:])


class Experts(nn.Module):
    """Two of eight experts for each token in each layer, besides what all of them use."""

    def __init__(self, layers: int = 12, hidden: int = 4096) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(8))
            for _ in range(layers)
        )
        self.random = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dense, experts in zip(self.dense, self.experts, strict=True):
            x = torch.tanh(dense(x))
            for chosen in self.random.sample(range(8), 2):
                a, b, c = experts[chosen](x).chunk(3, -1)
                x = x + a * b + c
        return x


class Denoiser(nn.Module):
    """Wide layers on many rows."""

    def __init__(self, layers: int = 40, hidden: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x


class Case(NamedTuple):
    """A program: its parts, the rows and columns a step gets, and the accelerator."""

    make: Callable[[], nn.Module]
    rows: int
    hidden: int
    card: str
    has_cache: bool = False
    #: Tokens that are in the caches already.
    context: int = 0


CASES = {
    "decode": Case(Llama, 1, 4096, "h200", has_cache=True),
    "context": Case(Llama, 1, 4096, "h200", has_cache=True, context=16_384),
    "experts": Case(Experts, 1, 4096, "h200"),
    "prefill": Case(Llama, 512, 4096, "rtx3090"),
    "diffusion": Case(Denoiser, 4096, 2048, "rtx3090"),
}
ROWS = (
    *(f"decode-{machine}-{budget}" for machine in MACHINES for budget in (25, 50, 75)),
    *(f"context-{machine}-25" for machine in MACHINES),
    *(f"experts-{machine}-50" for machine in MACHINES),
    *(f"{case}-{machine}-50" for case in ("prefill", "diffusion") for machine in MACHINES),
)


def spec_of(machine: str, card: str) -> DeviceSpec:
    """The accelerator, plugged into one of the machines."""
    link, host, memory = (1e9 * rate for rate in MACHINES[machine])
    return SPECS[card].scaled(
        capacity=2**40,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_memory_bytes_per_s=memory,
        host_kernel_bytes_per_s=host,
        host_flops_per_s=1e12,
        urgent_nbytes=URGENT_NBYTES,
    )


def recorded(case: Case, steps: int = STEPS) -> tuple[Record, int]:
    """Write down a program without running it; return its record and the bytes of its weights."""
    with torch.device("meta"):
        model = case.make().to(torch.bfloat16)
        x = torch.empty(1, case.rows, case.hidden, dtype=torch.bfloat16)
    caches: Any = [[] for _ in model.layers] if case.has_cache else None  # type: ignore[union-attr, arg-type]
    if case.context:
        made = functools.partial(
            torch.empty, 1, 1, case.context, 1024, dtype=torch.bfloat16, device="meta"
        )
        caches = [[made(), made()] for _ in caches]
    w_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def step(model: nn.Module, x: torch.Tensor) -> None:
        with torch.inference_mode():
            if isinstance(model, Llama):
                model(x, caches)
            else:
                model(x)

    return record_of(step, model, x, steps=steps), w_nbytes


def step_ns(
    record: Record, spec: DeviceSpec, budget_nbytes: int, placement: str
) -> tuple[float, float]:
    """Return what a step takes once Flow knows the program, and what of it compute works."""
    with options(placement=placement):
        costs = Replayer(record, spec, budget_nbytes, "flow").run()
    later = costs[len(costs) // 2 :]
    time_ns, compute_ns = (
        sum(column) / len(later) for column in zip(*map(_times, later), strict=True)
    )
    return time_ns, compute_ns


def _times(cost: StepCost) -> tuple[int, int]:
    return cost.time_ns, cost.compute_ns


def floor_ns(
    sizes: list[int], budget_nbytes: int, machine: tuple[float, float, float], compute_ns: float
) -> float:
    """Return the least that a step can take, of whole operators on weights of these sizes.

    Parameters
    ----------
    machine : (float, float, float)
        Link, kernels of the host, memory of the host, in GB/s.
    compute_ns : float
        What the accelerator works.

    Notes
    -----
    A token is a chain of operators: while the accelerator works the host idles. A block holds its
    room from the issue of its copy until its use. Where that is R bytes at the most, the budget
    keeps R less for the others, so that ``S + R`` bytes are fetched or used at home in a step.
    While the host computes nothing is issued, so that the link brings R at the most; then it idles,
    and the two are slower together. Larger blocks than R are not fetched: what the others do not
    come to is used at home, small ones first. Between the values of R that are tried the time is
    concave in R.
    """
    link, host, memory = machine
    beside, rate = min(host, memory - link), min(link + host, memory)
    least_nbytes = sum(sizes) - budget_nbytes

    def at(ring: float) -> float:
        home_nbytes = least_nbytes + ring - sum(n for n in sizes if n <= ring)
        idle_ns = 0.0
        for nbytes in sorted(n for n in sizes if n > ring):  # it idles least beside these
            share = min(1.0, max(0.0, home_nbytes / nbytes))
            idle_ns += share * max(0.0, nbytes - beside * ring / link) / host
            home_nbytes -= nbytes
        return (least_nbytes + ring + (rate - link) * compute_ns + (rate - host) * idle_ns) / rate

    fetched = [sum(n for n in sizes if n <= nbytes) - least_nbytes for nbytes in set(sizes)]
    rings = {0.0, *sizes, *(link * nbytes / beside for nbytes in sizes), *fetched}
    return min(at(ring) for ring in rings if ring >= 0)


def sizes_of(record: Record) -> list[int]:
    """Return the bytes of each weight."""
    return [block.nbytes for block in record.blocks.values() if block.is_persistent]


def measured(rows: list[str]) -> dict[str, dict[str, float]]:
    """Measure rows: with placement and without, over the bound where there is one."""
    results: dict[str, dict[str, float]] = {}
    records: dict[str, tuple[Record, int]] = {}
    for row in rows:
        name, machine, budget = row.split("-")
        record, w_nbytes = records.get(name) or records.setdefault(name, recorded(CASES[name]))
        budget_nbytes, spec = w_nbytes * int(budget) // 100, spec_of(machine, CASES[name].card)
        without, _ = step_ns(record, spec, budget_nbytes, "accelerator")
        found, compute_ns = step_ns(record, spec, budget_nbytes, "auto")
        result = {
            "ms": round(found / 1e6, 2),
            "ms_without": round(without / 1e6, 2),
            "of_without": round(found / without, 4),
        }
        if name == "decode":
            link, host, memory = MACHINES[machine]
            sizes = sizes_of(record)
            bound = (sum(sizes) - budget_nbytes) / min(link + host, memory)
            floor = floor_ns(sizes, budget_nbytes, MACHINES[machine], compute_ns)
            result["over_bound"] = round(found / bound, 4)
            result["over_floor"] = round(found / floor, 4)
            result["floor_over_bound"] = round(floor / bound, 4)
        results[row] = result
        Console(stderr=True).print(row, result, soft_wrap=True)
    return results


def figures_of(results: dict[str, dict[str, float]]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures = {}
    for row, result in results.items():
        bound = 1.01 if row.startswith(("prefill", "diffusion")) else None
        figures[f"{row}/of_without"] = Figure(result["of_without"], "of the time without", bound)
        if "over_bound" in result:
            figures[f"{row}/over_bound"] = Figure(result["over_bound"], "x the bound")
            figures[f"{row}/over_floor"] = Figure(result["over_floor"], "x the floor")
            figures[f"{row}/floor_over_bound"] = Figure(result["floor_over_bound"], "x the bound")
    return figures


def table_of(results: dict[str, dict[str, float]]) -> Table:
    """One row per program, machine and budget."""
    table = Table(title="a step in virtual time: computed at home what ends sooner there")
    headings = ("row", "ms", "ms without", "of without", "over the bound", "the floor", "its own")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row, result in results.items():
        cells = [f"{result[name]:.2f}" for name in ("ms", "ms_without")]
        cells.append(f"{result['of_without']:.3f}")
        names = ("over_bound", "over_floor", "floor_over_bound")
        over = [f"{result[name]:.3f}" for name in names if name in result]
        table.add_row(row, *cells, *over)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the comparison with the baseline, and a line RESULT with all as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.placement", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    chosen = KEEPER.parse(parser, arguments, defaults=("rows",))
    results = measured(chosen.rows.split(","))
    Console(width=WIDTH).print(table_of(results))
    return KEEPER.conclude(figures_of(results), results, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
