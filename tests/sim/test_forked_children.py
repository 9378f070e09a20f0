"""A forked child: it waits for no other thread, is never wrong, and leaves real accelerators."""

import os
import signal
import threading
import time
import traceback

import pytest
import torch

import torchTensorRef
from torchTensorRef.base.activation import is_disabled, watch
from torchTensorRef.base.errors import LostError
from torchTensorRef.memory import core, forks

from ..support.device_double import LateDevice, LateModule
from ..support.over_host import adapters

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


class OfTheParent(LateModule):
    """One that refuses in a forked child whatever a driver refuses there."""

    def __init__(self):
        super().__init__()
        self.owner = os.getpid()

    def may_refuse(self):
        if os.getpid() != self.owner:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

    def Event(self):
        self.may_refuse()
        return super().Event()

    def mem_get_info(self, index=0):
        self.may_refuse()
        return super().mem_get_info(index)


class ParentsDevice(LateDevice):
    def allocate(self, nbytes):
        self.double.may_refuse()
        return super().allocate(nbytes)

    def refill(self, base, nbytes):
        self.double.may_refuse()
        super().refill(base, nbytes)

    def empty(self, base):
        self.double.may_refuse()
        super().empty(base)


def in_child(is_right):
    """Fork a child; return its exit status: 0 where a function says there that all is right."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if is_right() else 3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    return ended(pid)


@pytest.mark.parametrize("strategy", ["lru", "flow", "genoa"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_child_computes_at_home_where_the_parent_has_a_real_accelerator(manage, strategy):
    manager = manage(strategy)
    device = ParentsDevice(OfTheParent())
    manager.device, manager.budget = device, "1MiB"
    fetched = manager.adopt(torch.arange(1000.0))
    written = manager.adopt(torch.zeros(1000))
    written.add_(fetched)
    made = fetched * 2
    view = made.view(10, 100)[3]
    exposed = manager.adopt(torch.ones(8))
    held = (exposed + 1).target
    evict_count = manager.stats()["evict_count"]

    def is_right():
        values = made.sum().item(), view.tolist(), written[5].item(), (fetched + 1)[1].item()
        written.mul_(2)
        manager.check()
        is_same = values == (999000.0, list(range(600, 800, 2)), 5.0, 2.0)
        return is_same and written[5].item() == 10.0 and manager.device == "cpu"

    for _ in range(2):
        assert in_child(is_right) == 0
    assert manager.device == device.name
    assert manager.stats()["evict_count"] == evict_count, "what is there stays for the parent"
    assert made.sum().item() == 999000.0
    assert written[5].item() == 5.0
    assert held.sum().item() == 16.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_workers_of_a_loader_have_what_was_computed(manage):
    manager = manage("lru")
    manager.device = ParentsDevice(OfTheParent())
    with is_disabled.entered(False):
        x = torch.arange(640.0).view(20, 32)
        x = (x - x.mean(0)) / x.std(0)
        expected = x.sum(1)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x), batch_size=5, num_workers=2
        )
        assert torch.equal(torch.cat([batch.sum(1) for (batch,) in loader]), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_what_a_copy_could_not_bring_home_is_said_to_be_lost(manage, monkeypatch):
    manager = manage("lru")
    manager.device = ParentsDevice(OfTheParent())
    x = manager.adopt(torch.ones(1000)) * 2
    monkeypatch.setattr(forks.Forks, "before_fork", lambda self: None)

    def is_right():
        with pytest.raises(LostError, match="process that this one was forked from"):
            x.tolist()
        return manager.adopt(torch.ones(3)).add(1).tolist() == [2.0] * 3

    assert in_child(is_right) == 0
    assert x.tolist() == [2.0] * 1000


@pytest.fixture
def looked_into(manager):
    """A block, and how to call a function from inside an operator in C++ that runs on it."""
    (manager.device,) = adapters(1, 1 << 26)
    x = manager.adopt(torch.ones(3)) * 2
    inside = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("lgamma", lambda x: inside.pop()() or x.clone(), "CPU")

        def run_inside(function):
            inside.append(function)
            return torch.lgamma(x)

        yield x._ttr_block, run_inside


@pytest.mark.skipif(core.library is None, reason="there is nothing in C++ to count")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*verrid")
def test_what_other_threads_use_in_cpp_is_used_by_nobody_in_a_child(looked_into):
    """It was in use there for ever: neither evicted nor moved."""
    block, run_inside = looked_into
    is_begun, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=run_inside, args=(lambda: (is_begun.set(), is_over.wait())[2:],)
    )
    thread.start()
    try:
        assert is_begun.wait(PATIENCE_S)
        assert (block.users, core.running_elsewhere()) == (1, 1)
        assert in_child(lambda: (block.users, core.running_elsewhere()) == (0, 0)) == 0
        assert (block.users, core.running_elsewhere()) == (1, 1)
    finally:
        is_over.set()
        thread.join()
    assert (block.users, core.running_elsewhere()) == (0, 0)


@pytest.mark.skipif(core.library is None, reason="there is nothing in C++ to count")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*verrid")
def test_an_operator_that_has_called_what_forks_uses_its_operands_in_the_child(looked_into):
    block, run_inside = looked_into
    pids = []

    def fork():
        pids.append(os.fork())
        seen.append(block.users)

    seen = []
    try:
        run_inside(fork)
        seen.append(block.users)
    except BaseException:
        if not pids or pids[0]:
            raise
        os._exit(4)
    if not pids[0]:
        os._exit(0 if seen == [1, 0] else 3)
    assert ended(pids[0]) == 0
    assert seen == [1, 0]
