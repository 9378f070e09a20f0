"""The benchmark of several accelerators, on a decoder of a quarter of its layers."""

from __future__ import annotations

import pytest
import torch

from benchmarks import several_accelerators as benchmark
from torchTensorRef.inject import hooks

from ...support.sweeps import only_in_sweeps


@pytest.fixture(autouse=True)
def few_layers(manage, monkeypatch):
    def made():
        torch.manual_seed(0)
        return benchmark.Llama(8).eval()

    monkeypatch.setattr(benchmark, "made", made)
    manage()
    with hooks.is_disabled.entered(False):
        yield


def test_links_work_at_once():
    """Of two accelerators that hold half; once one of them waited for the other's."""
    found = benchmark.measured(["two-half"])
    assert found["two-half"]["over_floor"] < 1.25


@only_in_sweeps
def test_caches_that_grow_are_no_weights(monkeypatch):
    """Once they were dealt out anew at each token, and weights moved from one to the other."""
    monkeypatch.setattr(benchmark, "TOKENS", 48)
    found = benchmark.measured(["four-half"])
    assert found["four-half"]["over_floor"] < 1.8
