"""Units are tested on plain tensors, also when another file has brought injection on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchTensorRef.base.activation import disabled


@pytest.fixture(autouse=True)
def plain_tensors() -> Iterator[None]:
    """What a unit test makes is plain."""
    with disabled():
        yield
