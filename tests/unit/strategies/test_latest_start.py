"""How long copies can wait, and how little of the queue has to be looked at to know it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from torchTensorRef.strategies.flow.latest_start import LatestStart
from torchTensorRef.strategy import DeviceSnapshot

DEVICE = DeviceSnapshot(
    name="sim",
    limit_nbytes=2**20,
    resident_nbytes=0,
    in_flight_nbytes=0,
    in_flight_count=0,
    now_ns=0,
    link_free_ns=0,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
)


def gate_of(steps_ns: list[int]) -> tuple[LatestStart, DeviceSnapshot]:
    gate, spent_ns = LatestStart(), 0
    for position, step_ns in enumerate(steps_ns):
        spent_ns += step_ns
        gate.advance(replace(DEVICE, compute_ns=spent_ns), 0, position)
    return gate, replace(DEVICE, compute_ns=spent_ns)


@given(
    st.lists(st.integers(1, 5_000), min_size=2, max_size=40),
    st.lists(
        st.tuples(st.integers(0, 40), st.just(1), st.sampled_from([8, 256, 2048])), max_size=30
    ),
)
def test_the_answer_is_the_same_with_bounds(steps_ns, queue):
    gate, device = gate_of(steps_ns)
    queue.sort()
    bounds = sum(nbytes for _, _, nbytes in queue), max((n for _, _, n in queue), default=0)
    assert gate.slack_ns(device, 0, queue, bounds) == gate.slack_ns(device, 0, queue)


def test_a_decision_takes_its_time():
    gate, device = gate_of([10_000] * 100)
    queue = [(10, 1, 8), (20, 2, 8), (30, 3, 8)]
    free = gate.slack_ns(device, 0, queue)
    dear = gate.slack_ns(replace(device, decision_nbytes=5_000), 0, queue)
    assert 0 < dear <= free - 3 * 5_000  # at a byte per ns: its own, and a margin of two
    assert gate.slack_ns(replace(device, decision_nbytes=50_000), 0, queue) == 0


def test_what_is_due_after_all_could_be_there_is_not_looked_at():
    gate, device = gate_of([10_000] * 1000)
    looked_at = 0

    def queue() -> Iterator[tuple[int, int, int]]:
        nonlocal looked_at
        for distance in range(1, 1000):
            looked_at += 1
            yield distance, distance, 8

    assert gate.slack_ns(device, 0, queue(), (8 * 999, 8)) > 0
    assert looked_at < 10
