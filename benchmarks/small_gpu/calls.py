"""`make gpu`: the tests on the accelerator, then the benchmark, in calls under nine minutes each.

    python -m benchmarks.small_gpu.calls [--device cuda:0] [--scale full] [--one]

Some rented machines end a command after ten minutes. With `--one`, only the next call is made and
the exit status is 75 until all is done; without it, call after call is made. What is done is kept
in the benchmark's state folder, so that it goes on where it ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from .__main__ import UNFINISHED

#: Of one call; the rest of the nine minutes is for starting and writing.
CALL_MINUTES = 8.5
#: What the tests passed for, in the root.
TESTED = ("torchtensorref", "strategies", "tests/device")
#: More calls than any run needs: then something does not go on.
MOST_CALLS = 40


def tests(folder: Path, device: str) -> int:
    """Run the tests on the accelerator, unless they passed as they are; return the exit status."""
    stamp = folder / "tests.passed"
    changed = max(p.stat().st_mtime for f in TESTED for p in Path(f).rglob("*.py"))
    if stamp.exists() and stamp.stat().st_mtime > changed:
        return 0
    if not Path("tests/device").is_dir():
        print("there are no tests on the device here")
        return 1
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "tests/device"]
    print("==>", *command[1:], flush=True)
    try:
        status = subprocess.run(command, timeout=CALL_MINUTES * 60, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests were stopped after {CALL_MINUTES} minutes")
        return 1
    if status == 0:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(f"{device}\n")
    return status


def benchmark(options: argparse.Namespace, minutes: float) -> int:
    """Make one call of the benchmark; return its exit status."""
    command = [sys.executable, "-m", "benchmarks.small_gpu", "--resume", *_chosen(options)]
    command += ["--minutes", f"{minutes:.2f}", "--write", "benchmarks/results"]
    print("==>", *command[1:], flush=True)
    return subprocess.run(command, check=False).returncode


def _chosen(options: argparse.Namespace) -> list[str]:
    return ["--device", options.device, "--scale", options.scale, "--rounds", str(options.rounds)]


def main(arguments: list[str] | None = None) -> int:
    """Make the next call, or all of them.

    Returns
    -------
    int
        0 when all is done, 75 when there is more to do, else the status of what went wrong.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.small_gpu.calls", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--scale", default="full")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="make only the next call")
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    options = parser.parse_args(arguments)
    folder = Path(".cache/small_gpu") / options.device.replace(":", "_")
    began_s = time.perf_counter()
    failed = 0 if options.no_tests else tests(folder, options.device)
    if failed:
        print("the tests on the device did not pass; the benchmark is run all the same")
    for number in range(1 if options.one else MOST_CALLS):
        used = (time.perf_counter() - began_s) / 60 if number == 0 and options.one else 0.0
        if CALL_MINUTES - used < 1:
            break
        status = benchmark(options, CALL_MINUTES - used)
        if status != UNFINISHED:
            return status or failed
    print("not finished: the same command goes on")
    return UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
