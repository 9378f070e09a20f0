"""Threads that write what others read, and do not wait for each other: every value is somebody's.

Plain torch promises no more, and no less: nothing is lost, and no kernel loses its memory.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.devices.storages import storage_nbytes
from torchTensorRef.memory.states import INVALID

from ..support.programs import assert_same
from .test_threads import (  # noqa: F401 (fixtures)
    ROUNDS,
    STRATEGIES,
    assert_idle,
    gated,
    in_threads,
    manage,
    two_at_once,
)

COUNT = 1 << 12
LOW, HIGH = 0.5, 1.5


def write_at_home(ref: Any) -> Any:
    """Draw numbers, as a tensor labelled cpu does: where plain torch does."""
    return ref.uniform_(LOW, HIGH)


def test_a_kernel_keeps_its_memory_while_another_thread_writes_at_home(manage, monkeypatch):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.ones(COUNT))
    gate = gated(monkeypatch, manager.residency, "tell_operator")
    doubled, _ = two_at_once(gate, lambda: ref * 2, lambda: write_at_home(ref))
    assert_same(torch.full((COUNT,), 2.0), doubled)
    assert not manager.residency.holds.stale
    assert_idle(manager)


def test_what_an_operator_has_announced_keeps_its_memory(manage):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.ones(COUNT))
    ref + 1
    residency = manager.residency
    replica = ref._ttr_block.replicas[residency.books.main]
    residency.holds.announced[-1] = (ref,)  # another thread's, on the ready path
    write_at_home(ref)
    assert replica.state is INVALID
    assert storage_nbytes(replica.base) == replica.nbytes
    assert residency.books.ledgers[replica.device].resident_nbytes >= replica.nbytes
    manager.check()
    ref + 1  # is fetched again, into the same bytes
    assert_same(ref.clone(), ref)
    write_at_home(ref)
    del residency.holds.announced[-1]
    assert storage_nbytes(replica.base)
    manager.check()
    assert not storage_nbytes(replica.base)
    assert_idle(manager)


@pytest.mark.parametrize("is_late_at_home", [True, False])
def test_one_of_two_writers_is_right(manage, monkeypatch, is_late_at_home):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.full((COUNT,), 4.0))
    ref + 1
    residency = manager.residency
    late_at_home = residency.books.host, "before_operator"
    gate = gated(monkeypatch, *(late_at_home if is_late_at_home else (residency, "tell_operator")))
    late, other = (lambda: write_at_home(ref)), (lambda: ref.mul_(4))
    two_at_once(gate, *((late, other) if is_late_at_home else (other, late)))
    manager.check()
    values = set(ref.tolist())
    assert values == {16.0} or (min(values) >= LOW and max(values) <= HIGH) or values == {4.0}
    assert_idle(manager)


@pytest.mark.parametrize("way", ["slow", "watched"])
def test_an_operator_waits_for_a_copy_home_that_has_begun_meanwhile(manage, monkeypatch, way):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.full((COUNT,), 4.0))
    ref.add_(1)
    residency, copier = manager.residency, manager.residency.copier
    replica = ref._ttr_block.replicas[residency.books.main]
    begun = []

    def then_copied(act: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            result = act(*args)
            with residency.books.lock:  # as another thread, which does not wait for it yet
                home = copier.leaving.begin(replica)
            if home is not None and copier.leaving.issue(replica, home):
                begun.append(home)
            return result

        return wrapper

    residency.books.is_pressed = way == "watched"
    ref._ttr_block.ready = None
    monkeypatch.setattr(residency, "acquire", then_copied(residency.acquire))
    monkeypatch.setattr(copier, "written", then_copied(copier.written))
    ref.lerp_(torch.zeros_like(ref) + 0, 0.5)
    monkeypatch.undo()
    assert len(begun) >= 2
    assert_same(torch.full((COUNT,), 2.5), ref)
    assert_idle(manager)


def test_an_operator_waits_for_what_is_brought_back_meanwhile(manage, monkeypatch):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.full((COUNT,), 4.0))
    ref + 1
    residency, block = manager.residency, ref._ttr_block
    main, acquire = residency.books.main, residency.acquire

    def acquired(*args: Any) -> Any:
        held = acquire(*args)
        home = residency.copier.bring_home(block)  # as another thread, which writes at home
        residency.copier.written(block, residency.books.host)
        home.base.view(torch.float32).fill_(2)
        residency.copier.fetch(block, main)
        return held

    block.ready = None
    with monkeypatch.context() as patch:
        patch.setattr(residency, "acquire", acquired)
        found = ref.lerp(ref, 0.5)
    assert_same(torch.full((COUNT,), 2.0), found)
    assert_idle(manager)


@pytest.mark.parametrize("way", ["read", "peek"])
def test_a_copy_home_waits_for_what_compute_was_given_just_before(manage, monkeypatch, way):  # noqa: F811
    manager = manage("lru")
    ref = manager.adopt(torch.full((COUNT,), 4.0))
    ref.add_(1)
    residency, block = manager.residency, ref._ttr_block
    main = residency.books.main
    base, copy_out = block.replicas[main].base, main.copy_out

    def copied(*args: Any, **kwargs: Any) -> Any:  # another thread's kernel, which writes it, ends
        main.after_operator([], [base], flops=10**9, nbytes=0, dtype_name="float32")
        return copy_out(*args, **kwargs)

    monkeypatch.setattr(main, "copy_out", copied)
    copier = residency.copier
    found = copier.peek(block)[0] if way == "peek" else copier.bring_home(block).base
    assert found.view(torch.float32).eq(5).all()
    assert_idle(manager)


# One accelerator: several are clocked with each other, and refuse what is not ordered.
@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"scatter"}))
@pytest.mark.parametrize("_", range(ROUNDS))
def test_every_value_is_somebodys(manage, name, _):  # noqa: F811
    nbytes = 6 * 4 * COUNT
    manager = manage(STRATEGIES[name](), nbytes)
    # Without poison: what has not arrived yet is the value before, as on hardware.
    manager.device = SimDevice(DeviceSpec(name="test", capacity_nbytes=nbytes), name="sim:clean")
    refs = [manager.adopt(torch.full((COUNT,), 1.0)) for _ in range(10)]
    views = [ref.view(64, -1) for ref in refs]

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(100):
            i, j = draw.randrange(10), draw.randrange(10)
            one, other = refs[i], refs[j]
            act = draw.choice(acts)
            found = act(one, other, views[i])
            assert found.min().item() >= LOW
            assert found.max().item() <= HIGH

    acts = [
        lambda x, y, v: write_at_home(x),
        lambda x, y, v: x.lerp_(y, 0.5),
        lambda x, y, v: x.copy_(y),
        lambda x, y, v: (x + y) * 0.5,
        lambda x, y, v: v[3].fill_(1.0),
        lambda x, y, v: x.clone(),
        lambda x, y, v: x.clamp_(LOW, HIGH),
        lambda x, y, v: torch.stack((x, y, x)),
    ]
    in_threads(work, 4)
    manager.check()
    for ref in refs:
        assert ref.min().item() >= LOW
        assert ref.max().item() <= HIGH
    manager.check()


def test_what_another_thread_is_just_taking_in_is_in_order(manage, monkeypatch):  # noqa: F811
    """It counts before it has its place: a look in between said that nobody would evict it."""
    manager = manage()
    x = manager.adopt(torch.rand(16, 16))
    y = x @ x
    ledger = manager.residency.books.ledgers[manager.residency.books.main]
    put_in_order, has_counted = ledger._put_in_order, threading.Event()

    def put_late(replica):
        has_counted.set()
        time.sleep(0.1)
        put_in_order(replica)

    monkeypatch.setattr(ledger, "_put_in_order", put_late)
    thread = threading.Thread(target=lambda: y._ttr_block.replicas)
    thread.start()
    assert has_counted.wait(10)
    counted = [death() for death in list(ledger._replicas.values())]
    assert all(ledger.is_in_order(replica) for replica in counted)
    thread.join()
