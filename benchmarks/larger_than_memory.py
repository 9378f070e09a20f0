"""What an operator takes that is ten times larger than the budget, and runs in blocks.

`python -m benchmarks.larger_than_memory [--rows matmul,softmax] [--write-baseline]` runs each on
the simulated accelerator (5 TFLOP/s, a link of 12 GB/s) with a budget of 10 % of operands and
results, in virtual time and without bytes. Then a smaller one of the same kind is run with bytes,
with a budget of 10 % of it, and compared with plain torch bit by bit.

The bound adds up, operator by operator, the longest of what compute takes for it as a whole, of
what has to cross the link to it, and of what has to cross it back. Only tensors larger than half
the budget count as having to. A product of n x k by k x m cannot be done with fewer than
2 n m k / sqrt(M) numbers crossing, where M fit. The host's time is that of the same operators on
the simulated machine's processor.

The gradients of ``vocabulary`` have a product over 128,256 numbers. Cut within its sums it moves
less, and adds in another order: ``vocabulary-any`` does, with ``options(blocks="any")``, and is
compared within 2 % of the largest number.

``keys-any`` (attention of which not one head's keys fit) and ``row-any`` (a softmax of one row) are
cut along what they go along; they are run where they are asked for. Their bound knows nothing of a
second pass, nor of what weights take that no kernel keeps to itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any, NamedTuple

# Before torch is loaded, as for the tests: kernels that add the parts of a product as they add all
# of it. Where they do not (an Intel Xeon with AMX), products are not cut, and without bytes nothing
# can run at home instead.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchTensorRef
import torchTensorRef.tensor.install
from torchTensorRef import options, tensorsManager
from torchTensorRef.base.options import settings
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory.block import Block, Replica
from torchTensorRef.memory.plain_views import make_ref
from torchTensorRef.memory.states import CLEAN
from torchTensorRef.operators.costs import operator_cost
from torchTensorRef.operators.plan import plan_of

from .baseline import EXACT, WIDTH, Figure, Keeper

KEEPER = Keeper("larger_than_memory", "python -m benchmarks.larger_than_memory", EXACT)
SHARE = 10
#: How far another order may be off, as a share of the largest number.
CLOSE = 0.02
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

Shapes = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """What is run, on floating point operands of these shapes."""

    run: Callable[..., Any]
    shapes: Shapes
    #: The smaller one that is compared.
    small: Shapes
    dtype: torch.dtype
    #: How many columns there are to choose a target from; 0: there is no target.
    columns: int = 0
    small_columns: int = 0


def project(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    """Cross entropy over a vocabulary, and its gradients."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = functional.cross_entropy(x @ weight.t(), target)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What attention is on tensors that say they are on the host."""
    out: torch.Tensor
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The shares along the last dimension."""
    return x.softmax(-1)


CASES = {
    "matmul": Case(
        torch.mm,
        ((16384, 16384), (16384, 16384)),
        ((2048, 2048), (2048, 2048)),
        torch.float32,
    ),
    "attention": Case(
        attend,
        ((1, 32, 4096, 128), (1, 32, 65536, 128), (1, 32, 65536, 128)),
        ((1, 32, 64, 32), (1, 32, 2048, 32), (1, 32, 2048, 32)),
        torch.bfloat16,
    ),
    "vocabulary": Case(
        project,
        ((2048, 4096), (128256, 4096)),
        ((1024, 512), (16032, 512)),
        torch.bfloat16,
        128256,
        16032,
    ),
    "convolution": Case(
        functional.conv2d,
        ((256, 64, 128, 128), (256, 64, 3, 3)),
        ((32, 16, 32, 32), (64, 16, 3, 3)),
        torch.bfloat16,
    ),
    "softmax": Case(softmax, ((64, 1 << 22),), ((64, 1 << 14),), torch.float32),
    "keys": Case(
        attend,
        ((1, 1, 8192, 128), (1, 1, 1 << 20, 128), (1, 1, 1 << 20, 128)),
        ((1, 1, 256, 32), (1, 1, 16384, 32), (1, 1, 16384, 32)),
        torch.float32,
    ),
    "row": Case(softmax, ((1, 1 << 28),), ((1, 1 << 20),), torch.float32),
}


#: With the setting of `TTR_BLOCKS` behind the name, where it is not the default.
ROWS = ("matmul", "attention", "vocabulary", "convolution", "softmax", "vocabulary-any")


class Bound(TorchDispatchMode):
    """Adds up the bound of operators on tensors without bytes, and what the host would take."""

    def __init__(self, spec: DeviceSpec, budget_nbytes: int) -> None:
        super().__init__()
        self.ns = self.host_ns = 0.0
        self.nbytes = 0
        self._spec, self._budget = spec, budget_nbytes
        self._device = SimDevice(spec, name="sim:bound")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        plan = plan_of(op)
        if plan.is_true_view or "detach" in plan.name:
            return out
        before_ns = self._device.clocks().compute_ns
        flops, nbytes, dtype = operator_cost(plan, args, kwargs or {}, out)
        self._device.charge(flops, nbytes, dtype)
        compute_ns = self._device.clocks().compute_ns - before_ns
        machine = self._device.machine
        self.host_ns += max(flops / machine.flops_per_ns, nbytes / machine.kernel_bytes_per_ns)
        read, made = self._large(args), self._large(out)
        if op in PRODUCTS:
            a = args[-2]
            numbers = 2 * a.size(0) * a.size(1) * out.size(1) / sqrt(self._budget / a.itemsize)
            read = max(read, numbers * a.itemsize)
        self.ns += max(
            compute_ns,
            read / self._spec.h2d_bytes_per_s * 1e9,
            made / self._spec.d2h_bytes_per_s * 1e9,
        )
        return out

    def _large(self, values: Any) -> float:
        sizes = [t.nbytes for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
        return sum(nbytes for nbytes in sizes if nbytes > self._budget / 2)


@contextmanager
def machine_of(nbytes: int, *, keeps_bytes: bool) -> Iterator[SimDevice]:
    """Use an accelerator of a size."""
    spec = DeviceSpec(name="bench", capacity_nbytes=nbytes)
    device = SimDevice(spec, name="sim:bench", keeps_bytes=keeps_bytes)
    if not keeps_bytes:
        # Kernels have their results where the operands are.
        device.torch_device = torch.device("meta")
    tensorsManager.device, tensorsManager.strategy = device, "lru"
    tensorsManager.budget = nbytes
    tensorsManager.reset_stats()
    yield device
    tensorsManager.check()


def without_bytes(sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Make a tensor of ours that has a home of so many bytes, and no bytes."""
    residency = tensorsManager.residency
    plain = torch.empty(sizes, dtype=dtype, device="meta")
    block = Block(plain.nbytes, residency.books.tick)
    host = residency.books.host
    block.replicas[host] = Replica(block, host, plain, CLEAN)
    return make_ref(plain, block, host, torch.device("cpu"))


def meta(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a plain tensor without bytes."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def nbytes_of(case: Case, shapes: Shapes) -> int:
    """Bytes of the operands, and of the largest result of the first operator."""
    args = operands_of(case, shapes, meta)
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = op(*args, **(kwargs or {}))
            if not plan_of(op).is_true_view:
                made.append(sum(t.nbytes for t in tree_leaves(out) if torch.is_tensor(t)))
            return out

    with Watch():
        case.run(*args)
    return sum(t.nbytes for t in args) + made[0]


def operands_of(case: Case, shapes: Shapes, make: Callable[..., Any]) -> list[Any]:
    """Make the operands, and a target where there is one."""
    found = [make(sizes, case.dtype) for sizes in shapes]
    if case.columns:
        found.append(make(shapes[0][:1], torch.int64))
    return found


def timed(case: Case) -> dict[str, float]:
    """Run the large one without bytes; return its time over the bound, and its peak."""
    nbytes = nbytes_of(case, case.shapes) // SHARE
    bound = Bound(DeviceSpec(name="bench", capacity_nbytes=nbytes), nbytes)
    operands = operands_of(case, case.shapes, meta)
    with bound:
        case.run(*operands)
    with machine_of(nbytes, keeps_bytes=False) as device:
        operands = operands_of(case, case.shapes, without_bytes)
        began_ns = device.now_ns()
        case.run(*operands)
        device.synchronize()
        took_ns = device.now_ns() - began_ns
        stats = tensorsManager.stats()
        del operands
    return {
        "ms": round(took_ns / 1e6, 2),
        "over_bound": round(took_ns / bound.ns, 4),
        "host_ms": round(bound.host_ns / 1e6, 2),
        "peak": round(stats["peak_resident_nbytes"] / nbytes, 4),
        "blocks": stats["blocked_tile_count"],
        "on_host": stats["host_fallback_count"] + stats["host_op_count"],
    }


def compared(case: Case) -> dict[str, bool]:
    """Run the small one with bytes; return whether a bit differs, or the host had to run it."""
    nbytes = nbytes_of(case, case.small) // SHARE
    torch.manual_seed(0)

    def make(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.int64:
            return torch.randint(case.small_columns, sizes)
        return torch.randn(sizes).to(dtype)

    plain = operands_of(case, case.small, make)
    with machine_of(nbytes, keeps_bytes=True):
        ours = case.run(*[tensorsManager.adopt(t.clone()) for t in plain])
        stats = tensorsManager.stats()
        found = [tensorsManager.release(t) for t in tree_leaves(ours)]
    expected = tree_leaves(case.run(*plain))
    pairs = list(zip(expected, found, strict=True))
    differs = any(not torch.equal(a, b) for a, b in pairs)
    if settings.blocks == "any":
        differs = any((a - b).abs().max() > CLOSE * a.abs().max() for a, b in pairs)
    return {
        "differs": differs,
        "small_on_host": bool(stats["host_fallback_count"] + stats["host_op_count"]),
    }


def measured(rows: list[str]) -> dict[str, dict[str, float]]:
    """Measure rows."""
    results: dict[str, dict[str, float]] = {}
    with torchTensorRef.disabled():
        for row in rows:
            name, _, how = row.partition("-")
            with options(blocks=how or "exact"):
                results[row] = {**timed(CASES[name]), **compared(CASES[name])}
            Console(stderr=True).print(row, results[row], soft_wrap=True)
    return results


def figures_of(results: dict[str, dict[str, float]]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures = {}
    for row, result in results.items():
        figures[f"{row}/over_bound"] = Figure(result["over_bound"], "x the bound", 1.10)
        figures[f"{row}/peak"] = Figure(result["peak"], "of the budget", 1.0)
        figures[f"{row}/on_host"] = Figure(result["on_host"], "operators", 0)
        for name in ("differs", "small_on_host"):
            figures[f"{row}/{name}"] = Figure(result[name], "yes or no", 0)
    return figures


def table_of(results: dict[str, dict[str, float]]) -> Table:
    """One row per operator."""
    table = Table(title="ten times the budget, in blocks: virtual time")
    for heading in ("row", "ms", "over the bound", "host ms", "peak", "blocks", "bits"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row, result in results.items():
        table.add_row(
            row,
            f"{result['ms']:.1f}",
            f"{result['over_bound']:.3f}",
            f"{result['host_ms']:.0f}",
            f"{result['peak']:.0%}",
            str(result["blocks"]),
            "differ" if result["differs"] else "close" if row.endswith("-any") else "equal",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the comparison with the baseline, and a line RESULT with all as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.larger_than_memory", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    chosen = KEEPER.parse(parser, arguments, defaults=("rows",))
    torch.set_num_threads(1)
    results = measured(chosen.rows.split(","))
    Console(width=WIDTH).print(table_of(results))
    return KEEPER.conclude(figures_of(results), results, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
