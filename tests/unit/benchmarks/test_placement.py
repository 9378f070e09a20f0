"""The benchmark of computing at home, on models that take no time."""

from __future__ import annotations

import pytest

from benchmarks import placement
from benchmarks.placement import Case, Llama


def small() -> Llama:
    return Llama(layers=6, hidden=2048, inner=4096, vocabulary=32_000)


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    monkeypatch.setattr(placement, "STEPS", 6)
    cases = {
        "decode": Case(small, 1, 2048, "h200", has_cache=True),
        "prefill": Case(small, 512, 2048, "rtx3090"),
    }
    monkeypatch.setattr(placement, "CASES", cases)


def test_decode_gains_and_prefill_loses_nothing():
    found = placement.measured(["decode-3-50", "prefill-3-50"])
    assert found["decode-3-50"]["of_without"] < 0.75
    assert found["decode-3-50"]["over_bound"] > 1
    assert found["decode-3-50"]["over_floor"] > 1
    assert found["prefill-3-50"]["of_without"] <= 1.01
    figures = placement.figures_of(found)
    assert figures["prefill-3-50/of_without"].bound == 1.01


def test_floor_counts_the_room_of_what_is_on_its_way():
    """Four blocks, room for two: that of one is given up for what is on its way."""
    machine, blocks = (1, 1, 2), [100] * 4
    assert placement.floor_ns(blocks, 400, machine, 0) == 0
    assert placement.floor_ns(blocks, 200, machine, 0) == (200 + 100) / 2
    assert placement.floor_ns(blocks, 200, machine, 10) == (200 + 100 + 10) / 2


def test_floor_of_small_blocks_is_the_formula_and_the_time_of_the_accelerator():
    blocks = [1] * 4000
    assert placement.floor_ns(blocks, 2000, (1, 1, 2), 0) == pytest.approx(1000, rel=1e-3)
    assert placement.floor_ns(blocks, 2000, (1, 1, 2), 100) == pytest.approx(1050, rel=1e-3)
