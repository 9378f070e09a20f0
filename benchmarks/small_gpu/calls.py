"""`make gpu`: the tests on the accelerator, then the benchmark, in calls under nine minutes each.

    python -m benchmarks.small_gpu.calls [--device cuda:0] [--scale full] [--state FILE.tar.gz]
    python -m benchmarks.small_gpu.calls --one            # the next nine minutes
    python -m benchmarks.small_gpu.calls --call decode    # one by its name

Some rented machines end a command after ten minutes, and begin bare. The calls are in the order of
what is worth most, should the machine go back early. With `--one`, what fits into nine minutes is
run and the exit status is 75 until all is done; without it, call after call is made. What is done
is kept in the benchmark's state, so that it goes on where it ended; with `--state FILE` that is one
file, to be carried from one machine to the next.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from . import archive
from .__main__ import UNFINISHED

#: Of one call; the rest of the nine minutes is for starting and writing.
CALL_MINUTES = 8.5
#: What the tests passed for, in the root.
TESTED = ("torchtensorref", "strategies", "tests/device")
#: More calls than any run needs: then something does not go on.
MOST_CALLS = 40


class Call(NamedTuple):
    """One command of under nine minutes."""

    name: str
    #: What `--only` leaves of the benchmark; None for the tests, "" for all that is left.
    only: str | None


EVERYONE = "flow,plain,accelerate,diffusers,flextensor"
CALLS = (
    Call("tests", None),  # the audit of all operators is one of them
    Call("decode", f"decode1,50,{EVERYONE}"),
    Call("prefill", f"prefill,50,{EVERYONE}"),
    Call("diffusion", f"diffusion,50,{EVERYONE}"),
    Call("caps", "decode1,prefill,25,75,110,flow,plain"),
    Call("training", "training,50,flow,plain,accelerate"),
    Call("rest", ""),
)


def digest() -> str:
    """Name what is tested, by its text: a carried tree has other times."""
    found = hashlib.sha256()
    for path in sorted(p for folder in TESTED for p in Path(folder).rglob("*.py")):
        found.update(str(path).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def tests(folder: Path, device: str) -> int:
    """Run the tests on the accelerator, unless they passed as they are; return the exit status."""
    stamp, now = folder / "run" / "tests.passed", f"{device} {digest()}\n"
    if stamp.exists() and stamp.read_text() == now:
        return 0
    if not Path("tests/device").is_dir():
        print("there are no tests on the device here")
        return 1
    # A newer torch or Python warns of other things: nothing that is to end a run there.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "device"]
    command += ["-p", "no:cacheprovider", "tests/device"]
    print("==>", *command[1:], flush=True)
    try:
        status = subprocess.run(command, timeout=CALL_MINUTES * 60, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests were stopped after {CALL_MINUTES} minutes")
        return 1
    if status == 0:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(now)
    return status


def benchmark(options: argparse.Namespace, only: str, minutes: float) -> int:
    """Make one call of the benchmark; return its exit status."""
    command = [sys.executable, "-m", "benchmarks.small_gpu", "--resume", *_chosen(options)]
    command += ["--only", only] if only else []
    command += ["--minutes", f"{minutes:.2f}", "--write", "benchmarks/results"]
    print("==>", *command[1:], flush=True)
    return subprocess.run(command, check=False).returncode


def _chosen(options: argparse.Namespace) -> list[str]:
    chosen = ["--device", options.device, "--scale", options.scale, "--rounds", str(options.rounds)]
    return chosen + (["--state", str(options.state)] if options.state else [])


class Calls:
    """The calls of one command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        name = f"{options.device.replace(':', '_')}_{options.scale}"
        is_folder = options.state is not None and not archive.is_archive(options.state)
        self.folder = options.state if is_folder else Path(".cache/small_gpu") / name
        self.archive = None if is_folder else options.state
        self.tests_status = 0

    def make(self, call: Call, minutes: float) -> int:
        """Make one; return its status."""
        if call.only is None:
            if self.archive is not None:
                archive.unpack(self.archive, self.folder)
            self.tests_status = tests(self.folder, self.options.device)
            if self.archive is not None and self.tests_status == 0:
                archive.pack(self.archive, self.folder)
            if self.tests_status:
                print("the tests on the device did not pass; the benchmark is run all the same")
            return 0
        return benchmark(self.options, call.only, minutes)

    def next_minutes(self, calls: list[Call]) -> int:
        """Make calls for as long as nine minutes last; those that are done come off the list."""
        began_s = time.perf_counter()
        while calls:
            left = CALL_MINUTES - (time.perf_counter() - began_s) / 60
            if left < 1:
                return UNFINISHED
            status = self.make(calls[0], left)
            if status:
                return status
            calls.pop(0)
        return 0


def main(arguments: list[str] | None = None) -> int:
    """Make the next calls, all of them, or one that was named.

    Returns
    -------
    int
        0 when all is done, 75 when there is more to do, else the status of what went wrong.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.small_gpu.calls", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--scale", default="full")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--state", type=Path, help="a folder, or one file NAME.tar.gz")
    parser.add_argument("--one", action="store_true", help="only what fits into nine minutes")
    parser.add_argument("--call", choices=[call.name for call in CALLS], help="only this one")
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    options = parser.parse_args(arguments)
    made = Calls(options)
    left = [
        call
        for call in CALLS
        if options.call in (None, call.name) and not (options.no_tests and call.only is None)
    ]
    for _ in range(1 if options.one or options.call else MOST_CALLS):
        status = made.next_minutes(left)
        if status != UNFINISHED:
            return status or made.tests_status
    print("not finished: the same command goes on")
    return UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
