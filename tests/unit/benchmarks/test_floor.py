"""The floor of the benchmark: what no run can do without, on cases that one can work out."""

from __future__ import annotations

import pytest
import torch

from benchmarks.floor import Recorder
from torchTensorRef.devices import DeviceSpec

#: One byte a nanosecond either way; compute and the host's memory are no limit.
LINK = DeviceSpec(
    "link",
    capacity_nbytes=10**6,
    flops_per_s={"default": 1e18},
    memory_bytes_per_s=1e18,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    launch_ns=0,
    host_memory_bytes_per_s=100e9,
)
NBYTES = 400


def floor_of(spec: DeviceSpec, budget_nbytes: int) -> float:
    """Make five blocks of one that is given, then read each of them."""
    given = torch.ones(NBYTES // 4)
    with Recorder(spec, [given]) as recorder:
        made = [given + number for number in range(5)]
        for block in made:
            block.sum()
    return recorder.floor_ns(budget_nbytes)


@pytest.mark.parametrize(
    ("spec", "expected_ns"),
    [
        # Two of five stay: three go home while the one comes, then three come back.
        (LINK, 3 * NBYTES + 3 * NBYTES),
        (LINK.scaled(d2h_bytes_per_s=0.5e9), 6 * NBYTES + 3 * NBYTES),
        (LINK.scaled(duplex=False), (1 + 3) * NBYTES + 3 * NBYTES),
        # All that is copied passes the host's memory: four blocks, then three.
        (LINK.scaled(host_memory_bytes_per_s=0.5e9), 2 * (1 + 3) * NBYTES + 2 * 3 * NBYTES),
    ],
)
def test_what_is_made_and_does_not_fit_has_to_leave(spec, expected_ns):
    assert floor_of(spec, 2 * NBYTES) == pytest.approx(expected_ns, rel=1e-3)


def test_nothing_leaves_where_all_of_it_fits():
    assert floor_of(LINK, 6 * NBYTES) == pytest.approx(NBYTES, rel=1e-3)


def test_what_is_only_overwritten_need_not_be_kept():
    given = torch.ones(NBYTES // 4)
    with Recorder(LINK, [given]) as recorder:
        made = [given + number for number in range(5)]
        for block in made:
            block.zero_()
    # Nothing that was made is read: only the given one has to come, once.
    assert recorder.last_read.keys() == {0}
