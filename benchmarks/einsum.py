"""What `torchTensorRef.einsum` takes in time and memory, beside others that do the same.

    python -m benchmarks.einsum [--only memory,real,log,log-gradients,best] [--rounds 9]
                                [--write-baseline]

``memory`` are products whose terms are 824 MiB, with a budget of 16 MiB and with none: the most
that the allocator of the host has given at once for operands, results, gradients and all that is
made on the way, as torch's profiler has counted it, as a share of 16 MiB.

``real`` is time beside `torch.einsum`: forward, and with gradients. The others are times beside
torch_semiring_einsum, where it is installed, with the same memory: ours with a budget of 16 MiB,
the other with the largest block size with which it stays within as much, counted in the same way.
``best`` is Viterbi: the greatest sum and where it is, forward, which is all that the other does.
The first equation of these is so small that what is measured is Python.

Plain tensors on the host, one thread. A figure is the median of the ratios of neighbouring runs in
processor time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torchTensorRef
from torchTensorRef import disabled

from .baseline import Figure, Keeper, Tolerance
from .overhead_of_dispatch import ratio

KEEPER = Keeper("einsum", "python -m benchmarks.einsum", Tolerance(share=0.1, amount=0.02))
PARTS = ("memory", "real", "log", "log-gradients", "best")
MIB = 1 << 20
BUDGET_NBYTES = 16 * MIB
#: Ours over torch's, and over the other one's: 1.5 times faster.
REAL_BOUND, OTHERS_BOUND = 1.05, 1 / 1.5
#: A round takes a run of each at least, and as many as this takes.
ROUND_NS = 20_000_000

Run = Callable[[], Any]
Shapes = tuple[tuple[int, ...], ...]


class Row(NamedTuple):
    """An equation, with sizes of its operands."""

    text: str
    shapes: Shapes
    with_gradients: bool = False

    def __str__(self) -> str:
        sizes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.text} {sizes}{' and gradients' if self.with_gradients else ''}"

    def operands(self) -> list[Tensor]:
        """Numbers between 0 and 1; their logarithms are as good as any."""
        torch.manual_seed(0)
        return [torch.rand(x, requires_grad=self.with_gradients) for x in self.shapes]


#: 600 x 600 x 600 terms each.
MEMORY = (
    Row("abc,bcd->ad", ((600, 24, 25), (24, 25, 600))),
    Row("bac,bdc->da", ((24, 600, 25), (24, 600, 25))),
)
MEMORY_RINGS = ("real", "log", "max-plus", "min-plus")

REAL = (
    Row("ij,jk->ik", ((8, 8), (8, 8))),
    Row("ij,jk->ik", ((512, 512), (512, 512))),
    Row("ij,kj->ki", ((512, 512), (512, 512))),
    Row("bij,bjk->bik", ((16, 128, 128), (16, 128, 128))),
    Row("abc,bcd->ad", ((600, 24, 25), (24, 25, 600))),
    Row("abc,cbd->da", ((600, 24, 25), (25, 24, 600))),
    Row("bqhd,bkhd->bhqk", ((2, 128, 8, 64), (2, 128, 8, 64))),
    Row("bn,anm,bm->ba", ((64, 128), (64, 128, 128), (64, 128))),
    Row("ij,jk,kl->il", ((256, 256), (256, 256), (256, 256))),
    Row("ij,ij->i", ((1024, 1024), (1024, 1024))),
    Row("i,j->ij", ((1024,), (1024,))),
    Row("ij->j", ((1024, 1024),)),
    Row("ii->", ((1024, 1024),)),
    Row("ij,jk->ik", ((512, 512), (512, 512)), True),
    Row("bqhd,bkhd->bhqk", ((2, 128, 8, 64), (2, 128, 8, 64)), True),
    Row("bn,anm,bm->ba", ((64, 128), (64, 128, 128), (64, 128)), True),
)

OTHERS = (
    Row("ik,kj->ij", ((16, 16), (16, 16))),
    Row("ik,kj->ij", ((300, 300), (300, 300))),
    Row("bik,bkj->bij", ((8, 100, 100), (8, 100, 100))),
    Row("abc,bcd->ad", ((300, 10, 30), (10, 30, 300))),
    Row("ak,ak,ak->a", ((10, 30_000), (10, 30_000), (10, 30_000))),
    Row("abce,abde,abdf->acd", ((2, 3, 20, 44), (2, 3, 28, 44), (2, 3, 28, 52))),
)


# -- memory ----------------------------------------------------------------------------------------


@contextmanager
def silent_profiler() -> Iterator[None]:
    """Keep what the profiler's library says of itself off the screen."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def peak_nbytes(row: Row, run: Callable[..., Any]) -> int:
    """Return the most bytes that are allocated at once, from the operands on."""
    with (
        silent_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        found = finished(row, run)(row.operands())
        del found
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def finished(row: Row, run: Callable[..., Any]) -> Callable[[list[Tensor]], Any]:
    """Return what computes a result, and the gradients where these are asked for."""

    def forward(operands: list[Tensor]) -> Any:
        return run(*operands)

    def both(operands: list[Tensor]) -> Any:
        found = run(*operands)
        return found, torch.autograd.grad(found, operands, torch.ones_like(found))

    return both if row.with_gradients else forward


def ours(row: Row, ring: str, budget: int | None) -> Callable[..., Any]:
    """Return our einsum."""
    equation = torchTensorRef.Equation(row.text)

    def run(*operands: Tensor) -> Any:
        is_best = ring == "best"
        return torchTensorRef.einsum(
            equation,
            *operands,
            semiring="max-plus" if is_best else ring,
            budget=budget,
            argmax=is_best,
        )

    return run


def theirs(row: Row, ring: str, block_size: Any) -> Callable[..., Any]:
    """Return torch_semiring_einsum's."""
    import torch_semiring_einsum as other

    equation = other.compile_equation(row.text)
    function = {
        "real": other.einsum,
        "log": other.log_einsum if row.with_gradients else other.log_einsum_forward,
        "best": other.log_viterbi_einsum_forward,
    }[ring]
    return lambda *operands: function(equation, *operands, block_size=block_size)


def block_size_of(row: Row, ring: str) -> int:
    """Return the largest block size with which the other one stays within the same memory."""
    size = max(max(shape) for shape in row.shapes)
    while size > 1:
        # Of one whose terms alone are more it need not be tried.
        if 4 * terms_of(row, size) <= BUDGET_NBYTES and (
            peak_nbytes(row, theirs(row, ring, size)) <= BUDGET_NBYTES
        ):
            break
        size = max(1, min(size - 1, int(size * 0.9)))
    return size


def terms_of(row: Row, block_size: int) -> int:
    """Return how many terms a block has in which each summed dimension is cut."""
    inputs, _, output = row.text.partition("->")
    found = 1
    sizes = {
        label: size
        for labels, shape in zip(inputs.split(","), row.shapes, strict=True)
        for label, size in zip(labels, shape, strict=True)
    }
    for label, size in sizes.items():
        found *= size if label in output else min(size, block_size)
    return found


def memory() -> dict[str, float]:
    """Return the peak of ours, by ring and equation, as a share of what may be taken."""
    found = {}
    for row in MEMORY:
        for ring in MEMORY_RINGS:
            for budget in (BUDGET_NBYTES, None) if row is MEMORY[0] else (BUDGET_NBYTES,):
                peak = peak_nbytes(row._replace(with_gradients=True), ours(row, ring, budget))
                name = f"memory/{ring} {row.text}{'' if budget else ', no budget'}"
                found[name] = round(peak / BUDGET_NBYTES, 4)
    return found


def memory_of_the_other() -> float:
    """Return the peak of the other one's automatic blocks of the same bytes, as a share of them."""
    from torch_semiring_einsum import AutomaticBlockSize

    size = AutomaticBlockSize(max_cpu_bytes=BUDGET_NBYTES)
    return round(peak_nbytes(MEMORY[0], theirs(MEMORY[0], "log", size)) / BUDGET_NBYTES, 1)


# -- time ------------------------------------------------------------------------------------------


def ratio_of(row: Row, one: Callable[..., Any], other: Callable[..., Any], rounds: int) -> float:
    """Return our time over that of another, on the same operands."""
    operands = row.operands()

    def timed(run: Callable[..., Any]) -> Run:
        whole = finished(row, run)
        return lambda: whole(operands)

    timed(other)()
    began_ns = time.process_time_ns()
    timed(other)()
    repeats = max(1, int(ROUND_NS / max(1, time.process_time_ns() - began_ns)))
    return round(ratio(timed(other), timed(one), repeats, rounds), 3)


def real(rounds: int) -> dict[str, float]:
    """Return times beside torch's."""
    return {
        f"real/{row}": ratio_of(
            row, ours(row, "real", None), lambda *x, t=row.text: torch.einsum(t, *x), rounds
        )
        for row in REAL
    }


def others(ring: str, with_gradients: bool, rounds: int) -> dict[str, float]:
    """Return times beside the other one's, with the same memory."""
    found = {}
    for row in OTHERS:
        row = row._replace(with_gradients=with_gradients)
        block_size = block_size_of(row, ring)
        mine = ours(row, ring, BUDGET_NBYTES)
        found[f"{ring}/{row}"] = ratio_of(row, mine, theirs(row, ring, block_size), rounds)
    return found


def measured(chosen: argparse.Namespace) -> dict[str, float]:
    """Measure the parts that are chosen."""
    is_there = importlib.util.find_spec("torch_semiring_einsum") is not None
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "memory": memory,
        "real": lambda: real(chosen.rounds),
    }
    if is_there:
        parts["log"] = lambda: others("log", False, chosen.rounds)
        parts["log-gradients"] = lambda: others("log", True, chosen.rounds)
        parts["best"] = lambda: others("best", False, chosen.rounds)
    wanted = [name for name in parts if name in chosen.only.split(",")]
    found: dict[str, float] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(task, description=name)
            found.update(parts[name]())
            progress.advance(task)
    return found


def figures_of(found: dict[str, float]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures = {}
    for name, value in found.items():
        part = name.partition("/")[0]
        unit = {"memory": "of 16 MiB", "real": "x torch"}.get(part, "x the other")
        bound = {"memory": 1.0, "real": REAL_BOUND}.get(part, OTHERS_BOUND)
        figures[name] = Figure(value, unit, bound)
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison with the baseline, and a line RESULT with all as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.einsum", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="medians over so many (%(default)s)")
    chosen = KEEPER.parse(parser, arguments, defaults=("only", "rounds"))
    torch.set_num_threads(1)
    with disabled():
        found = measured(chosen)
        if "memory" in chosen.only and importlib.util.find_spec("torch_semiring_einsum"):
            print(f"torch_semiring_einsum, automatic: {memory_of_the_other():g} times 16 MiB")
    return KEEPER.conclude(figures_of(found), found, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    raise SystemExit(main())
