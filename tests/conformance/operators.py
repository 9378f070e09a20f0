"""Compare every operator of torch's own database with plain torch; `make conformance` runs all.

Operators are handed one by one to worker processes, so that one that takes the interpreter down
costs itself only. What is done is kept in a file; `--resume` goes on where a run was broken off.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torchTensorRef.base.errors import nearest

from .known_differences import KNOWN, KNOWN_ANYWHERE

ROOT = Path(__file__).parents[2]
DONE = ROOT / ".cache" / "conformance.jsonl"
PAGE = ROOT / "docs" / "conformance.md"

#: Enough for what most operators need at once, so that some have to go down the ladder.
BUDGET_NBYTES = 1 << 20
#: A worker that says nothing for so long hangs in an operator.
PATIENCE_S = 900

#: What one operator gave: counts by variant, and the failures.
Result = dict[str, Any]


# -- one worker ---------------------------------------------------------------------------------


class Bench:
    """The manager on a small device, under strategies that are shaken.

    The adapter for real accelerators, over the host, is not told of operators: what is ready there
    runs in C++ without Python, where that path is on.
    """

    def __init__(self, device: str) -> None:
        import torch

        import torchTensorRef.tensor.install  # noqa: F401 (connects the parts)
        from torchTensorRef import tensorsManager
        from torchTensorRef.strategy.choice import make_strategy

        from ..support.operator_cases import operators
        from ..support.shaking import Shaken

        is_sim = device == "sim"
        torch.set_num_threads(1)
        names = ("genoa" if is_sim else "lru", "flow")
        self.strategies = [Shaken(make_strategy(name)) for name in names]
        self.manager = tensorsManager
        self.operators = operators()
        tensorsManager.device = simulated() if is_sim else adapter()
        tensorsManager.budget = BUDGET_NBYTES

    def run(self, name: str, samples: int | None) -> Result:
        """Compare one operator; its dtypes take turns under the strategies."""
        from ..support.operator_cases import DTYPES, Outcome, run_operator, turn_of

        total = Outcome()
        for number, dtype in enumerate(DTYPES):
            self.manager.strategy = self.strategies[(number + turn_of(name)) % 2]
            total.add(run_operator(self.operators[name], dtype, samples=samples))
        try:
            self.manager.check()
        except Exception as error:
            total.failures.append(("books", "-", str(error)[:400]))
        return {
            "operator": name,
            "passed": dict(total.passed),
            "refused": dict(total.refused),
            "failures": total.failures,
        }


def simulated() -> Any:
    """Make the simulated device."""
    from torchTensorRef.devices.sim.device import SimDevice
    from torchTensorRef.devices.sim.spec import DeviceSpec

    spec = DeviceSpec(name="bench", capacity_nbytes=BUDGET_NBYTES)
    return SimDevice(spec, poison=True, name="sim:bench")


def adapter() -> Any:
    """Make the adapter for real accelerators, over the host."""
    from ..support.over_host import adapters

    return adapters(1, 2 * BUDGET_NBYTES)[0]


def work(samples: int | None, device: str, blocks: str | None) -> None:
    """Read names of operators from standard input; write a line of JSON for each."""
    import torchTensorRef

    from ..support.forced_blocks import forced_blocks
    from ..support.operator_cases import turn_of

    with torchTensorRef.disabled():
        bench = Bench(device)
        for line in sys.stdin:
            name = line.strip()
            forced: AbstractContextManager[Any] = nullcontext()
            if blocks:
                forced = forced_blocks(turn_of(name), keep_bits=blocks == "exact")
            with forced:
                result = bench.run(name, samples)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


# -- all workers --------------------------------------------------------------------------------


class Worker:
    """A process that compares operators, started anew when an operator has taken it down."""

    def __init__(self, options: Any) -> None:
        self._arguments = ["--worker", "--device", options.device]
        if options.blocks:
            self._arguments += ["--blocks", options.blocks]
        if options.samples:
            self._arguments += ["--samples", str(options.samples)]
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str) -> Result:
        """Compare one operator; a crash or a hang is a failure of that operator."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(PATIENCE_S, process.kill)
        watch.start()
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line:
            result: Result = json.loads(line)
            return result
        self._process = None
        failure = ("crash", "-", f"the process ended with {process.wait()}")
        return {"operator": name, "passed": {}, "refused": {}, "failures": [failure]}

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __spec__.name, *self._arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self._process

    def stop(self) -> None:
        """Let the process end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def all_results(names: list[str], options: Any) -> Iterator[Result]:
    """Compare operators in several processes; results come in the order in which they are there."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
    for name in names:
        todo.put(name)

    def serve() -> None:
        worker = Worker(options)
        try:
            while True:
                done.put(worker.run(todo.get_nowait()))
        except queue.Empty:
            worker.stop()
        finally:
            done.put(None)

    for _ in range(options.processes):
        threading.Thread(target=serve, daemon=True).start()
    running = options.processes
    while running:
        result = done.get()
        if result is None:
            running -= 1
        else:
            yield result


def known_results(resume: bool) -> list[Result]:
    """What an earlier run has left, if it shall be gone on with."""
    if not resume or not DONE.exists():
        return []
    return [json.loads(line) for line in DONE.read_text().splitlines()]


def run(names: list[str], options: Any) -> list[Result]:
    """Compare the named operators, with a progress bar, keeping each result."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    results = [r for r in known_results(options.resume) if r["operator"] in names]
    left = [name for name in names if name not in {r["operator"] for r in results}]
    DONE.parent.mkdir(exist_ok=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with DONE.open("a" if options.resume else "w") as file, Progress(*columns) as progress:
        task = progress.add_task("operators", total=len(names), completed=len(results))
        for result in all_results(left, options):
            file.write(json.dumps(result) + "\n")
            file.flush()
            results.append(result)
            progress.update(task, advance=1)
            for variant, dtype, text in result["failures"][:3]:
                progress.console.print(
                    f"{result['operator']} {variant} {dtype}: {text}", markup=False
                )
    return results


# -- the report ---------------------------------------------------------------------------------

HEAD = """\
# Conformance

Made by `make conformance`; do not edit. Every operator of torch's own test database, all of its
sample inputs, seven dtypes: float32, float64, bfloat16, float16, int64, bool, complex64. Each call
is made on plain tensors and on ours, on a simulated accelerator of 1 MiB with poisoned memory,
under the strategies `genoa` and `flow` in turn, with random evictions after every operator. The two
are compared in everything that can be seen: values to the bit, gradients to the bit, shape, dtype,
strides, device label, `requires_grad`, version counters, what is the same object and what shares
memory with what. Where plain torch refuses a call, we have to raise the same type of exception.
*Ready* operands are results that lie on the accelerator already, where nothing has to be decided;
half of those in *inference* mode are.

Four things are left out, because plain torch does not agree with itself there: the values of
memory that nobody has written (`empty` and its like), some calls with operands of another layout
with which its own kernels read what is not theirs, the last bits of `linalg.lstsq` by LAPACK's
`gelsy`, which orders columns by numbers that nobody has written, and what four operators make of
normal tensors in inference mode.

"""


def page(results: list[Result]) -> str:
    """Return `docs/conformance.md`."""
    import torch

    passed, refused, failed = totals(results)
    lines = [
        HEAD,
        f"torch {torch.__version__}, {len(results)} operators: {passed.total():,} calls alike,",
        f"{refused.total():,} that plain torch refuses and we refuse alike,",
        f"{failed.total():,} different.\n",
        "| call | alike | refused alike | different |",
        "|---|--:|--:|--:|",
    ]
    for variant in sorted({*passed, *refused, *failed}):
        counts = (passed[variant], refused[variant], failed[variant])
        lines.append(f"| {variant} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    lines += ["\n## Operators that differ\n"]
    different = sorted(r["operator"] for r in results if r["failures"])
    if not different:
        lines.append("None.")
    for name in different:
        lines.append(f"* `{name}`: {KNOWN.get(name, 'not explained yet')}")
    return "\n".join(lines) + "\n"


def totals(results: list[Result]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Add up what passed, was refused alike and failed, by variant."""
    passed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for result in results:
        passed.update(result["passed"])
        refused.update(result["refused"])
        failed.update(variant for variant, _, _ in result["failures"])
    return passed, refused, failed


def options_of(arguments: list[str] | None) -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of operators, with commas between them")
    parser.add_argument("--samples", type=int, help="of each operator and dtype; default all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on with a run broken off")
    parser.add_argument("--device", choices=("sim", "adapter"), default="sim")
    parser.add_argument(
        "--blocks",
        choices=("exact", "anywhere"),
        help="force what can be cut into blocks of random sizes: those that keep every bit, or any",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 unless an operator differs that nobody has explained."""
    options = options_of(arguments)
    if options.worker:
        work(options.samples, options.device, options.blocks)
        return 0
    known = operator_names()
    names = options.only.split(",") if options.only else known
    for name in names:
        if name not in known:
            close = nearest(name, known)
            meant = f" Did you mean {close!r}?" if close else ""
            sys.stderr.write(f"There is no operator {name!r}.{meant}\n")
            return 2
    sys.stdout.write(
        f"{len(names)} operators, {options.processes} processes, {platform.machine()}\n"
    )
    results = run(names, options)
    is_plain = options.device == "sim" and options.blocks is None
    if not options.only and options.samples is None and is_plain:
        PAGE.write_text(page(results))
    passed, refused, failed = totals(results)
    summary = {
        "passed": passed.total(),
        "failed": failed.total(),
        "skipped": refused.total(),
        "operators": len(results),
    }
    sys.stdout.write("RESULT " + json.dumps(summary) + "\n")
    known = {**KNOWN, **KNOWN_ANYWHERE} if options.blocks == "anywhere" else KNOWN
    unexplained = [r["operator"] for r in results if r["failures"] and r["operator"] not in known]
    return 1 if unexplained else 0


def operator_names() -> list[str]:
    """Return the names of all operators, in an order in which the long ones do not come last."""
    import torchTensorRef

    with torchTensorRef.disabled():
        from ..support.operator_cases import operators

        return list(operators())


if __name__ == "__main__":
    sys.exit(main())
