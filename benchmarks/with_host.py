"""The figures of `flow_against_floor` with what management takes of the host's own time.

`python -m benchmarks.flow_against_floor --host NAME` prints them: each cell that is asked for once
without (as always) and once with the time of a processor of `HOST_COSTS`, and a model of 7 B
parameters in half precision (32 layers, width 4,096) that decodes on a card behind PCIe 4.0 x16,
by forecast, which a run equals to the nanosecond (`tests/sim/test_forecast.py`). The floor is the
same for both: what the operators and the copies need.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torchTensorRef.devices.registry import spec_of
from torchTensorRef.devices.sim.host_costs import HOST_COSTS
from torchTensorRef.inject import hooks
from torchTensorRef.promises.forecast import Forecast
from torchTensorRef.promises.recording import record_of

from .baseline import EXACT, WIDTH, Figure, Keeper

KEEPER = Keeper("flow_with_host", "python -m benchmarks.flow_against_floor --host epyc", EXACT)
#: The processor that the baseline is of, and the cells it has.
BASELINE_HOST, BASELINE_PROGRAMS = "epyc", "decode"
#: What the 7 B shape is measured under.
CARD, SHAPE = "rtx4090", "llama_7b"
BUDGETS, STRATEGIES = (25, 50, 75, 110), ("genoa", "lru", "flow")
#: Times the floor, with the host's time of the machine that it was set on (issue 21).
BOUNDS = {f"{SHAPE}/50/flow": 1.10}
PROMPT, TOKENS = 128, 6


def seven_b() -> Any:
    """Return the program of the 7 B shape, and the bytes of its weights: no weight is there."""
    import transformers

    hooks.load(".tensor.install")  # it connects the parts: the first TensorRef may be a promise
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def program() -> Iterator[str]:
        with torch.no_grad():
            out = model(torch.ones(1, PROMPT, dtype=torch.int64), use_cache=True)
            for number in range(TOKENS):
                token = out.logits[:, -1:].argmax(-1)
                yield f"token {number + 1}"
                out = model(token, past_key_values=out.past_key_values, use_cache=True)

    return program, sum(p.nbytes for p in model.parameters())


def rows_of_shape(host: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Foretell a steady token of the 7 B shape in each cell, without and with the host's time."""
    program, w_nbytes = seven_b()
    record = record_of(program, values="compute or zeros")
    for budget in BUDGETS:
        for strategy in STRATEGIES:
            without, counted = (
                Forecast(
                    record, spec_of(CARD, by).scaled(capacity=2**40), w_nbytes * budget // 100,
                    strategy,
                )
                for by in (None, host)
            )  # fmt: skip
            step, floor_ns = counted.steady, without.floor_ns(without.steady)[0]
            yield (
                f"{SHAPE}/{budget}/{strategy}",
                {
                    "without": round(without.steady.time_ns / floor_ns, 4),
                    "with_host": round(step.time_ns / floor_ns, 4),
                    "host_share": round(step.host_ns / step.time_ns, 4),
                    "bound_by": counted.bound_by(step),
                },
            )


def rows_of_cells(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the cells that were measured with the host's time, as the rows of the shape are."""
    for program, by_budget in results.items():
        for budget, by_strategy in by_budget.items():
            for strategy, row in by_strategy.items():
                without = row["time_over_floor"]
                yield f"{program}/{budget}/{strategy}", {"without": without, **row["with_host"]}


def conclude(results: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the table and the comparison with the baseline; write that where it is asked for."""
    rows = {**dict(rows_of_shape(options.host)), **dict(rows_of_cells(results))}
    Console(width=WIDTH).print(table_of(rows, options.host))
    if options.write_baseline:
        KEEPER.path.with_suffix(".md").write_text(markdown_of(rows))
    settings = {"host": options.host}
    return KEEPER.conclude(figures_of(rows), rows, settings=settings, writes=options.write_baseline)


def figures_of(rows: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """Return what is compared with the baseline."""
    figures = {}
    for cell, row in rows.items():
        figures[f"{cell}/without"] = Figure(row["without"], "x the floor")
        figures[f"{cell}/with_host"] = Figure(row["with_host"], "x the floor", BOUNDS.get(cell))
    return figures


def table_of(rows: dict[str, dict[str, Any]], host: str) -> Table:
    """One row per cell."""
    table = Table(title=f"virtual time over the floor, without and with the own time of {host}")
    for heading in ("cell", "without", f"with {host}", "management", "bound by"):
        table.add_column(heading, justify="left" if heading in ("cell", "bound by") else "right")
    for cell, row in rows.items():
        times = f"{row['without']:.3f}", f"{row['with_host']:.3f}", f"{row['host_share']:.1%}"
        table.add_row(cell, *times, row["bound_by"])
    return table


def markdown_of(rows: dict[str, dict[str, Any]]) -> str:
    """The table as a page, with the processor it is of."""
    host, measured = BASELINE_HOST, HOST_COSTS[BASELINE_HOST]
    costs = measured.costs
    lines = [
        "# Flow against the floor, with the host's own time",
        "",
        f"Written by `{KEEPER.command} --write-baseline`. The host is `{host}`: {costs.processor};",
        f"operators in {measured.path}; Python {measured.python}, torch {measured.torch},",
        f"{measured.date}. In microseconds: {costs.ready_ns / 1e3:g} for each operator, "
        f"{costs.decided_ns / 1e3:.0f} more for one that is",
        f"decided about, {costs.fetched_ns / 1e3:.0f} for each block fetched, "
        f"{costs.evicted_ns / 1e3:.0f} for each given back.",
        "",
        f"`{SHAPE}` is a model of 7 B parameters on `{CARD}` (PCIe 4.0 x16), a steady token, by",
        "forecast. The other programs are those of `flow_against_floor`. Virtual time: the same on",
        f"every machine. torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| cell | without | with the host | management, of the time | bound by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell} | {row['without']:.3f} | {row['with_host']:.3f} | {row['host_share']:.1%} "
        f"| {row['bound_by']} |"
        for cell, row in rows.items()
    ]
    return "\n".join(lines) + "\n"
