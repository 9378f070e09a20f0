"""Threads of ours: what they were given is done, and none is inside torch when Python ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchTensorRef.devices.background import Background

from ...support.processes import AS_FOR_A_USER
from ...support.sweeps import usual

ROOT = Path(__file__).parents[3]

#: What the programs below share: bytes, and copies of them that keep a thread inside torch.
BEGINNING = """
import atexit
at_last = []
atexit.register(lambda: [callback() for callback in at_last])  # the first comes last

import sys, torch
import torchTensorRef
from torchTensorRef.devices.accelerator.staging import HostCopier, StagedCopy, StagingRing

class Lane:
    def hold_back(self, event): pass
    def issue(self, source, destination):
        for at in range(0, source.numel(), 8):
            destination[at : at + 8].copy_(source[at : at + 8])
        return self
    def query(self): return True
    def synchronize(self): pass

def slot(nbytes):
    with torchTensorRef.disabled():
        return torch.empty(nbytes, dtype=torch.uint8)

def assert_there():
    assert torch.equal(source, target)
    print("there")

with torchTensorRef.disabled():
    source = torch.randint(0, 256, (200_000,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    large = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
ring = StagingRing(Lane(), into=True, make_slot=slot, copier=HostCopier(2), slot_nbytes=10_000)
"""

IN_FLIGHT = """
ring.submit(StagedCopy(source, target, ()))
at_last.append(assert_there)
"""

AT_EXIT = """
def move():
    target.zero_()
    ring.submit(StagedCopy(source, target, ())).join()
    assert_there()
    with torchTensorRef.disabled():
        moved = torch.zeros_like(large)
    HostCopier(2).copy(large, moved)
    assert torch.equal(large, moved)
    print("there")
atexit.register(move)  # while there are threads
at_last.append(move)
"""

PAGE_LOCKS = """
from torchTensorRef.devices.host.page_lock import PageLocks

class Locker:
    makes_storages = True
    def allocate(self, nbytes, free_later):
        Lane().issue(source, target)
        with torchTensorRef.disabled():
            return torch.empty(nbytes, dtype=torch.uint8)

locks = PageLocks(Locker(), 1 << 30)
with torchTensorRef.disabled():
    large.add_(0)
for _ in range(2):
    locks.wish(large, may_mirror=True)
at_last += [assert_there, lambda: locks.wish(large, may_mirror=True)]
"""

FORKED = """
import os

torch.set_num_threads(1)  # those of OpenMP are not there in a child
def move():
    target.zero_()
    ring.submit(StagedCopy(source, target, ())).join()
    moved = torch.zeros_like(large)
    copier.copy(large, moved)
    assert torch.equal(large, moved)

copier = HostCopier(2)
move()
child = os.fork()
move()
assert_there()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.stdout.flush()
    os._exit(0)
"""

AFTER_MAIN = """
import threading

with torchTensorRef.disabled():
    sources = [torch.full((500_000,), n, dtype=torch.uint8) for n in range(4)]

class Lane(Lane):
    def issue(self, source, destination):
        destination.copy_(source)
        return self

ring = StagingRing(Lane(), into=True, make_slot=slot, copier=HostCopier(2), slot_nbytes=10_000)

def work(n):
    threading.main_thread().join()
    with torchTensorRef.disabled():
        for _ in range(20):
            moved = torch.zeros_like(sources[n])
            ring.submit(StagedCopy(sources[n], moved, ())).join()
            assert torch.equal(moved, sources[n])
    print("there")

sys.setswitchinterval(1e-5)
for n in range(4):
    threading.Thread(target=work, args=(n,)).start()
"""

WATCH = """
from tests.support.device_double import LateDevice
from torchTensorRef import tensorsManager
from torchTensorRef.memory import external_pressure

external_pressure.PERIOD_S = 1e-5
external_pressure.OthersWatch.look = lambda self, residency, device: Lane().issue(source, target)
tensorsManager.device = LateDevice()
torch.rand(3)
"""

#: Each with how often it says that its bytes are there.
PROGRAMS = {
    "in flight": (IN_FLIGHT, 1),
    "at exit": (AT_EXIT, 4),
    "after main": (AFTER_MAIN, 4),
    "page locks": (PAGE_LOCKS, 1),
    "forked": (FORKED, 2),
    "watch": (WATCH, 0),
}


def in_order(background: Background, count: int) -> list[int]:
    done: list[int] = []
    for n in range(count):
        background.submit(lambda n=n: done.append(n))
    assert finished(background)
    return done


def finished(background: Background) -> bool:
    event = threading.Event()
    background.submit(event.set)
    return event.wait(30)


@pytest.fixture
def without_threads(monkeypatch):
    """No thread can be started, as by a limit of the system."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


def test_tasks_are_done_in_their_order():
    assert in_order(Background("test"), 100) == list(range(100))


def test_a_task_that_raises_is_reported_and_the_next_is_done(monkeypatch):
    background, seen = Background("test"), []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    background.submit(lambda: 1 // 0)
    assert in_order(background, 3) == [0, 1, 2]
    assert seen == [ZeroDivisionError]


class Held:
    """Something that a task holds."""

    def fail(self):
        raise ValueError


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_held_is_let_go_without_another(monkeypatch, fails):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    background, held = Background("test"), Held()
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    background.submit(held.fail if fails else lambda held=held: None)
    gc.collect()
    gc.disable()
    try:
        del held
        assert gone.wait(30)
    finally:
        gc.enable()


def test_the_thread_ends_with_its_owner_when_all_is_done():
    background, threads, done = Background("test"), [], []
    background.submit(lambda: threads.append(threading.current_thread()))
    assert finished(background)
    going_on = threading.Event()
    background.submit(lambda: going_on.wait(30))
    for n in range(3):
        background.submit(lambda n=n: done.append(n))
    del background
    going_on.set()
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert done == [0, 1, 2]


def test_without_a_thread_the_caller_does_it(without_threads):
    background = Background("test")
    done, names = in_order(background, 3), []
    background.submit(lambda: names.append(threading.current_thread().name))
    assert done == [0, 1, 2]
    assert names == [threading.current_thread().name]
    without_threads.undo()
    background.submit(lambda: names.append(threading.current_thread().name))
    assert finished(background)
    assert names[1] == "test"


def test_without_a_thread_tasks_still_come_one_after_the_other(monkeypatch):
    background, running, overlaps, done = Background("test"), [], [], []

    def task() -> None:
        overlaps.extend(running)
        running.append(1)
        time.sleep(0.001)
        running.pop()
        done.append(1)

    def inside() -> None:
        running.append(1)
        background.submit(task)  # as a finalizer would, in the middle of another
        running.pop()

    monkeypatch.setattr(background._worker, "are_over", True)
    callers = [
        threading.Thread(target=lambda: [background.submit(task) for _ in range(20)])
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    background.submit(inside)
    assert (len(done), overlaps) == (81, [])


def test_a_finalizer_may_queue_a_task_while_another_is_queued():
    """Also one that waits for it, and while the program's own pool is at work."""
    background, waited = Background("test"), []

    class Dies:
        def __init__(self):
            self.me = self

        def __del__(self):
            if threading.current_thread() is threading.main_thread():
                waited.append(finished(background))

    pool = ThreadPoolExecutor(1)
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    try:
        for _ in range(50):
            Dies()
            background.submit(int)
            pool.submit(int)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert finished(background)
    assert waited
    assert all(waited)


@pytest.mark.parametrize(
    "name", usual(["at exit", "after main", "forked"], ["in flight", "page locks", "watch"])
)
def test_python_ends_while_we_work(name):
    program, there_count = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGINNING + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TTR_DEVICE": "sim", **AS_FOR_A_USER},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("there") == there_count
    assert done.stderr == ""
