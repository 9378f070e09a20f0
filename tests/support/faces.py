"""What the tests of a tensor's faces beside operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

#: What torch and numpy say of features that programs use on purpose.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "__array_wrap__ must accept context",
        "__array__ implementation doesn't accept a copy",
        "Sparse invariant checks are implicitly disabled",
        "Sparse ... tensor support is in beta",
        "Attempted to insert a get_attr Node",
    )
]


def failure(function: Callable[[], Any]) -> tuple[str, str]:
    """How a call fails: the type and the first line."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "no error", ""
