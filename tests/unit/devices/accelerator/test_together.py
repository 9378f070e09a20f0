"""Copies that are issued together: small neighbours share an event, and each has its bytes."""

from __future__ import annotations

import pytest
import torch

from torchTensorRef.base.errors import TransferError
from torchTensorRef.devices.accelerator.copies import STAGED_FROM_NBYTES, TOGETHER_NBYTES
from torchTensorRef.devices.host.readers import host_readers

from ....support.device_double import LateDevice
from ....support.ordered_double import OrderedDevice, comes_before

SMALL, MIDDLE, LARGE = 1 << 10, STAGED_FROM_NBYTES, TOGETHER_NBYTES + 1


@pytest.fixture
def device(monkeypatch):
    """All memory of the host is page-locked: nothing is staged by a thread."""
    monkeypatch.setattr(host_readers, "_readers", {})
    device = OrderedDevice()
    monkeypatch.setattr(device._copier, "is_page_locked", lambda memory: True)
    return device


def copies_of(device, sizes):
    sources = [
        torch.full((nbytes,), at % 251, dtype=torch.uint8) for at, nbytes in enumerate(sizes)
    ]
    return [(source, device.allocate(source.numel())) for source in sources]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([MIDDLE] * 3, [0, 0, 0]),
        ([SMALL, SMALL, MIDDLE, MIDDLE, SMALL], [0, 0, 1, 1, 2]),
        ([LARGE, LARGE, MIDDLE], [0, 1, 2]),
        ([MIDDLE, LARGE, MIDDLE], [0, 1, 2]),
        ([TOGETHER_NBYTES // 2] * 5, [0, 0, 1, 1, 2]),
    ],
)
def test_small_neighbours_have_one_event(device, sizes, groups):
    events = device.copy_in_all(copies_of(device, sizes))
    numbers = {id(event): number for number, event in enumerate(dict.fromkeys(events))}
    assert [numbers[id(event)] for event in events] == groups


def test_none_is_written_before_what_its_room_waits_for(device):
    bases = [device.fetched(MIDDLE) for _ in range(3)]
    reads = [device.kernel(base) for base in bases]
    for base in bases:
        device.empty(base)
        device.refill(base, MIDDLE)
    lane = device._copier.in_lane
    writes = []
    copy = lane.copy
    lane.copy = lambda *ends: writes.append((copy(*ends), lane.last)[1])
    device.copy_in_all([(torch.zeros(MIDDLE, dtype=torch.uint8), base) for base in bases])
    assert len(writes) == 3
    for read in reads:
        assert all(comes_before(read, write) for write in writes)


def test_where_one_does_not_fit_none_is_issued(device):
    copies = copies_of(device, [MIDDLE] * 3)
    copies[2] = (copies[2][0][:-1], copies[2][1])
    with pytest.raises(TransferError, match="nothing was copied"):
        device.copy_in_all(copies)
    assert not device._copier._in_flight
    assert not hasattr(device._copier.in_lane, "last")


@pytest.mark.parametrize("seed", range(8))
def test_each_has_its_bytes_once_its_event_has_fired(seed):
    device = LateDevice()
    device.double.random.seed(seed)
    pick = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 4, (20,), generator=pick).tolist()
    copies = copies_of(device, [(SMALL, MIDDLE, 3 * MIDDLE + 5, LARGE)[kind] for kind in drawn])
    events = device.copy_in_all(copies)
    for (source, base), event in reversed(list(zip(copies, events, strict=True))):
        event.synchronize()
        assert torch.equal(base, source)
    device._copier.finish()
