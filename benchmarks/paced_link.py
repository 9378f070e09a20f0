"""Programs over the adapter with a link that takes its time: who waits for whom, without a card.

    python -m benchmarks.paced_link [--program decode_32] [--link-ms 150,75,20] [--share 50]
                                    [--steps 48]

A program of `host_time`, whose kernels cost next to nothing, with matrices that count as large, as
those of 7 B parameters do: it takes longer to copy them than to decide about it
(`Device.decision_nbytes`). The adapter for real accelerators runs over the host; copies are made at
once, and *arrive* when a link of the speed asked for would be through with them: events fire then,
streams wait for each other, and the program that reads a result waits for what it hangs on. So a
step takes what it would on a card whose link needs `--link-ms` for all that does not fit, and
whose host is this one.

Times are those of this machine, and nothing is compared with them: the same command before and
after a change, in turn, is what they are for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torchTensorRef import tensorsManager
from torchTensorRef.devices.accelerator.copies import StreamLane
from torchTensorRef.devices.accelerator.device import AcceleratorDevice

from .host_time import PROGRAMS, Program
from .overhead_of_dispatch import bring, keep_what_is_freed

#: Larger than the caches of keys and values, smaller than any matrix.
DECISION_NBYTES = 3 << 10
#: Steps before anything is measured: the flow is learned, and followed.
LEARNING_STEPS = 96


class Stream:
    """Work in order, which ends when what it waits for has ended."""

    def __init__(self, **_: Any) -> None:
        self.ends_s = 0.0

    def wait_event(self, event: Event) -> None:
        """Let what comes wait for an event."""
        self.ends_s = max(self.ends_s, event.fires_s)


class Event:
    """Fires when a stream is through with what it was given so far."""

    fires_s = 0.0

    def record(self, stream: Stream) -> None:
        """Stand at the end of a stream."""
        self.fires_s = max(stream.ends_s, time.perf_counter())

    def query(self) -> bool:
        """Whether it has fired."""
        return time.perf_counter() >= self.fires_s

    def synchronize(self) -> None:
        """Wait for it."""
        time.sleep(max(0.0, self.fires_s - time.perf_counter()))


def module() -> types.ModuleType:
    """Return what stands for `torch.cuda`: streams and events that keep the time."""
    made: Any = types.ModuleType("paced")
    compute = Stream()
    made.now = compute

    @contextmanager
    def stream(other: Stream) -> Any:
        before, made.now = made.now, other
        try:
            yield
        finally:
            made.now = before

    made.Stream, made.Event, made.stream = Stream, Event, stream
    made.current_stream = lambda *_: made.now
    made.default_stream = lambda *_: compute
    made.synchronize = lambda *_: time.sleep(max(0.0, compute.ends_s - time.perf_counter()))
    return made


class PacedLane(StreamLane):
    """One of the streams that share a link, which copies one thing at a time, whichever way."""

    bytes_per_s = 1e12
    busy_s = 0.0
    _free_s = 0.0

    def issue(self, source: torch.Tensor, destination: torch.Tensor) -> Any:
        """Copy at once; the event fires when a link would have."""
        kind, took_s = type(self), source.numel() / self.bytes_per_s
        begins_s = max(time.perf_counter(), self.stream.ends_s, kind._free_s)
        self.stream.ends_s = kind._free_s = begins_s + took_s
        kind.busy_s += took_s
        return super().issue(source, destination)


def run(program: Program, steps: int, share: float, link_s: float) -> dict[str, float]:
    """Run at a budget of a share of what stays; the link takes so long for what is missing."""
    torch.manual_seed(0)
    nbytes = program.state_factor * sum(p.nbytes for p in program.model.parameters())
    missing_nbytes = max(0.0, 1 - share) * nbytes
    lane = type("Lane", (PacedLane,), {"bytes_per_s": missing_nbytes / link_s if link_s else 1e12})
    device = AcceleratorDevice("cpu", module=module(), new_lane=lane)
    device.name, device.capacity_nbytes = "paced:0", 1 << 40
    device.torch_device, device.has_host_kernels = torch.device("cpu"), True
    device.decision_nbytes = DECISION_NBYTES
    for rate in (device._copier.rate_in, device._copier.rate_out):  # too small to be measured
        rate.bytes_per_s = lane.bytes_per_s  # type: ignore[attr-defined]
    tensorsManager.device = device
    tensorsManager.budget = int(share * nbytes)
    tensorsManager.strategy = "flow"
    with torch.no_grad():
        step = program.start(bring(program.model), bring)
        for _ in range(LEARNING_STEPS):
            step().tolist()
        tensorsManager.reset_stats()
        before_s, own_s, took_s = lane.busy_s, time.thread_time(), []  # type: ignore[attr-defined]
        for _ in range(steps):
            began_s = time.perf_counter()
            step().tolist()
            took_s.append(time.perf_counter() - began_s)
        own_s = time.thread_time() - own_s
    tensorsManager.check()
    stats = tensorsManager.stats()
    moved_nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    return {
        "step_ms": round(statistics.median(took_s) * 1e3, 1),
        "host_ms": round(own_s / steps * 1e3, 1),
        "link_ms": round((lane.busy_s - before_s) / steps * 1e3, 1),  # type: ignore[attr-defined]
        "bytes_over_missing": round(moved_nbytes / steps / missing_nbytes, 3)
        if missing_nbytes
        else 0.0,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run over each link, and print a table and a `RESULT` line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--link-ms", default="150,75,20", help="for all that does not fit, a step")
    parser.add_argument("--share", type=float, default=50, help="the budget, percent of what stays")
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="decode_32")
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_what_is_freed()
    table = Table("link", "a step", "of it the host's own", "the link's", "bytes over missing")
    program = PROGRAMS[options.program]
    fits = run(program(), options.steps, 1.5, 0.0)
    result: dict[str, Any] = {"all fits": fits}
    table.add_row("all fits", f"{fits['step_ms']} ms", f"{fits['host_ms']} ms", "-", "-")
    for text in options.link_ms.split(","):
        found = run(program(), options.steps, options.share / 100, float(text) / 1e3)
        result[text] = found
        host, link = f"{found['host_ms']} ms", f"{found['link_ms']} ms"
        table.add_row(
            f"{text} ms", f"{found['step_ms']} ms", host, link, str(found["bytes_over_missing"])
        )
    Console().print(table)
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
