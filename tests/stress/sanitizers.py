"""Eight threads of operators against an evictor, with the library in C++ under sanitizers.

    python -m tests.stress.sanitizers [--minutes 10] [--kind address|thread|both]

The library is built anew with `-fsanitize=...` and loaded into an ordinary Python, so what is
looked at is our own C++: torch and Python are as they are. Each kind runs in a process of its own,
for the given time; it fails if a sanitizer reports anything, or if a bit is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from torchTensorRef.base import core_build
from torchTensorRef.base.event_sinks import say

#: What the compiler is told, and what the library needs to have been loaded first.
KINDS = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python keeps much to its end.
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "exitcode=66 report_signal_unsafe=0 suppressions="
    + str(Path(__file__).with_name("not_ours.tsan")),
}
THREAD_COUNT = 8


def flags_of(kind: str) -> list[str]:
    """What the compiler is told for a kind."""
    return [f"-fsanitize={kind}", "-fno-omit-frame-pointer", "-g"]


def path_of(compiler: str, library: str) -> str:
    """Where a compiler has a library."""
    asked = [compiler, f"-print-file-name={library}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def run(kind: str, minutes: float) -> bool:
    """Run a process with one sanitizer; whether nothing was found."""
    core_build.FLAGS = flags_of(kind)
    complaint = core_build.build(core_build.of_this_process())
    if complaint:
        say(f"{kind}: {complaint}")
        return False
    compiler = os.environ.get("CXX", "c++")
    # With the C++ runtime: what throws is looked up when the sanitizer begins.
    preload = " ".join(path_of(compiler, name) for name in (KINDS[kind], "libstdc++.so"))
    environ = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "TTR_CORE": "c++"}
    command = [sys.executable, "-m", "tests.stress.sanitizers", "--worker", kind]
    done = subprocess.run(
        [*command, "--minutes", str(minutes)], env=environ, capture_output=True, text=True
    )
    found = done.stderr.count("WARNING: ThreadSanitizer") + done.stderr.count("ERROR: Address")
    say(f"{kind}: {found} reports, exit status {done.returncode}. {done.stdout.strip()}")
    if done.returncode:
        say(done.stderr[-8000:])
    return done.returncode == 0


def work(kind: str, minutes: float) -> int:
    """Compute in threads while another one evicts; 1 if a bit was wrong."""
    core_build.FLAGS = flags_of(kind)
    import torch

    import torchTensorRef
    from torchTensorRef import tensorsManager
    from torchTensorRef.memory import core

    from ..conformance.operators import adapter

    assert core.library is not None, core.why
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * minutes
    wrong: list[tuple[int, int]] = []
    counts = [0] * THREAD_COUNT
    with torchTensorRef.disabled():
        tensorsManager.device = adapter()
        tensorsManager.budget = "1MiB"
        tensorsManager.strategy = "lru"
        plain = [torch.rand(32, 32) for _ in range(6)]
        refs = [tensorsManager.adopt(x.clone(), sole=True).toGPU() for x in plain]

    def compute(number: int) -> None:
        with torchTensorRef.disabled(), torch.no_grad():
            while time.monotonic() < until:
                i = counts[number]
                j, k = (i + number) % 6, (i * number) % 6
                got = (refs[j] @ refs[k]).relu_()[1:].sum(0).add_(1)
                expected = (plain[j] @ plain[k]).relu()[1:].sum(0).add_(1)
                if got.tolist() != expected.tolist():
                    wrong.append((number, i))
                counts[number] += 1

    def evict() -> None:
        while time.monotonic() < until:
            tensorsManager.bring_all_home()

    threads = [threading.Thread(target=compute, args=(n,)) for n in range(THREAD_COUNT)]
    threads.append(threading.Thread(target=evict))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensorsManager.check()
    evict_count = tensorsManager.stats()["evict_count"]
    sys.stdout.write(f"{sum(counts)} rounds, {evict_count} evictions, {len(wrong)} wrong")
    return 1 if wrong else 0


def main() -> int:
    """Run the command; 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="of each kind (%(default)s)")
    parser.add_argument("--kind", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return work(chosen.worker, chosen.minutes)
    kinds = KINDS if chosen.kind == "both" else (chosen.kind,)
    are_clean = [run(kind, chosen.minutes) for kind in kinds]  # both, whatever the first has found
    return 0 if all(are_clean) else 1


if __name__ == "__main__":
    sys.exit(main())
