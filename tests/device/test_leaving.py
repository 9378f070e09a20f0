"""Dirty blocks that leave by way of staging buffers: nobody waits for them under a lock."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from torchTensorRef.base.errors import TransferError
from torchTensorRef.devices.accelerator.staging import HostCopier, StagingRing
from torchTensorRef.interception import tiles
from torchTensorRef.memory.states import DIRTY
from torchTensorRef.memory.transfer import Transfer

from ..support.device_double import LateDevice, LateModule
from .conftest import managed_by

MIB = 1 << 20
PATIENCE_S = 20.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    monkeypatch.setattr("torchTensorRef.devices.accelerator.staging.SLOT_NBYTES", MIB // 4)
    made = LateDevice(LateModule(seed=5, refuses=True))  # nothing is page-locked: all is staged
    for ring in (made._copier._in_ring, made._copier._out_ring):
        ring._slot_nbytes = MIB // 4
    return made


@pytest.fixture
def manager(device: LateDevice) -> Any:
    with managed_by(device) as make:
        yield make("lru", 8 * MIB)


class Gate:
    """Holds the threads up that empty slots, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        copy = HostCopier.copy

        def held_up(copier: HostCopier, source: torch.Tensor, destination: torch.Tensor) -> None:
            self.reached.set()
            self.opened.wait(PATIENCE_S)
            copy(copier, source, destination)

        monkeypatch.setattr(HostCopier, "copy", held_up)


def dirty(manager: Any, count: int) -> list[Any]:
    """Blocks of 2 MiB, eight slots each, whose only bytes are on the device."""
    made = []
    for number in range(count):
        x = manager.adopt(torch.full((MIB // 2,), float(number)))
        x.add_(0.5)
        made.append(x)
    return made


def test_the_locks_are_free_while_a_dirty_block_leaves(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = dirty(manager, 2)
    books = manager.residency.books
    ledger, before = books.ledgers[device], books.ledgers[device].resident_nbytes
    gate = Gate(monkeypatch)
    evicting = threading.Thread(target=manager.bring_all_home)
    evicting.start()
    try:
        assert gate.reached.wait(PATIENCE_S)
        is_free = [lock.acquire(timeout=3) for lock in (books.lock, device._lock)]
        counted_nbytes = ledger.resident_nbytes
        for lock, is_ours in zip((books.lock, device._lock), is_free, strict=True):
            if is_ours:
                lock.release()
    finally:
        gate.opened.set()
        evicting.join(PATIENCE_S)
    assert is_free == [True, True]
    assert counted_nbytes == before, "what is leaving has its room until it has landed"
    assert [float(manager.release(x)[7]) for x in xs] == [0.5, 1.5]
    assert ledger.resident_nbytes == 0


def test_a_copy_home_that_fails_loses_nothing(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = dirty(manager, 1)
    fails = True
    issue = device._copier.out_lane.issue

    def hiccup(source: torch.Tensor, destination: torch.Tensor) -> Any:
        if fails:
            raise RuntimeError("the link hiccups")
        return issue(source, destination)

    monkeypatch.setattr(device._copier.out_lane, "issue", hiccup)
    replicas = manager.residency.books.ledgers[device].replicas()
    replica = next(r for r in replicas if r.nbytes == 2 * MIB)
    with pytest.raises(TransferError):
        manager.residency.evictor.evict(replica, "a test")
    assert replica.state is DIRTY
    fails = False
    assert float(manager.release(x)[7]) == 0.5


def test_the_locks_are_free_while_a_writer_waits_for_a_copy_home(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = dirty(manager, 1)
    books = manager.residency.books
    replica = next(r for r in books.ledgers[device].replicas() if r.nbytes == 2 * MIB)
    gate = Gate(monkeypatch)
    manager.residency.evictor.try_write_back(replica)
    writing = threading.Thread(target=lambda: x.add_(1))
    try:
        assert gate.reached.wait(PATIENCE_S)
        writing.start()
        writing.join(1)  # long enough to come to where it waits
        is_free = books.lock.acquire(timeout=3)
        if is_free:
            books.lock.release()
    finally:
        gate.opened.set()
        writing.join(PATIENCE_S)
    assert is_free
    assert float(manager.release(x)[7]) == 1.5


def test_what_is_about_to_be_written_does_not_need_the_copy_home(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = dirty(manager, 1)
    issue = device._copier.out_lane.issue
    replica = next(
        r for r in manager.residency.books.ledgers[device].replicas() if r.nbytes == 2 * MIB
    )

    def hiccup(source: torch.Tensor, destination: torch.Tensor) -> Any:
        raise RuntimeError("the link hiccups")

    monkeypatch.setattr(device._copier.out_lane, "issue", hiccup)
    manager.residency.evictor.try_write_back(replica)
    x.add_(1)
    monkeypatch.setattr(device._copier.out_lane, "issue", issue)
    assert float(manager.release(x)[7]) == 1.5


def test_a_small_copy_home_that_was_overtaken_does_not_come_over_the_next_one(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is carried on by whoever looks at it, which may be late."""
    x = manager.adopt(torch.zeros(16))
    x.add_(0.5)
    block = x._ttr_block
    manager.residency.evictor.try_write_back(block.replicas[device])
    home = block.replicas[manager.residency.books.host]
    event = home.arrival._event
    x.add_(1)  # on the device: what is under way is stale
    monkeypatch.setattr(event, "query", lambda: False)  # compute waits for it, the host does not
    manager.bring_all_home()
    monkeypatch.undo()
    y = manager.adopt(torch.zeros(16)).add_(1)
    manager.bring_all_home()  # looks at all copies home
    assert manager.release(y).tolist() == [1.0] * 16
    assert manager.release(x).tolist() == [1.5] * 16


def test_a_small_copy_home_whose_event_is_lost_does_not_come_later(
    manager: Any, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error came when it was issued, and before it was noted at home."""
    x = manager.adopt(torch.full((16,), 3.0))
    x.add_(1)
    issue = Transfer._issue

    def dies(transfer: Transfer, *args: Any) -> Any:
        issue(transfer, *args)
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(Transfer, "_issue", dies)
    with pytest.raises(MemoryError):
        manager.residency.evictor.try_write_back(x._ttr_block.replicas[device])
    x.random_(7, 8)  # at home, over what is not copied there before
    y = manager.adopt(torch.zeros(16)).add_(1)
    manager.bring_all_home()  # looks at all copies
    assert manager.release(y).unique().tolist() == [1.0]
    assert manager.release(x).unique().tolist() == [7.0]


def test_copies_home_of_blocks_end_with_an_operator_that_is_interrupted(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = manager.adopt(torch.full((4 * MIB,), 3.0), sole=True)  # 16 MiB in a budget of 8
    run_tile, tiles_run = tiles.Run._run_tile, []

    def interrupted(run: Any, *args: Any) -> Any:
        tiles_run.append(run)
        if len(tiles_run) == 2:
            raise KeyboardInterrupt
        return run_tile(run, *args)

    def land_late(*args: Any) -> None:
        opened.wait(0.2)
        land(*args)

    opened, land = threading.Event(), StagingRing._land
    monkeypatch.setattr(tiles.Run, "_run_tile", interrupted)
    monkeypatch.setattr(StagingRing, "_land", land_late)
    with pytest.raises(KeyboardInterrupt):
        x.mul_(2.0)
    monkeypatch.setattr(tiles.Run, "_run_tile", run_tile)
    x.random_(7, 8)
    opened.set()
    manager.bring_all_home()
    time.sleep(0.3)  # what is still under way would come
    assert manager.release(x).unique().tolist() == [7.0]


@pytest.mark.parametrize(("count", "staged_nbytes"), [(4, 0), (100_000, 400_000)])
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_look_copies_what_it_reads(manager, device, count, staged_nbytes, is_inference):
    (x,) = dirty(manager, 1)
    x[9] = 7
    manager.reset_stats()
    staged_before = device.staged_nbytes
    with torch.inference_mode(is_inference):
        assert x[7 : 7 + count].tolist() == [0.5, 0.5, 7, *[0.5] * (count - 3)]
    stats = manager.stats()
    assert (stats["peeked_nbytes"], stats["peek_count"]) == (4 * count, 1)
    assert device.staged_nbytes - staged_before == staged_nbytes
    assert x._ttr_block.replicas[device].state is DIRTY
