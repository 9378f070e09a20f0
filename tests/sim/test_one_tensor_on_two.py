"""A tensor that two accelerators hold, used on both at once: each has its own view."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchTensorRef.memory.plain_views import plain_on

from ..support.several import on_several


def interleaved(one: Callable[[], Any], other: Callable[[], Any], step: int) -> list[Any]:
    """Call `one`, and `other` in a thread before opcode number `step` of its `plain_on`.

    Returns
    -------
    list
        Their results; of `one` alone where it has fewer opcodes.
    """
    results: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: results.update(other=other()))
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code is not plain_on.__code__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count == step and thread.ident is None:
            thread.start()
            thread.join(0.05)  # it may wait for us
        return trace

    sys.settrace(trace)
    try:
        results["one"] = one()
    finally:
        sys.settrace(None)
    if thread.ident is not None:
        thread.join()
    return [results[name] for name in ("one", "other") if name in results]


def test_a_view_is_kept_together_with_its_device(manager):
    manager = on_several(1 << 16, 1 << 16, strategy="lru")
    ref: Any = manager.adopt(torch.rand(8, 8))
    block, (first, second) = ref._ttr_block, manager.residency.books.accelerators
    for device in (first, second):
        manager.residency.copier.fetch(block, device)

    def storage_on(device: Any) -> int:
        return block.replicas[device].base.untyped_storage()._cdata

    plain_on(ref, first)
    for step in range(1, 1000):
        views = interleaved(lambda: plain_on(ref, second), lambda: plain_on(ref, first), step)
        expected = [storage_on(device) for device in (second, first)][: len(views)]
        assert [view.untyped_storage()._cdata for view in views] == expected
        assert ref._ttr_plain.untyped_storage()._cdata == storage_on(ref._ttr_device)
        if len(views) == 1:
            return
        plain_on(ref, first)
    raise AssertionError("it has more opcodes than that")
