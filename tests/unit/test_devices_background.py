"""Threads of ours: what they were given is done, and none is inside torch when Python ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from torchTensorRef.devices.background import Background

ROOT = Path(__file__).parents[2]

#: What the programs below share: bytes, and copies of them that keep a thread inside torch.
BEGINNING = """
import atexit, sys, torch
import torchTensorRef
from torchTensorRef.devices.staging import Copier, StagedCopy, StagingRing

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
ring = StagingRing(Lane(), into=True, make_slot=slot, copier=Copier(2), slot_nbytes=10_000)
"""

IN_FLIGHT = """
ring.submit(StagedCopy(source, target, ()))
atexit.register(assert_there)
"""

AT_EXIT = """
def move():
    ring.submit(StagedCopy(source, target, ())).join()
    assert_there()
    moved = torch.zeros_like(large)
    Copier(2).copy(large, moved)
    assert torch.equal(large, moved)
    print("there")
atexit.register(move)
"""

PAGE_LOCKS = """
from torchTensorRef.devices.page_lock import PageLocks

class Locker:
    locks_in_place = True
    def lock(self, address, nbytes):
        Lane().issue(source, target)
        return True
    def unlock(self, address): pass

locks = PageLocks(Locker(), 1 << 30)
with torchTensorRef.disabled():
    large.add_(0)
for _ in range(2):
    locks.wish(large, may_mirror=False)
atexit.register(assert_there)
atexit.register(locks.wish, target, may_mirror=False)
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

copier = Copier(2)
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

WATCH = """
from tests.support.device_double import LateDevice
from torchTensorRef import headroom
from torchTensorRef.manager import tensorsManager

headroom.PERIOD_S = 1e-5
headroom.OthersWatch.look = lambda self, residency, device: Lane().issue(source, target)
tensorsManager.device = LateDevice()
torch.rand(3)
"""


def in_order(background: Background, count: int) -> list[int]:
    done: list[int] = []
    for n in range(count):
        assert background.submit(lambda n=n: done.append(n))
    assert finished(background)
    return done


def finished(background: Background) -> bool:
    event = threading.Event()
    background.submit(event.set)
    return event.wait(30)


def test_tasks_are_done_in_their_order():
    assert in_order(Background("test"), 100) == list(range(100))


def test_a_task_that_raises_is_reported_and_the_next_is_done(monkeypatch):
    background, seen = Background("test"), []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    background.submit(lambda: 1 // 0)
    assert in_order(background, 3) == [0, 1, 2]
    assert seen == [ZeroDivisionError]


def test_what_a_task_held_is_let_go_without_another():
    class Held:
        pass

    background, held = Background("test"), Held()
    watched, gone = weakref.ref(held), threading.Event()
    weakref.finalize(held, gone.set)
    background.submit(lambda held=held: None)
    del held
    assert gone.wait(30), watched()


def test_the_thread_ends_with_its_owner():
    background, threads = Background("test"), []
    background.submit(lambda: threads.append(threading.current_thread()))
    assert finished(background)
    del background
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_without_a_thread_the_caller_hears_of_it(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    background, done = Background("test"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not background.submit(lambda: done.append("refused"))
    assert in_order(background, 2) == [0, 1]
    assert done == [], "refused is refused, also when there is a thread again"


@pytest.mark.parametrize(
    ("program", "there_count"),
    [(IN_FLIGHT, 1), (AT_EXIT, 2), (PAGE_LOCKS, 1), (FORKED, 2), (WATCH, 0)],
    ids=["in flight", "at exit", "page locks", "forked", "watch"],
)
def test_python_ends_while_we_work(program, there_count):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGINNING + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TTR_DEVICE": "sim"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("there") == there_count
    assert done.stderr == ""
