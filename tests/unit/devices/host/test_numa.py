"""Host memory for copies on the card's side of the machine, where Linux tells which that is."""

from __future__ import annotations

import os
import threading
import types

import pytest
import torch

from torchTensorRef.devices.accelerator.vendor import Vendor
from torchTensorRef.devices.host import numa, page_lock
from torchTensorRef.devices.host.page_lock import LEAST_NBYTES, PageLocks, RegisteringLocker

from ....support.device_double import Runtime

CARD = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x81, pci_device_id=0)


@pytest.fixture
def system(tmp_path):
    """Two nodes of four processors; the card is on the second."""
    card = tmp_path / "bus" / "pci" / "devices" / "0000:81:00.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    for number, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        node = tmp_path / "devices" / "system" / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
    return tmp_path


def test_the_processors_of_the_cards_node(system):
    assert numa.cpus_near(CARD, system) == {2, 3, 6, 7}


def test_nothing_is_said_where_nothing_is_told(system, tmp_path):
    assert numa.cpus_near(types.SimpleNamespace(name="another vendor's"), system) == frozenset()
    assert numa.cpus_near(CARD, tmp_path / "none") == frozenset()
    (system / "bus" / "pci" / "devices" / "0000:81:00.0" / "numa_node").write_text("-1\n")
    assert numa.cpus_near(CARD, system) == frozenset()


def test_with_one_node_all_memory_is_near(system):
    node = system / "devices" / "system" / "node"
    (node / "node1").rename(node / "was")
    assert numa.cpus_near(CARD, system) == frozenset()


def test_the_vendor_asks_for_its_own_card():
    module = types.SimpleNamespace(get_device_properties=lambda index: asked.append(index) or CARD)
    asked = []
    Vendor(module, torch.device("cuda", 3), "cuda", 3).cpus_near()
    assert asked == [3]
    assert Vendor(object(), torch.device("mps"), "mps", 0).cpus_near() == frozenset()


@pytest.fixture
def placed(monkeypatch):
    """The threads that were put on processors, and on which."""
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(
        os,
        "sched_setaffinity",
        lambda who, cpus: found.append((threading.current_thread().name, who, set(cpus))),
        raising=False,
    )
    return found


def wish(locks):
    base = torch.zeros(LEAST_NBYTES, dtype=torch.uint8)
    for _ in range(page_lock.WORTH_IT_AFTER):
        locks.wish(base, may_mirror=True)
    assert locks.settle(10)
    return base


def test_the_thread_that_page_locks_runs_there_and_no_other(placed):
    locks = PageLocks(RegisteringLocker(Runtime()), 100 * LEAST_NBYTES, frozenset({2, 3, 6}))
    kept = [wish(locks), wish(locks)]
    assert placed == [(page_lock.THREAD, 0, {2, 3})], "once, within what it may use"
    assert locks.locked_nbytes == 2 * LEAST_NBYTES
    del kept


def test_where_the_process_was_put_elsewhere_it_stays_there(placed):
    locks = PageLocks(RegisteringLocker(Runtime()), 100 * LEAST_NBYTES, frozenset({8, 9}))
    kept = wish(locks)
    assert placed == []
    assert locks.locked_nbytes == LEAST_NBYTES
    del kept
