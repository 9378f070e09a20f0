"""Page-locking: bounded, in the background, undone before memory is freed, and never needed."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from mmap import PAGESIZE

import pytest
import torch

from torchTensorRef.devices.accelerator import device as accelerator
from torchTensorRef.devices.accelerator.landing import PIECE_COUNT, PIECE_NBYTES, Pieces
from torchTensorRef.devices.host import page_lock, page_locked_pool
from torchTensorRef.devices.host.locked_bytes import LockedBytes
from torchTensorRef.devices.host.page_lock import (
    LEAST_NBYTES,
    PageLocks,
    RegisteringLocker,
    TorchLocker,
)
from torchTensorRef.devices.host.page_locked_pool import PageLockedPool
from torchTensorRef.devices.host.readers import host_readers
from torchTensorRef.devices.storages import bytes_of

from ....support.device_double import LateDevice, LateModule, Runtime

N = LEAST_NBYTES
mirrors = host_readers.mirrors


def base(nbytes=N):
    return torch.zeros(nbytes, dtype=torch.uint8)


def mapped(nbytes=N):
    """Memory that torch did not allocate, as of a mapped file."""
    return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)


def wish(locks, tensor, *, may_mirror=True):
    for _ in range(page_lock.WORTH_IT_AFTER):
        locks.wish(tensor, may_mirror=may_mirror)
    assert locks.settle(10)


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def locks(runtime):
    return PageLocks(RegisteringLocker(runtime), 10 * N)


def assert_pages_of_our_own(runtime):
    for address, nbytes in runtime.registered.items():
        assert address % PAGESIZE == nbytes % PAGESIZE == 0, "others have a part of a page"


def test_what_recurs_gets_whole_pages_of_its_own(locks, runtime):
    weight = base()
    locks.wish(weight, may_mirror=True)
    assert locks.settle(10)
    assert mirrors.take(weight) is None, "it has been copied once only"
    locks.wish(weight, may_mirror=True)
    assert locks.settle(10)
    mirror = mirrors.take(weight)
    assert mirror.may_be_home, "of a heap, which can have its memory back"
    assert locks.is_locked(mirror.memory)
    assert not locks.is_locked(weight)
    assert runtime.state_of(weight) == "pageable"
    assert runtime.registered == {mirror.memory.data_ptr(): N}
    assert locks.locked_nbytes == N


def test_neighbours_in_a_heap_share_no_locked_page(runtime):
    locks = PageLocks(RegisteringLocker(runtime), 100 * N)
    heap = torch.zeros(40 * N, dtype=torch.uint8)
    del heap  # what comes now is cut out of what was there, one beside the other
    weights = [base(N + 1000) for _ in range(24)]
    for weight in weights[::2]:
        wish(locks, weight)
    assert runtime.registered
    assert_pages_of_our_own(runtime)
    assert {runtime.state_of(weight) for weight in weights} == {"pageable"}


def test_memory_is_unlocked_before_it_is_freed_and_by_our_thread(locks, runtime):
    piece = locks.allocate(N)
    address = piece.data_ptr()
    view = piece[3:7]
    del piece
    assert locks.settle(10)
    assert runtime.registered == {address: N}, "a view of it lives"
    del view
    gc.collect()
    assert locks.settle(10)
    assert runtime.registered == {}
    assert runtime.unregistered_by == ["torchTensorRef-page-lock"], "and by no finalizer"
    assert locks.locked_nbytes == 0


def test_a_wish_outlives_an_exchange_of_memory(locks, runtime):
    weight = base()
    wish(locks, weight)
    storage = weight.untyped_storage()
    held = base()  # so that it has to move
    storage.resize_(64 * N)
    other = base()
    assert mirrors.take(bytes_of(weight)) is None
    assert mirrors.take(other) is None
    assert runtime.state_of(weight) == "pageable"
    del held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody forks here")
def test_a_forked_child_writes_memory_of_its_own(locks):
    piece = locks.allocate(N)
    piece.fill_(1)
    address = piece.data_ptr()
    child = os.fork()
    if not child:
        ctypes.memset(address, 2, N)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert piece.unique().tolist() == [1]


def test_the_bound_is_kept(runtime):
    locks = PageLocks(RegisteringLocker(runtime), 2 * N + N // 2)
    weights = [base() for _ in range(4)]
    for weight in weights:
        wish(locks, weight)
    assert sum(mirrors.take(weight) is not None for weight in weights) == 2
    assert locks.locked_nbytes == 2 * N
    assert locks.allocate(N) is None
    del weight
    weights.clear()
    gc.collect()
    assert locks.settle(10)
    assert locks.allocate(N) is not None, "there is room again"


def test_the_bound_is_for_all_devices_of_a_process():
    """`TTR_PAGE_LOCK` is the most host memory to page-lock, however many cards there are."""
    whole, runtimes = LockedBytes(), [Runtime(), Runtime()]
    cards = [
        PageLocks(RegisteringLocker(runtime), 3 * N, counted=LockedBytes(whole))
        for runtime in runtimes
    ]
    weights = [base() for _ in range(8)]
    for number, weight in enumerate(weights):
        wish(cards[number % 2], weight)
    assert [card.locked_nbytes for card in cards] == [2 * N, N]
    assert sum(sum(runtime.registered.values()) for runtime in runtimes) == whole.nbytes == 3 * N
    weights.clear()
    del weight
    gc.collect()
    assert all(card.settle(10) for card in cards)
    assert whole.nbytes == 0
    assert cards[1].allocate(3 * N) is not None


def test_devices_share_the_bound_of_the_process(monkeypatch):
    whole = LockedBytes()
    monkeypatch.setattr(accelerator, "of_process", whole)
    devices = [LateDevice(LateModule(), index) for index in (0, 1)]
    pieces = [device.page_locks.allocate(N) for device in devices]
    assert [device.page_locked_nbytes for device in devices] == [N, N]
    assert whole.nbytes == 2 * N
    del pieces


def test_what_was_granted_nothing_is_asked_for_again(locks, runtime, monkeypatch):
    """At counts that double: a driver that refuses is not asked at each copy."""
    weight, asked = base(), []
    monkeypatch.setattr(locks, "allocate", lambda nbytes: asked.append(nbytes))
    for _ in range(40):
        locks.wish(weight, may_mirror=True)
    assert locks.settle(10)
    assert len(asked) == 5, "at 2, 4, 8, 16, 32"
    monkeypatch.undo()
    for _ in range(24):
        locks.wish(weight, may_mirror=True)
    assert locks.settle(10)
    assert mirrors.take(weight) is not None


def test_what_has_a_mirror_is_given_no_other(locks):
    weight = mapped()
    wish(locks, weight)
    mirror = mirrors.take(weight)
    mirror.filled()
    for _ in range(20):
        locks.wish(weight, may_mirror=True)
    assert locks.settle(10)
    assert mirrors.of(weight) is mirror
    assert locks.locked_nbytes == N


def test_no_homes_are_made_where_memory_is_short(locks, monkeypatch):
    monkeypatch.setattr(page_locked_pool, "has_spare_ram", lambda nbytes: False)
    pool = PageLockedPool(locks)
    pool.take(N)
    assert locks.settle(10)
    assert locks.locked_nbytes == 0


def test_pieces_count_while_they_are_used(monkeypatch):
    """Torch's own memory is cut, and counts as long as the tensor that was handed out lives."""
    monkeypatch.setattr(page_lock, "_torchs_own", base)
    locks = PageLocks(TorchLocker(16 * N), 16 * N)
    pieces = Pieces(locks.allocate)
    piece = pieces.take()
    gc.collect()
    assert locks.locked_nbytes == PIECE_NBYTES * PIECE_COUNT
    del piece, pieces
    gc.collect()
    assert locks.locked_nbytes == 0


def test_small_blocks_are_left_alone(locks, runtime):
    small = base(N - 1)
    wish(locks, small)
    assert runtime.registered == {}


def test_a_mapped_file_gets_a_mirror_that_its_next_copy_fills(locks, runtime):
    weight = mapped()
    wish(locks, weight)
    assert not locks.is_locked(weight)
    mirror = mirrors.take(weight)
    assert mirror is not None
    assert mirror.memory.numel() == N
    assert runtime.registered == {mirror.memory.data_ptr(): N}, "of exactly its size"
    assert mirrors.take(weight) is None, "given away once"
    assert mirrors.of(weight) is None
    mirror.filled()
    assert mirrors.of(weight) is mirror
    assert not mirror.may_be_home, "a file's pages are nobody's to free"
    del mirror, weight
    gc.collect()
    assert locks.settle(10)
    assert runtime.registered == {}
    assert locks.locked_nbytes == 0


def test_bytes_that_others_may_write_get_no_mirror(locks):
    weight = mapped()
    wish(locks, weight, may_mirror=False)
    assert mirrors.take(weight) is None
    assert locks.locked_nbytes == 0


def test_a_write_ends_a_mirror(locks):
    weight = mapped()
    wish(locks, weight)
    mirrors.take(weight).filled()
    host_readers.about_to_change(weight)
    assert mirrors.of(weight) is None
    assert locks.settle(10)
    assert locks.locked_nbytes == 0


def test_where_the_driver_refuses_it_is_said_once(caplog):
    locks = PageLocks(RegisteringLocker(Runtime(refuses=True)), 10 * N)
    weights = [base(), base(), mapped()]
    with caplog.at_level(logging.WARNING):
        for weight in weights:
            wish(locks, weight)
        assert locks.allocate(N) is None
    assert len(caplog.records) == 1
    assert "page-locked" in caplog.text
    assert locks.locked_nbytes == 0


def test_a_refusal_stays_in_no_thread_that_runs_kernels(runtime):
    """The runtime remembers it for the thread that has asked, and torch raises it there."""
    runtime.refuses = True
    locks = PageLocks(RegisteringLocker(runtime), 10 * N)
    assert locks.allocate(N) is None
    wish(locks, base())
    assert len(runtime.asked_by) == 2
    assert not {thread for thread in runtime.asked_by if thread.is_alive()}


def test_a_driver_that_raises_ends_nothing(caplog, runtime):
    locks = PageLocks(RegisteringLocker(runtime), 10 * N)
    runtime.cudaHostRegister = lambda *_: (_ for _ in ()).throw(RuntimeError("driver is gone"))
    wish(locks, base())
    assert "driver is gone" in caplog.text
    other = base()
    del runtime.cudaHostRegister
    wish(locks, other)
    assert mirrors.take(other) is not None, "the thread is still there"


def test_without_a_locker_nothing_is_locked_and_nothing_said(caplog):
    locks = PageLocks(None, 10 * N)
    weight = base()
    wish(locks, weight)
    assert (locks.is_locked(weight), locks.allocate(5), locks.locked_nbytes) == (False, None, 0)
    assert not caplog.records


def test_torchs_own_memory_is_cut_out_of_chunks(monkeypatch):
    made, late = [], []

    def torchs_own(nbytes):
        made.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(page_lock, "_torchs_own", torchs_own)
    locker = TorchLocker(chunk_nbytes=100)
    parts = [locker.allocate(40, late.append) for _ in range(3)]
    assert made == [100, 100], "no power of two for each"
    assert parts[0].data_ptr() + 40 == parts[1].data_ptr()
    assert locker.allocate(101, late.append) is None


class SlowReader:
    def __init__(self):
        self.finished = False

    def has_read(self):
        return self.finished

    def finish_reading(self):
        self.finished = True


def test_who_writes_waits_for_copies_that_read():
    weight, other, reader = base(10), base(10), SlowReader()
    host_readers.note_reader(weight, reader)
    host_readers.about_to_change(other)
    assert not reader.finished
    host_readers.about_to_change(weight)
    assert reader.finished


def test_who_writes_waits_for_copies_that_read_a_part():
    weight, reader, beyond = base(100), SlowReader(), SlowReader()
    host_readers.note_reader(weight[40:60], reader)
    host_readers.note_reader(weight[90:], beyond)
    host_readers.about_to_be_filled(weight[:90], object())
    assert reader.finished
    assert not beyond.finished
    host_readers.about_to_change(weight)
    assert beyond.finished


def test_readers_that_have_finished_are_forgotten():
    for _ in range(500):
        reader = SlowReader()
        reader.finished = True
        host_readers.note_reader(base(10), reader)
    assert len(host_readers._readers) <= 65


# -- homes for what kernels make ----------------------------------------------------------------


def test_homes_are_made_in_the_background_and_come_back(locks, runtime):
    pool = PageLockedPool(locks)
    assert pool.take(N) is None, "not at the moment of use"
    assert locks.settle(10)
    home = pool.take(N)
    assert home is not None
    assert home.numel() == N
    assert locks.is_locked(home)
    assert pool.take(N) is None, "one for each that was wanted"
    assert locks.settle(10)
    address, view = home.data_ptr(), home[5:9]
    del home
    gc.collect()
    assert pool.take(N).data_ptr() != address, "a view of it lives"
    del view
    gc.collect()
    again = [pool.take(N), pool.take(N)]
    assert address in [part.data_ptr() for part in again if part is not None]
    assert len(runtime.registered) == 2


def test_small_homes_are_pageable(locks):
    pool = PageLockedPool(locks)
    for _ in range(3):
        assert pool.take(N - 1) is None
        assert locks.settle(10)


def test_sizes_that_were_wanted_once_make_room_for_others(runtime):
    locks = PageLocks(RegisteringLocker(runtime), 4 * N)
    pool = PageLockedPool(locks)
    pool.take(3 * N)
    assert locks.settle(10)
    pool.take(2 * N)
    assert locks.settle(10)
    assert pool.take(2 * N) is not None
    assert locks.locked_nbytes == 2 * N
