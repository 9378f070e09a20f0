"""Whoever may write or free bytes at home waits for the copies that still read them.

A copy from page-locked memory is issued at once and reads its source much later. No double of a
device can show what happens when somebody writes first, since kernels run at once there; so these
tests put a copy that is not through where one could be, and look whether it was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchTensorRef.devices.host.readers import host_readers
from torchTensorRef.memory.transfer import Transfer


class Reading:
    """A copy that reads its source until somebody waits for it."""

    device = None

    def __init__(self, base: torch.Tensor) -> None:
        self.was_finished = False
        self.seen: list[Any] = []
        self._base = base

    def has_read(self) -> bool:
        return self.was_finished

    def finish_reading(self) -> None:
        self.was_finished = True
        self.seen = self._base.untyped_storage().tolist()[:4]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a random operator": lambda x: x.uniform_(),
    "an array": lambda x: x.numpy(),
    "__array__": lambda x: x.__array__(),
    "a pointer": lambda x: x.data_ptr(),
    "a storage": lambda x: x.untyped_storage(),
    "DLPack": torch.from_dlpack,
    "shared memory": lambda x: x.share_memory_(),
    "a smaller size": lambda x: x.resize_(3),
    "a larger size": lambda x: x.resize_(5000),
    "another storage": lambda x: x.set_(torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_at_home_waits(manager, change):
    x = manager.adopt(torch.ones(1000), sole=True)
    home = x._ttr_block.replicas[manager.residency.books.host]
    reading = Reading(home.base)
    before = home.base.untyped_storage().tolist()[:4]
    host_readers.note_reader(home.base, reading)
    CHANGES[change](x)
    assert reading.was_finished
    assert reading.seen == before, "the copy has read what was there when it was issued"


def test_releasing_waits(manager):
    x = manager.adopt(torch.ones(1000), sole=True)
    home = x._ttr_block.replicas[manager.residency.books.host]
    reading = Reading(home.base)
    host_readers.note_reader(home.base, reading)
    manager.release(x)
    assert reading.was_finished


def test_reading_at_home_does_not_wait(manager):
    x = manager.adopt(torch.ones(1000), sole=True)
    home = x._ttr_block.replicas[manager.residency.books.host]
    reading = Reading(home.base)
    host_readers.note_reader(home.base, reading)
    assert x.tolist() == [1.0] * 1000
    assert x.clone().sum().item() == 1000
    assert not reading.was_finished
    host_readers.about_to_change(home.base)


class Device:
    """What `Transfer` asks of a real device when it has issued a copy."""

    def __init__(self) -> None:
        self.wishes: list[bool] = []

    def wish_page_locked(self, base: torch.Tensor, *, may_mirror: bool) -> None:
        self.wishes.append(may_mirror)


@pytest.mark.parametrize("is_exposed", [False, True])
def test_bytes_that_others_may_write_are_read_before_the_copy_is_left_alone(manager, is_exposed):
    x = manager.adopt(torch.ones(1000), sole=True)
    array = x.numpy() if is_exposed else None
    home = x._ttr_block.replicas[manager.residency.books.host]
    reading, device = Reading(home.base), Device()
    Transfer._mind_source(home, device, reading, was_exposed=False)  # type: ignore[arg-type]
    assert reading.was_finished is is_exposed
    assert device.wishes == [not is_exposed]
    del array
