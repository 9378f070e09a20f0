"""What a product of sparse matrices takes that is ten times larger than the budget.

`python -m benchmarks.sparse_products [--rows square,dense] [--write-baseline]` multiplies on the
simulated accelerator (5 TFLOP/s, a link of 12 GB/s) with a budget of 10 % of operands and result,
compares every bit with plain torch, and the numbers with `scipy.sparse`, where that is installed.

``dense``, ``dense-csr`` and ``sampled`` have a matrix of 200,000 x 100,000 of which 0.2 % are there
(40 million elements). The square of that, A times its transpose, would have 13 billion elements, or
264 GB, so ``square`` has one of 20,000 x 10,000 of the same density (15.7 million), and ``strip``
is 250 rows of the large one times all of its transpose.

``over_bound`` is virtual time, in which the host is charged for sorting and packing at 40 GB/s,
over the longest of what has to cross the link there, and what has to cross it back. What stands on
the right is larger than the budget in ``strip``: rows are fetched once for each tile of its columns
there, and the bound counts them once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import torchTensorRef
from torchTensorRef import tensorsManager
from torchTensorRef.operators.layouts import parts_of, sparse_of

from .baseline import EXACT, WIDTH, Figure, Keeper
from .larger_than_memory import machine_of

KEEPER = Keeper("sparse_products", "python -m benchmarks.sparse_products", EXACT)
SHARE = 10
LINK_NBYTES_PER_NS = 12
ROWS, COLUMNS, PER_ROW, WIDTH_OF_DENSE = 200_000, 100_000, 200, 64


class Case(NamedTuple):
    """A product, its operands, and the same by scipy."""

    run: Callable[..., torch.Tensor]
    make: Callable[[], list[torch.Tensor]]
    scipy: Callable[..., Any]


def matrix(rows: int, columns: int, per_row: int) -> torch.Tensor:
    """A matrix compressed in rows with about so many elements in each, at random places."""
    places = torch.randint(columns, (rows, per_row)).sort(1).values
    is_first = torch.ones_like(places, dtype=torch.bool)
    is_first[:, 1:] = places[:, 1:] != places[:, :-1]
    starts = torch.nn.functional.pad(is_first.sum(1).cumsum(0), (1, 0))
    indices = places[is_first]
    values = torch.randn(indices.numel())
    return sparse_of([starts, indices, values], (rows, columns), torch.sparse_csr)


def large() -> torch.Tensor:
    """The matrix of 200,000 x 100,000."""
    return matrix(ROWS, COLUMNS, PER_ROW)


def strip_of_large() -> list[torch.Tensor]:
    """Some rows of it, and all of it."""
    whole = large().to_sparse_coo()
    end = int(torch.searchsorted(whole.indices()[0].contiguous(), 250))
    parts = [whole.indices()[:, :end].clone(), whole.values()[:end].clone()]
    return [sparse_of(parts, (250, COLUMNS), torch.sparse_coo, True), whole]


CASES = {
    "dense": Case(
        torch.matmul,
        lambda: [large().to_sparse_coo(), torch.randn(COLUMNS, WIDTH_OF_DENSE)],
        lambda a, b: a @ b,
    ),
    "dense-csr": Case(
        torch.matmul, lambda: [large(), torch.randn(COLUMNS, WIDTH_OF_DENSE)], lambda a, b: a @ b
    ),
    "sampled": Case(
        torch.sparse.sampled_addmm,
        lambda: [large(), torch.randn(ROWS, WIDTH_OF_DENSE), torch.randn(WIDTH_OF_DENSE, COLUMNS)],
        None,  # type: ignore[arg-type]
    ),
    "square": Case(
        lambda a: a @ a.t(), lambda: [matrix(20_000, 10_000, 20).to_sparse_coo()], lambda a: a @ a.T
    ),
    "strip": Case(lambda a, b: a @ b.t(), strip_of_large, lambda a, b: a @ b.T),
}


def nbytes_of(*tensors: torch.Tensor) -> int:
    """Bytes of tensors of any layout."""
    return sum(part.nbytes for tensor in tensors for part in parts_of(tensor))


def by_scipy(case: Case, operands: list[torch.Tensor], expected: torch.Tensor) -> float:
    """Multiply with scipy; return the largest difference, as a share of the largest number."""
    try:
        from scipy import sparse
    except ImportError:
        return 0.0
    if case.scipy is None:
        return 0.0

    def converted(x: torch.Tensor) -> Any:
        if x.layout is torch.strided:
            return x.numpy()
        if x.layout is torch.sparse_coo:
            rows, columns = x._indices().numpy()
            return sparse.csr_matrix((x._values().numpy(), (rows, columns)), tuple(x.size()))
        starts, indices, values = (part.numpy() for part in parts_of(x))
        return sparse.csr_matrix((values, indices, starts), tuple(x.size()))

    theirs = case.scipy(*map(converted, operands))
    difference = abs(theirs - converted(expected)).max()
    return float(difference) / float(parts_of(expected)[-1].abs().max())


def measured(case: Case) -> dict[str, float]:
    """Multiply with plain torch, with ours and with scipy."""
    torch.manual_seed(0)
    operands = case.make()
    began = time.perf_counter()
    expected = case.run(*operands)
    plain_s = time.perf_counter() - began
    there, back = nbytes_of(*operands), nbytes_of(expected)
    nbytes = (there + back) // SHARE
    with machine_of(nbytes, keeps_bytes=True) as device:
        # What the host sorts and packs takes its time, too.
        tensorsManager.residency.books.host.plug_in(device.machine)  # type: ignore[attr-defined]
        ours = [tensorsManager.adopt(x) for x in operands]
        began_ns, began = device.now_ns(), time.perf_counter()
        result = case.run(*ours)
        device.synchronize()
        took_ns, took_s = device.now_ns() - began_ns, time.perf_counter() - began
        stats = tensorsManager.stats()
        found = tensorsManager.release(result)
        del ours, result
    pairs = zip(parts_of(expected), parts_of(found), strict=True)
    differs = any(not torch.equal(mine, its) for mine, its in pairs)
    del found
    return {
        "operands_mb": round(there / 1e6, 1),
        "result_mb": round(back / 1e6, 1),
        "ms": round(took_ns / 1e6, 2),
        "over_bound": round(took_ns / (max(there, back) / LINK_NBYTES_PER_NS), 4),
        "peak": round(stats["peak_resident_nbytes"] / nbytes, 4),
        "blocks": stats["blocked_tile_count"],
        "is_whole": not stats["blocked_op_count"],
        "differs": differs,
        "off_scipy": by_scipy(case, operands, expected),
        "plain_s": round(plain_s, 2),
        "ours_s": round(took_s, 2),
    }


def figures_of(results: dict[str, dict[str, float]]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures = {}
    for row, result in results.items():
        figures[f"{row}/over_bound"] = Figure(result["over_bound"], "x the bound")
        figures[f"{row}/peak"] = Figure(result["peak"], "of the budget", 1.0)
        figures[f"{row}/is_whole"] = Figure(result["is_whole"], "yes or no", 0)
        figures[f"{row}/differs"] = Figure(result["differs"], "yes or no", 0)
        is_off = bool(result["off_scipy"] > 1e-5)
        figures[f"{row}/off_scipy"] = Figure(is_off, "yes or no", 0)
    return figures


def table_of(results: dict[str, dict[str, float]]) -> Table:
    """One row per product."""
    table = Table(title="products of sparse matrices, ten times the budget: virtual time")
    for heading in ("row", "operands MB", "result MB", "ms", "over the bound", "peak", "blocks"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    table.add_column("bits", justify="right")
    table.add_column("off scipy", justify="right")
    for row, result in results.items():
        table.add_row(
            row,
            *(str(result[name]) for name in ("operands_mb", "result_mb", "ms")),
            f"{result['over_bound']:.3f}",
            f"{result['peak']:.0%}",
            str(result["blocks"]),
            "differ" if result["differs"] else "equal",
            f"{result['off_scipy']:.0e}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the comparison with the baseline, and a line RESULT with all as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.sparse_products", description=__doc__)
    parser.add_argument("--rows", default=",".join(CASES))
    chosen = KEEPER.parse(parser, arguments, defaults=("rows",))
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with torchTensorRef.disabled():
        for row in chosen.rows.split(","):
            results[row] = measured(CASES[row])
            Console(stderr=True).print(row, results[row], soft_wrap=True)
    Console(width=WIDTH).print(table_of(results))
    return KEEPER.conclude(figures_of(results), results, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
