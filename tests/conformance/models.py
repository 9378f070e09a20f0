"""Run models unmodified, with plain torch and with us, and write down whether they are the same.

`python -m tests.conformance.models [NAME ...]` from the root; `make compatibility` runs all of them
and writes docs/compatibility.md; with `--device adapter` they run on the adapter for real
accelerators, over the host, where ready operators in C++ run without Python. Each model is made and used twice: inside `disabled()`, where
torch is plain, and with what it makes injected, under a budget of a quarter of its weights on a
simulated accelerator of that size.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import torchTensorRef
from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from ..matrix import page as matrix
from ..support.differential import copied, differences
from ..support.over_host import adapters
from .zoo.cases import Case, observed, parts_of, seed, weights_nbytes

STRATEGIES = ("flow", "lru")
#: The budget, as a share of the weights.
SHARE = 4
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@dataclass
class Outcome:
    """What came of one model: which runs were the same, and what became of the others."""

    case: Case
    weights_nbytes: int = 0
    seconds: float = 0.0
    #: Runs that plain torch refuses, too, and how.
    refused: dict[str, str] = field(default_factory=dict)
    #: Run and strategy to what went wrong.
    failures: dict[str, str] = field(default_factory=dict)
    #: Operators on the accelerator and in all, under the first strategy.
    accelerated_count: int = 0
    op_count: int = 0

    @property
    def identical(self) -> bool:
        """Everything that was run gave the bits of plain torch."""
        return not self.failures


def runs_of(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Make the model, then use it in every way: each as a name and a function of nothing."""
    models = []

    def make() -> Any:
        models.append(case.make())
        return [list(part.state_dict().values()) for part in parts_of(models[0])]

    yield "made", make
    for name, run in case.runs.items():
        yield name, functools.partial(_run, run, models)
    SIZES[case.name] = weights_nbytes(models[0])


def _run(run: Any, models: list[Any]) -> Any:
    return run(models[0])


#: Bytes of the weights by name of the model, known once it has been made.
SIZES: dict[str, int] = {}


def plain_results(case: Case) -> dict[str, Any]:
    """What plain torch gives: values to compare, or the exception."""
    found: dict[str, Any] = {}
    with torchTensorRef.disabled():
        for name, run in runs_of(case):
            seed(len(found))
            try:
                found[name] = [_kept(x) for x in observed(run())]
            except Exception as error:
                if name == "made":
                    raise
                found[name] = error
    return found


def _kept(value: Any) -> Any:
    """A copy with the same strides: a later run may write what an earlier one gave."""
    return copied(value)


def simulated(budget_nbytes: int) -> Any:
    """An accelerator of so many bytes, whose memory is spoilt when it is given up."""
    spec = DeviceSpec(name="compat", capacity_nbytes=budget_nbytes)
    return SimDevice(spec, poison=True, name="sim:compat")


def adapter(budget_nbytes: int) -> Any:
    """The adapter for real accelerators, over the host."""
    return adapters(1, budget_nbytes)[0]


ACCELERATORS: dict[str, Callable[[int], Any]] = {"sim": simulated, "adapter": adapter}


def compare(
    case: Case,
    *,
    strategies: Iterable[str] = STRATEGIES,
    trace: bool = False,
    accelerator: Callable[[int], Any] = simulated,
) -> Outcome:
    """Run a model with plain torch and with us, under each strategy.

    Parameters
    ----------
    accelerator : callable
        Makes what it runs on, for a budget in bytes.
    """
    outcome = Outcome(case)
    begin = time.perf_counter()
    if case.missing:
        return outcome
    plain = plain_results(case)
    outcome.weights_nbytes = SIZES[case.name]
    outcome.refused = {
        name: f"{type(error).__name__}: {error}"[:160]
        for name, error in plain.items()
        if isinstance(error, Exception)
    }
    for strategy in strategies:
        _place(strategy, accelerator, max(outcome.weights_nbytes // SHARE, 1))
        _compare_under(strategy, case, plain, outcome, trace=trace)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _place(strategy: str, accelerator: Callable[[int], Any], budget_nbytes: int) -> None:
    tensorsManager.device = accelerator(budget_nbytes)
    tensorsManager.budget = budget_nbytes
    tensorsManager.strategy = strategy
    tensorsManager.reset_stats()


def _compare_under(
    strategy: str, case: Case, plain: dict[str, Any], outcome: Outcome, *, trace: bool
) -> None:
    for number, (name, run) in enumerate(runs_of(case)):
        where = f"{name}, {strategy}"
        try:
            seed(number)
            found = _difference(plain[name], run)
            tensorsManager.check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:400]
            if trace:
                traceback.print_exc()
        if found:
            outcome.failures[where] = found
            if name == "made":
                break
    _count(outcome)
    del run
    gc.collect()
    tensorsManager.bring_all_home()


def _difference(plain: Any, run: Callable[[], Any]) -> str:
    if isinstance(plain, Exception):
        try:
            run()
        except Exception as error:
            same = type(error) is type(plain)
            return "" if same else f"{type(plain).__name__} became {type(error).__name__}: {error}"
        return f"nothing was raised instead of {type(plain).__name__}: {plain}"
    return "; ".join(differences(plain, observed(run()))[:4])


def _count(outcome: Outcome) -> None:
    stats = tensorsManager.stats()
    peak_nbytes, budget_nbytes = stats["peak_resident_nbytes"], stats["budget_nbytes"]
    if peak_nbytes > budget_nbytes:
        outcome.failures["budget"] = f"{peak_nbytes} bytes were resident, {budget_nbytes} budgeted"
    if not outcome.op_count:
        outcome.op_count = stats["slow_op_count"]
        outcome.accelerated_count = stats["slow_op_count"] - stats["host_op_count"]
        outcome.accelerated_count -= stats["host_fallback_count"]


# -- which ones ------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """Every model of the zoo."""
    from .zoo import CASES

    return list(CASES)


def chosen(names: Iterable[str]) -> list[Case]:
    """The models whose name or family contains one of `names`; all for none."""
    names = [name.lower() for name in names]
    return [
        case
        for case in all_cases()
        if not names or any(n in case.name.lower() or n in case.family.lower() for n in names)
    ]


def quiet() -> None:
    """Keep other libraries' advice out of the output, and the two cores for one thing at a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


# -- what is shown ---------------------------------------------------------------------------------


def with_progress(cases: list[Case], work: Callable[[Case], Outcome]) -> list[Outcome]:
    """Do the work for each case and say on the terminal how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    done = []
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            outcome = work(case)
            if not progress.console.is_terminal:
                progress.console.print(f"{case.name}: {outcome.seconds:.1f} s", markup=False)
            for where, what in outcome.refused.items():
                progress.console.print(f"  refused: {case.name}, {where}: {what}", markup=False)
            for where, what in outcome.failures.items():
                progress.console.print(f"{case.name}, {where}: {what}", markup=False)
            done.append(outcome)
            progress.advance(task)
    return done


def page(outcomes: list[Outcome]) -> str:
    """The table of docs/compatibility.md."""
    import importlib.metadata as metadata

    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("torch", "transformers", "diffusers", "peft", "sentence-transformers")
    )
    tried = [outcome for outcome in outcomes if not outcome.case.missing]
    lines = [
        "# Compatibility",
        "",
        "<!-- Written by `make compatibility`; edit tests/conformance/models.py instead. -->",
        "",
        f"{sum(o.identical for o in tried)} of {len(tried)} models give the bits of plain torch. "
        "Each is made from a tiny config with seeded weights while torchTensorRef is installed, and used",
        "unmodified under a budget of a quarter of its weights, on a simulated accelerator of that",
        "size with poisoned memory, under the strategies `flow` and `lru`. Compared are its weights,",
        "every output of every run, caches among them, and all gradients.",
        "",
        "The last column is the share of operators that ran on the accelerator. On the host run",
        "those that draw random numbers with the label cpu, that need more than the whole budget, or",
        "that read a few rows of a table which is at home. Caches that offload ask for CUDA streams;",
        "where torch has none, streams that do nothing stand in for them, for plain torch too.",
        "",
        f"Made with {versions}.",
        "",
        *matrix.section(matrix.known()).splitlines(),
        "",
        "## Models",
        "",
        "| model | family | weights | runs | identical | on the accelerator |",
        "|---|---|---:|---|---|---:|",
    ]
    for outcome in outcomes:
        case = outcome.case
        runs = "; ".join(["made", *case.runs])
        verdict = case.missing or ("yes" if outcome.identical else "no")
        share = 100 * outcome.accelerated_count / max(outcome.op_count, 1)
        lines.append(
            f"| {case.name} | {case.family} | {outcome.weights_nbytes / 1024:,.0f} KiB | {runs} | "
            f"{verdict} | {share:.0f} % |"
        )
    failed = [outcome for outcome in tried if not outcome.identical]
    if failed:
        lines += ["", "## Not identical", ""]
        lines += [
            f"* {o.case.name}, {where}: {what}"
            for o in failed
            for where, what in o.failures.items()
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what was asked for; all of it also writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names or families; all without")
    parser.add_argument("--trace", action="store_true", help="print where an exception came from")
    parser.add_argument("--strategy", action="append", help="only under this strategy")
    parser.add_argument("--device", choices=tuple(ACCELERATORS), default="sim")
    options = parser.parse_args()
    quiet()
    cases, accelerator = chosen(options.names), ACCELERATORS[options.device]
    strategies = options.strategy or STRATEGIES

    def work(case: Case) -> Outcome:
        try:
            return compare(
                case, strategies=strategies, trace=options.trace, accelerator=accelerator
            )
        except Exception as error:  # plain torch does not run it: a mistake in the zoo
            if options.trace:
                traceback.print_exc()
            return Outcome(case, failures={"plain torch": f"{type(error).__name__}: {error}"[:400]})

    outcomes = with_progress(cases, work)
    if not options.names and options.device == "sim":
        PAGE.write_text(page(outcomes))
    tried = [outcome for outcome in outcomes if not outcome.case.missing]
    identical = sum(outcome.identical for outcome in tried)
    result = {
        "models_identical": identical,
        "models": len(tried),
    }
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return int(identical != len(tried))


if __name__ == "__main__":
    raise SystemExit(main())
