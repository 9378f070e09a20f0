"""The benchmark of experts in one tensor, with few layers."""

from __future__ import annotations

import pytest

from benchmarks import experts
from torchTensorRef.inject import hooks


@pytest.fixture(autouse=True)
def few_layers(manage, monkeypatch):
    manage()
    monkeypatch.setattr(experts, "LAYERS", 3)
    monkeypatch.setattr(experts, "BEFORE", 3)
    monkeypatch.setattr(experts, "TOKENS", 3)
    with hooks.is_disabled.entered(False):
        yield


def test_a_token_fetches_no_more_than_it_uses():
    used_nbytes = experts.used_nbytes(experts.model_of("eager"))
    found = experts.measured("grouped_mm", "lru", 25, "exact")
    assert found.is_equal
    assert 0 < found.fetched_nbytes < used_nbytes
    whole = experts.measured("grouped_mm", "lru", 25, "off")
    assert whole.is_equal
    assert whole.fetched_nbytes > 2 * used_nbytes
