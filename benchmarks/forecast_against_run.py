"""Is a forecast true? Against runs on the simulated device, the formulas, and a first pass.

`python -m benchmarks.forecast_against_run [--only llama,long,warm] [--write-baseline]`; in virtual
time, so nothing varies.

* `llama`, `bert`, `unet`, `moe`: models of real configs with tiny widths are forecast on the meta
  device, at 30, 60 and 110 % of what everything alive at once takes. The same program runs with
  real weights on the simulated device under flow. Compared are bytes fetched, bytes written back,
  peak and virtual time of each part, by the share by which they differ. Each case begins as a fresh
  process would: what results were expected to take is forgotten.
* `warm`: the first pass of BERT at half the weights' budget, with and without what was foretold, by
  the steady pass (where arithmetic bounds), or by its floor (where the link does: each weight has
  to cross it once in the first pass, and in a steady one only those that do not stay).

The card is an rtx4060 whose speeds are divided so that copying these weights takes as long as 16 GB
do.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from torchTensorRef import Forecast, disabled, forecast, tensorsManager
from torchTensorRef.devices import registry
from torchTensorRef.devices.sim.cards import SPECS
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from .baseline import EXACT, WIDTH, Figure, Keeper
from .model_shapes import SHAPES, Shape, read

KEEPER = Keeper("forecast_against_run", "python -m benchmarks.forecast_against_run", EXACT)
REAL_NBYTES = 16e9
BUDGETS = (30, 60, 110)
STRATEGY = "flow"
OTHERS = ("warm",)
#: The largest shares by which a forecast may differ.
BYTES_BOUND, TIME_BOUND = 0.01, 0.03
#: The most that a first pass may take that is known in advance, in steady passes.
FIRST_PASS_BOUND = 1.10
SPEEDS = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "pageable_bytes_per_s",
    "memory_bytes_per_s",
    "host_memory_bytes_per_s",
    "host_flops_per_s",
)


class Part(NamedTuple):
    """What a part of a program has cost."""

    time_ns: int
    fetched_nbytes: int
    written_back_nbytes: int
    peak_nbytes: int


def made(make: Callable[[], nn.Module], *, real: bool) -> nn.Module:
    """Make a model with seeded weights, or without any on the meta device."""
    torch.manual_seed(0)
    if not real:
        with torch.device("meta"):
            return make().eval()
    with disabled():
        model = make().eval()
    managed: nn.Module = tensorsManager.adopt(model)
    return managed


def weights_nbytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(p.nbytes for p in model.parameters())


def scaled_spec(w_nbytes: int) -> DeviceSpec:
    """The card, slowed down by the ratio of the weights."""
    card, slower = SPECS["rtx4060"], REAL_NBYTES / w_nbytes
    speeds = {name: getattr(card, name) / slower for name in SPEEDS}
    flops = {name: rate / slower for name, rate in card.flops_per_s.items()}
    return card.scaled(capacity=2**28, flops_per_s=flops, **speeds)


def run(
    shape: Shape, spec: DeviceSpec, budget_nbytes: int, taught: Forecast | None = None, **more: Any
) -> list[Part]:
    """Run a program with real weights, as if it were the first on a device: each of its parts."""
    device, host = SimDevice(spec, name="sim:run"), registry.resolve("cpu")
    others, host.machines = host.machines, [device.machine]
    try:
        tensorsManager.device = device
        tensorsManager.budget, tensorsManager.strategy = budget_nbytes, STRATEGY
        model = made(shape.make, real=True)
        if taught is not None:
            taught.teach(model)
        tensorsManager.reset_stats()
        found, before = [], (0, 0, 0)
        for _ in shape.run(model, **more):
            stats = tensorsManager.stats()
            after = (
                max(device.now_ns(), device.record().end_ns),
                stats["fetched_nbytes"] + stats["prefetched_nbytes"],
                stats["written_back_nbytes"],
            )
            moved = [b - a for a, b in zip(before, after, strict=True)]
            found.append(Part(*moved, device.peak_nbytes))
            before = after
            device.reset_peak()
        return found
    finally:
        host.machines = others


def apart(foretold: float, real: float) -> float:
    """By which share of what has happened a forecast differs."""
    return round(abs(foretold - real) / max(real, 1), 6)


# -- the models ---------------------------------------------------------------------------------


def agreement(shape: Shape, note: Callable[[str], None]) -> Iterator[tuple[str, Figure]]:
    """Compare a forecast with a run, part by part: the worst of each budget."""
    model = made(shape.make, real=False)
    spec = scaled_spec(weights_nbytes(model))
    seen = forecast(shape.run, model, device=spec, budget=spec.capacity_nbytes)
    for budget in BUDGETS:
        budget_nbytes = seen.enough_nbytes * budget // 100
        steps = seen.on(budget=budget_nbytes, strategy=STRATEGY).steps
        parts = run(shape, spec, budget_nbytes)
        pairs = list(zip(steps, parts, strict=True))
        nbytes = max(
            max(
                apart(s.fetched_nbytes, p.fetched_nbytes),
                apart(s.written_back_nbytes, p.written_back_nbytes),
                apart(s.peak_nbytes, p.peak_nbytes),
            )
            for s, p in pairs
        )
        time = max(apart(s.time_ns, p.time_ns) for s, p in pairs)
        moved = sum(p.fetched_nbytes + p.written_back_nbytes for p in parts)
        cell = f"{shape.name}/{budget}"
        note(
            f"{cell} %: {len(parts)} parts, {moved:,} bytes, {sum(p.time_ns for p in parts):,} ns; "
            f"bytes {nbytes:.3%} and time {time:.3%} apart"
        )
        yield f"{cell}/bytes", Figure(nbytes, "apart", BYTES_BOUND)
        yield f"{cell}/time", Figure(time, "apart", TIME_BOUND)


# -- a first pass -------------------------------------------------------------------------------

ROWS = 16


def first_pass(note: Callable[[str], None]) -> Iterator[tuple[str, Figure]]:
    """Compare a first pass that was foretold with one that was not: both by the best there is."""
    shape = next(shape for shape in SHAPES if shape.name == "bert")
    model = made(shape.make, real=False)
    w_nbytes = weights_nbytes(model)
    for name, compute_to_link in (("compute", 2.0), ("link", 0.25)):
        spec = balanced_spec(model, compute_to_link)
        budget_nbytes = w_nbytes // 2
        # A pass forecast with activations: the budget is that of the weights, and they have room.
        seen = forecast(read, model, device=spec, budget=budget_nbytes, rows=ROWS)
        cold = run(shape, spec, budget_nbytes, rows=ROWS)
        warm = run(shape, spec, budget_nbytes, seen, rows=ROWS)
        steady_ns = warm[-1].time_ns
        compute_ns = seen.steps[0].compute_ns
        used = {n for op in seen.record.each() if not op.reads_part for n in op.reads}
        blocks = [seen.record.blocks[number] for number in used]
        crossing_nbytes = sum(block.nbytes for block in blocks if block.is_persistent)
        floor_ns = max(compute_ns, crossing_nbytes / spec.h2d_bytes_per_s * 1e9)
        by = {"steady": steady_ns, "floor": floor_ns}
        note(
            f"first pass, bound by {name}: {warm[0].time_ns:,} ns foretold, "
            f"{cold[0].time_ns:,} not; steady {steady_ns:,}, floor of a first {floor_ns:,.0f}"
        )
        bound = "steady" if name == "compute" else "floor"
        for way, parts, limit in (("foretold", warm, FIRST_PASS_BOUND), ("cold", cold, None)):
            ratio = round(parts[0].time_ns / by[bound], 4)
            yield f"warm/{name}/{way}", Figure(ratio, f"x the {bound}", limit)


def balanced_spec(model: nn.Module, compute_to_link: float) -> DeviceSpec:
    """The card with arithmetic that takes so many times as long as the weights take to cross."""
    w_nbytes = weights_nbytes(model)
    spec = scaled_spec(w_nbytes)
    seen = forecast(read, model, device=spec, budget=spec.capacity_nbytes, batches=1, rows=ROWS)
    copy_s = w_nbytes / spec.h2d_bytes_per_s
    speed = sum(op.flops for op in seen.record.each()) / (copy_s * compute_to_link)
    return spec.scaled(
        flops_per_s={"default": speed, "float32": speed},
        # Bound by arithmetic, as on the card: the bytes of these small operators must not matter.
        memory_bytes_per_s=spec.memory_bytes_per_s * 1000,
        host_flops_per_s=speed / 10,
    )


# -- all of it ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print what was compared, the comparison with the baseline, and a line RESULT."""
    parser = argparse.ArgumentParser(prog="benchmarks.forecast_against_run", description=__doc__)
    names = [*(shape.name for shape in SHAPES), *OTHERS]
    parser.add_argument("--only", default=",".join(names), help="names, separated by commas")
    options = KEEPER.parse(parser, arguments, defaults=["only"])
    only = options.only.split(",")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    screen = Console(width=WIDTH, highlight=False, soft_wrap=True)
    ways: dict[str, Callable[[Callable[[str], None]], Iterator[tuple[str, Figure]]]] = {
        **{shape.name: lambda note, shape=shape: agreement(shape, note) for shape in SHAPES},
        "warm": first_pass,
    }
    figures: dict[str, Figure] = {}
    with Progress(console=Console(stderr=True)) as progress:
        chosen = [name for name in ways if name in only]
        for name in progress.track(chosen):
            figures.update(ways[name](screen.print))
    return KEEPER.conclude(figures, result_of(figures), settings={}, writes=options.write_baseline)


def result_of(figures: dict[str, Figure]) -> dict[str, float]:
    """Return the worst of bytes and of time, and the figures of first passes and large models."""
    worst = {
        f"worst_{kind}": max(
            (f.value for n, f in figures.items() if n.endswith(f"/{kind}") and not _is_other(n)),
            default=0.0,
        )
        for kind in ("bytes", "time")
    }
    return {**worst, **{name: f.value for name, f in figures.items() if _is_other(name)}}


def _is_other(name: str) -> bool:
    return name.partition("/")[0] in OTHERS


if __name__ == "__main__":
    sys.exit(main())
