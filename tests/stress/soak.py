"""Random programs on many threads for a long time, while everything that can be set is changed.

`python -m tests.stress.soak [--minutes 30] [--seed 0] [--no-interrupts] [--device KIND]`
from the root, on two of a kind: `sim`, `adapter` or `late`; or on a real one, such as `cuda`. Every
program's result is compared with plain torch to the bit. The main thread runs programs, too, and
SIGINTs come at random moments. After each round of a few seconds all must be as it was: no block,
replica, event, byte on the device, file handle or thread more, and memory bounded. A simulated
device is told of every operator; on the adapter for real accelerators, over the host, ready
operators run in C++ without Python; on `late` its copies happen as late as they may. On a real one
the programs are those of `whole_numbers.py`, else those of `programs.py`.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import gc
import json
import os
import random
import reprlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import torchTensorRef
from torchTensorRef import tensorsManager
from torchTensorRef.devices import registry
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory.block import Block
from torchTensorRef.memory.ref import is_ref
from torchTensorRef.middlewares import Middleware, NanGuard, Pin

from ..support.device_double import LateDevice, LateModule
from ..support.differential import differences
from ..support.over_host import adapters
from ..support.programs import Scatter
from ..support.workspaces import give_up_workspaces
from . import whole_numbers
from .drawing import FOLDER
from .programs import PROGRAMS

CAPACITY_NBYTES = 1 << 20
#: Of a real accelerator: its kernels take tens of MiB in passing.
REAL_CAPACITY_NBYTES = 1 << 29
#: Of the capacity.
BUDGETS = (1 / 128, 1 / 40, 1 / 10, 1 / 3, 1.0)
STRATEGIES = ("flow", "lru", "genoa", "venice", Scatter)
#: What is done while programs run, and how often.
CHANGES = (
    *("budget", "budget", "strategy", "device", "switch"),
    *("fault", "check", "report", "home", "placement", "middleware"),
)
#: Where operators may run, where the strategy says.
PLACEMENTS = ("accelerator", "hybrid")
#: What looks on, and holds what it sees.
MIDDLEWARES: tuple[Callable[[], Middleware], ...] = (NanGuard, partial(Pin, "*"))
#: Of what a real accelerator holds: the last copies keep what they copied until the next ones.
LAST_COPIES_NBYTES = 1 << 20
#: How soon Python lets another thread run; 5 ms is its own.
SWITCH_INTERVALS_S = (1e-5, 1e-4, 5e-3)
THREADS = 4
ROUND_S = 10.0
#: A round that takes so much longer than it should is stuck.
PATIENCE_S = 120.0
#: What the memory of the process may grow by after the first rounds: caches fill, heaps fragment;
GROWTH_NBYTES = 96 << 20
#: with a real accelerator what recurs is page-locked besides, as much as a budget or two.
REAL_GROWTH_NBYTES = 1 << 30
WARM_UP_ROUNDS = 2
#: What is still there after so many looks, a second apart, is a leak.
LOOKS = 10
#: Kinds of objects that must not pile up.
COUNTED = ("Block", "Replica", "TensorRef", "Exposure", "SimEvent", "UntypedStorage")

# -- one round ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What has happened so far."""

    programs: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    operators: int = 0
    fetched_nbytes: int = 0
    evictions: int = 0
    interrupts: int = 0
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def work(number: int, until: float, tally: Tally) -> None:
    """Run random programs until it is time, each with plain torch and with us."""
    torch.set_num_threads(1)  # each thread has its own number of helpers
    chance = random.Random(number)
    while time.perf_counter() < until and not tally.wrong:
        program, seed = chance.choice(programs), chance.getrandbits(32)
        with torchTensorRef.disabled():
            plain = program(torch.Generator().manual_seed(seed))
        try:
            found = differences(plain, program(torch.Generator().manual_seed(seed)))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
            sys.excepthook(type(error), error, error.__traceback__)
        tally.programs[program.__name__] += 1
        if found:
            settings = f"{tensorsManager.strategy.name}, {tensorsManager.budget} bytes"
            tally.wrong.append(
                f"{program.__name__} with seed {seed}, then {settings}: {'; '.join(found[:3])}; "
                f"{again(program, seed, plain)}"
            )


def again(program: Callable[[torch.Generator], Any], seed: int, plain: Any) -> str:
    """Whether plain torch agrees with itself, and whether we are right the second time."""
    with torchTensorRef.disabled():
        steady = not differences(plain, program(torch.Generator().manual_seed(seed)))
    right = not differences(plain, program(torch.Generator().manual_seed(seed)))
    return f"plain torch twice the same: {steady}, we the second time: {right}"


def unsettle(chance: random.Random, tally: Tally) -> None:
    """Change something, or ask for something, while programs run."""
    device: Any = chance.choice(tensorsManager.residency.books.accelerators)
    kind = chance.choice(CHANGES)
    if kind == "fault" and not isinstance(device, SimDevice):
        return
    tally.changes[kind] += 1
    if kind == "device":
        tensorsManager.device = chance.sample(devices, chance.choice((1, 1, len(devices))))
    elif kind == "switch":
        sys.setswitchinterval(chance.choice(SWITCH_INTERVALS_S))
    elif kind == "budget":
        tensorsManager.budget = int(chance.choice(BUDGETS) * capacity_nbytes())
    elif kind == "placement":
        tensorsManager.placement = chance.choice(PLACEMENTS)
    elif kind == "middleware":
        if tensorsManager.middlewares:
            tensorsManager.middlewares.pop()
        else:
            tensorsManager.middlewares.append(chance.choice(MIDDLEWARES)())
    elif kind == "strategy":
        tensorsManager.strategy = chance.choice(STRATEGIES)
    elif kind == "fault":
        # Far enough apart: a copy is tried again, and one that cannot be made at all is an error.
        kind = chance.choice(("alloc", "copy"))
        number = next_fault(device, kind) + chance.randrange(10, 60)
        device.fail_next(kind, number)
        so_far = device.copy_count if kind == "copy" else device.alloc_count
        planned[device.name, kind] = number + so_far
    elif kind == "check":
        tensorsManager.check()
    elif kind == "report":
        tensorsManager.report()
    else:
        tensorsManager.bring_all_home()


#: What is run.
programs: list[Callable[[torch.Generator], Any]] = []
#: What is used, one of them or both.
devices: list[Any] = []


def capacity_nbytes() -> int:
    """What the largest budget is."""
    return min(devices[0].capacity_nbytes, REAL_CAPACITY_NBYTES)


#: By device and kind of fault, which one in the life of the device was planned last.
planned: dict[tuple[str, str], int] = {}


def next_fault(device: SimDevice, kind: str) -> int:
    """How many allocations or copies from now the one is that was planned last."""
    so_far = device.copy_count if kind == "copy" else device.alloc_count
    return max(planned.get((device.name, kind), 0) - so_far, 0)


class Interrupts:
    """SIGINTs at random moments, which are raised where the main thread is ready for them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._is_armed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _send(self) -> None:
        while not self._is_over.wait(self._chance.random() * 0.2):
            if self._is_armed:
                os.kill(os.getpid(), signal.SIGINT)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._is_armed:
            raise KeyboardInterrupt

    def during(self, action: Callable[[], None]) -> bool:
        """Do something that may be interrupted; whether it was."""
        try:
            self._is_armed = True
            action()
            self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False
            return True
        except OSError as error:
            self._is_armed = False
            # An interrupt between a close and its note, in Python's own `rmtree`: closed twice.
            if error.errno != errno.EBADF or not isinstance(error.__context__, KeyboardInterrupt):
                raise
            return True
        except BaseException:
            self._is_armed = False
            raise
        return False


def run_interrupted(chance: random.Random, interrupts: Interrupts, tally: Tally) -> None:
    """Run a program that is interrupted, perhaps, and again, and compare with plain torch."""
    program, seed = chance.choice(programs), chance.getrandbits(32)
    with torchTensorRef.disabled():
        plain = program(torch.Generator().manual_seed(seed))
    if interrupts.during(lambda: program(torch.Generator().manual_seed(seed))):
        tally.interrupts += 1
        torch.set_grad_enabled(True)  # `no_grad` is Python, and may be left without its end
    found = differences(plain, program(torch.Generator().manual_seed(seed)))
    if found:
        tally.wrong.append(f"{program.__name__} with seed {seed}, interrupted: {found[:3]}")


def play_round(
    pool: ThreadPoolExecutor,
    chance: random.Random,
    tally: Tally,
    interrupts: Interrupts | None,
) -> bool:
    """Run programs on every thread for a while; False if they did not come to an end."""
    until = time.perf_counter() + ROUND_S
    futures: list[Future[None]] = [
        pool.submit(work, chance.getrandbits(32), until, tally) for _ in range(THREADS)
    ]
    while time.perf_counter() < until and not tally.wrong:
        time.sleep(chance.random() * 0.2)
        try:
            unsettle(chance, tally)
            if interrupts is not None:
                run_interrupted(chance, interrupts, tally)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            tally.wrong.append(f"a change at run time: {type(error).__name__}: {error}"[:2000])
    done, pending = wait(futures, timeout=PATIENCE_S)
    for future in done:
        future.result()
    return not pending


# -- what is left ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What is there between two rounds."""

    objects: dict[str, int]
    resident_nbytes: int
    handles: list[str]
    threads: int
    memory_nbytes: int


def look() -> Left:
    """Count what is left when no program runs."""
    for _ in range(3):
        gc.collect()
    tensorsManager.bring_all_home()
    tensorsManager.check()
    process = psutil.Process()
    kinds = Counter("TensorRef" if is_ref(x) else type(x).__name__ for x in gc.get_objects())
    if not isinstance(devices[0], SimDevice):
        del kinds["UntypedStorage"]  # the last copies keep what they copied until the next ones
    return Left(
        {name: kinds[name] for name in COUNTED},
        sum(map(held_nbytes, devices)),
        handles_of(process),
        threading.active_count(),
        process.memory_info().rss,
    )


def is_real(device: Any) -> bool:
    """Whether it is a card: the others are the host."""
    return bool(device.torch_device.type != "cpu")


def held_nbytes(device: Any) -> int:
    """What a device holds by its own count; the adapter over the host counts what is the host's."""
    give_up_workspaces(device)
    return int(device.resident_nbytes) if isinstance(device, SimDevice) or is_real(device) else 0


def holders(depth: int = 6) -> list[str]:
    """Say who holds the TensorRefs that there are, or blocks without any, and who holds those."""
    there = gc.get_objects()
    things = [x for x in there if is_ref(x)] or [x for x in there if type(x) is Block]
    del there, things[3:]
    found: list[str] = []
    for number, thing in enumerate(things):
        chain, at = [], thing
        for _ in range(depth):
            mine = {id(sys._getframe()), id(chain), id(found), id(things)}
            others = [x for x in gc.get_referrers(at) if id(x) not in mine and x is not gc]
            others = [x for x in others if type(x).__name__ != "list_iterator"]
            if not others:
                break
            kinds = Counter(type(x).__name__ for x in others)
            at = others[0]
            chain.append(f"{type(at).__name__} {reprlib.repr(at)[:200]} (one of {dict(kinds)})")
        block = thing._ttr_block if is_ref(thing) else thing
        name = tuple(thing.shape) if is_ref(thing) else repr(thing)
        # `things`, `thing`, `block` or `at`, and what a call has of what is looked up for it: of a
        # variable it has none from Python 3.14 on.
        count = sys.getrefcount(things[number]) - 4
        held = ", held by ".join(chain) or "nothing in Python"
        story = " | ".join(tensorsManager.log.story(block.name)[-12:])
        found.append(f"{name}, {count} references, is held by {held}; its story: {story}")
    return found


def handles_of(process: psutil.Process) -> list[str]:
    """Name the open file handles, where the system tells; number them elsewhere.

    An interrupt that hits Python's own `rmtree` leaves the number of a folder's handle to nobody.
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return list(map(str, range(process.num_handles())))
    found = []
    for entry in folder.iterdir():
        with suppress(OSError):  # the one that lists the folder
            found.append(str(entry.readlink()))
    return [name for name in found if not Path(name).name.startswith(FOLDER)]


def leaks(before: Left, now: Left) -> list[str]:
    """What has become more, in words."""
    found = [
        f"{now.objects[name]} objects of {name}, {count} at first"
        for name, count in before.objects.items()
        if now.objects[name] > count
    ]
    if found:
        found += holders()
    on_card = is_real(devices[0])
    if now.resident_nbytes > before.resident_nbytes + (LAST_COPIES_NBYTES if on_card else 0):
        found.append(f"{now.resident_nbytes} bytes on the device that belong to nobody")
    if len(now.handles) > len(before.handles):
        more = Counter(now.handles) - Counter(before.handles)
        found.append(f"{len(now.handles)} file handles, {len(before.handles)} at first: {more}")
    if now.threads > before.threads:
        found.append(f"{now.threads} threads, {before.threads} at first")
    most_nbytes = before.memory_nbytes + (REAL_GROWTH_NBYTES if on_card else GROWTH_NBYTES)
    if now.memory_nbytes > most_nbytes:
        grown = now.memory_nbytes - before.memory_nbytes
        found.append(f"the process has grown by {grown >> 20} MiB")
    residency = tensorsManager.residency
    if residency.holds.pins_by_thread or residency.holds.announced:
        found.append("operands are still held although no operator runs")
    return found


# -- the whole ------------------------------------------------------------------------------------


def simulated() -> list[SimDevice]:
    """Two in one machine that poison what is freed."""
    spec = DeviceSpec(name="soak", capacity_nbytes=CAPACITY_NBYTES, decision_nbytes=4 << 10)
    machine = Machine.of(spec)
    return [
        SimDevice(spec, machine=machine, poison=True, name=name)
        for name in ("sim:soak", "sim:other")
    ]


def late(seed: int) -> list[LateDevice]:
    """Make two over the double whose copies happen as late as they may."""
    made = [LateDevice(LateModule(CAPACITY_NBYTES, seed=seed + n), n) for n in range(2)]
    for device in made:
        device.has_host_kernels = True  # it is the host: blocks keep its bits
    return made


def prepare(seed: int, kind: str) -> random.Random:
    """Set the runtime up on small accelerators."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if kind == "sim":
        devices[:] = simulated()
    elif kind == "adapter":
        devices[:] = adapters(2, CAPACITY_NBYTES)
    elif kind == "late":
        devices[:] = late(seed)
    else:
        devices[:] = [registry.resolve(kind)]
    programs[:] = whole_numbers.PROGRAMS if is_real(devices[0]) else PROGRAMS
    tensorsManager.device = devices[0]
    tensorsManager.budget = capacity_nbytes()
    tensorsManager.reset_stats()
    return random.Random(seed)


def soak(
    minutes: float, seed: int, interrupts: Interrupts | None, device: str = "sim"
) -> tuple[Tally, bool, int]:
    """Play rounds for so long; returns the tally, whether it ended, and the growth in bytes."""
    chance, tally = prepare(seed, device), Tally()
    end = time.perf_counter() + minutes * 60
    first: Left | None = None
    now: Left | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # No thread that draws: `gc.get_objects` would see, and so break, the tuples it is just making.
    with ThreadPoolExecutor(THREADS) as pool, Progress(*columns, auto_refresh=False) as progress:
        task = progress.add_task("soak", total=minutes * 60)
        rounds = 0
        while time.perf_counter() < end and not (tally.wrong or tally.leaks):
            if not play_round(pool, chance, tally, interrupts):
                faulthandler.dump_traceback(all_threads=True)
                os._exit(2)  # threads that are stuck cannot be waited for
            rounds += 1
            now = look()
            if rounds == WARM_UP_ROUNDS:
                first = now
            for _ in range(LOOKS):
                found = [] if first is None else leaks(first, now)
                if not found:
                    break
                time.sleep(1)  # a thread of the pool may not have let go of its last call yet
                now = look()
            tally.leaks += found
            done = sum(tally.programs.values())
            at = minutes * 60 - (end - time.perf_counter())
            progress.update(task, completed=at, description=f"soak: {done} programs", refresh=True)
    stats = tensorsManager.stats()
    tally.operators = stats["op_count"]
    tally.fetched_nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    tally.evictions = stats["evict_count"]
    grown = now.memory_nbytes - first.memory_nbytes if first and now else 0
    return tally, first is not None, grown


def main() -> int:
    """Run for the time asked for, and say what has happened."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interrupts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--device", default="sim", help="sim, adapter, late, or a real one, as cuda"
    )
    options = parser.parse_args()
    with Interrupts(options.seed) if options.interrupts else nullcontext() as interrupts:
        tally, has_looked, grown_nbytes = soak(
            options.minutes, options.seed, interrupts, options.device
        )
    for line in (*tally.wrong, *tally.leaks):
        sys.stdout.write(line + "\n")
    if not has_looked:
        sys.stdout.write(f"Too short to look for leaks: that takes {WARM_UP_ROUNDS} rounds.\n")
    result = {
        "programs": dict(tally.programs),
        "changes": dict(tally.changes),
        "interrupts": tally.interrupts,
        "operators": tally.operators,
        "fetched_nbytes": tally.fetched_nbytes,
        "evictions": tally.evictions,
        "grown_nbytes": grown_nbytes,
        "wrong": len(tally.wrong),
        "leaks": len(tally.leaks),
    }
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return int(bool(tally.wrong or tally.leaks))


if __name__ == "__main__":
    raise SystemExit(main())
