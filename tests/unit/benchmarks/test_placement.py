"""The benchmark of computing at home, on models that take no time."""

from __future__ import annotations

import pytest

from benchmarks import placement
from benchmarks.placement import Case, Llama


def small() -> Llama:
    return Llama(layers=6, hidden=2048, inner=4096)


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
    assert found["prefill-3-50"]["of_without"] <= 1.01
    figures = placement.figures_of(found)
    assert figures["prefill-3-50/of_without"].bound == 1.01
