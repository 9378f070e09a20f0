"""What importing us costs: alone, and on top of `import torch`.

    python -m benchmarks.cost_of_import [--processes 10] [--write-baseline]

Each figure is a median over fresh processes, the kinds of which take turns, so that a machine that
slows down slows all. What is measured is the processor time of the import statements: Python's
start is not in it, nor what other processes took. (Wall time of `import torch` varies by more than
all that we add.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import Progress

from .baseline import Figure, Keeper, Tolerance

#: Each prints the milliseconds that its imports took.
TIMED = """
import sys, time
start_ns = time.process_time_ns()
{imports}
print((time.process_time_ns() - start_ns) / 1e6, "torch" in sys.modules)
"""
PROGRAMS = {
    "alone": "import torchTensorRef",
    "torch": "import torch",
    "both": "import torchTensorRef, torch",
    "first_tensor": "import torchTensorRef, torch; torch.zeros(1)",
    "first_plain_tensor": "import torch; torch.zeros(1)",
}
#: DESIGN.md, 10.
BOUND_MS = 50
#: What is added to torch is the difference of two times, each of more than a second.
KEEPER = Keeper(
    "cost_of_import",
    "python -m benchmarks.cost_of_import",
    Tolerance(share=0.2, amount=10),
)


def measure(imports: str) -> tuple[float, bool]:
    """Milliseconds of some imports in a fresh process, and whether torch was loaded by them."""
    command = [sys.executable, "-c", TIMED.format(imports=imports)]
    chosen = {**os.environ, "TTR_DEVICE": "sim"}
    done = subprocess.run(command, env=chosen, stdout=subprocess.PIPE, text=True, check=True)
    took_ms, has_torch = done.stdout.split()
    return float(took_ms), has_torch == "True"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=10, help="of each kind (%(default)s)")
    chosen = KEEPER.parse(parser, None, defaults=["processes"])
    taken, imports_torch = measured(chosen.processes)
    median = {name: statistics.median(times) for name, times in taken.items()}
    print("milliseconds, all of them:")
    for name, figure in median.items():
        print(f"  {name:20} {figure:8.1f}   ({min(taken[name]):.1f} to {max(taken[name]):.1f})")
    first_plain_ms = median["first_plain_tensor"] - median["torch"]
    result = {
        "import_alone_ms": round(median["alone"], 1),
        "added_to_torch_ms": round(median["both"] - median["torch"], 1),
        "added_to_first_tensor_ms": round(
            median["first_tensor"] - median["both"] - first_plain_ms, 1
        ),
        "imports_torch": imports_torch,
    }
    figures = {
        "import_alone": Figure(result["import_alone_ms"], "ms", BOUND_MS),
        "added_to_torch": Figure(result["added_to_torch_ms"], "ms", BOUND_MS),
        "added_to_first_tensor": Figure(result["added_to_first_tensor_ms"], "ms"),
        "imports_torch": Figure(imports_torch, "yes or no", False),
    }
    result |= {"bound_ms": BOUND_MS, "processes": chosen.processes}
    return KEEPER.conclude(figures, result, settings={}, writes=chosen.write_baseline)


def measured(processes: int) -> tuple[dict[str, list[float]], bool]:
    """Measure each program in so many processes; say also whether importing us imports torch."""
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    imports_torch = False
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("warm-up", total=(processes + 1) * len(PROGRAMS))
        for imports in PROGRAMS.values():
            measure(imports)  # byte code and the disk's cache
            progress.advance(task)
        for number in range(processes):
            progress.update(task, description=f"round {number + 1}")
            for name, imports in PROGRAMS.items():
                took_ms, has_torch = measure(imports)
                taken[name].append(took_ms)
                imports_torch |= name == "alone" and has_torch
                progress.advance(task)
    return taken, imports_torch


if __name__ == "__main__":
    sys.exit(main())
