"""A child that is forked while other threads compute: it neither waits for them nor is wrong."""

import os
import signal
import threading
import time

import pytest
import torch

import torchTensorRef
from torchTensorRef.base.activation import is_disabled, watch

CHILDREN = 8
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def ended(pid: int) -> int:
    """Wait for a child; return its exit status, or -1 where it had to be killed."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.parametrize("strategy", ["lru", "flow"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_it_reads_what_other_threads_were_using(manage, strategy):
    manager = manage(strategy, nbytes=1 << 19)
    blocks = [manager.adopt(torch.rand(64, 64)) for _ in range(40)]  # 640 KiB
    sums = [float(block.sum()) for block in blocks]
    is_over = threading.Event()

    def compute(part: int) -> None:
        while not is_over.is_set():
            for block in blocks[part::2]:
                (block @ block).sum()
                block.mul_(1.0)

    threads = [threading.Thread(target=compute, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(CHILDREN):
            time.sleep(0.01)
            pid = os.fork()
            if not pid:
                try:
                    os._exit(0 if [float(block.sum()) for block in blocks] == sums else 3)
                except BaseException:
                    os._exit(4)
            assert ended(pid) == 0
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_scopes_of_other_threads_are_over_there(manager):
    x = manager.adopt(torch.ones(4))
    is_begun, is_over = threading.Event(), threading.Event()

    def promise() -> None:
        with (
            torchTensorRef.promising(),
            manager.middlewares.scoped(torchTensorRef.middlewares.Pin("x"), all_threads=True),
        ):
            is_begun.set()
            is_over.wait()

    def is_right() -> bool:
        seen = watch.on, manager.middlewares.here(), (x + 1).tolist(), is_disabled.get()
        return seen == (False, (), [2, 2, 2, 2], True)

    thread = threading.Thread(target=promise)
    thread.start()
    try:
        is_begun.wait()
        with torchTensorRef.disabled():
            pid = os.fork()
            if not pid:
                try:
                    os._exit(0 if is_right() else 3)
                except BaseException:
                    os._exit(4)
        assert ended(pid) == 0
    finally:
        is_over.set()
        thread.join()
    assert not watch.on
