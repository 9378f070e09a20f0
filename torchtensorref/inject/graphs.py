"""Graphs of kernels (`torch.cuda.graph`): they keep addresses, and replay without a word to us."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

from ..base.errors import UnsupportedOpError
from ..devices.accelerator.streams import begin_capture, end_capture
from .hooks import is_disabled, load, state
from .patches import Patch


def refused_capture(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Begin to capture a graph, unless TensorRefs would be in it.

    What it writes later nobody would know of, and what it uses would be moved or freed meanwhile:
    both give wrong numbers. A compiled function is run, and captured, on plain tensors.
    """
    if state.active and not is_disabled.get() and _runs_operators_there():
        raise UnsupportedOpError(
            "A graph of kernels (torch.cuda.graph, make_graphed_callables) keeps the addresses of "
            "tensors, and those of TensorRefs change. Run that part of the program plain: "
            "`with torchTensorRef.disabled():`, on `tensorsManager.release(x)` of what it uses."
        )
    begin_capture()
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        end_capture()
        raise


def ended_capture(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """End a capture, well or not; its stream is as others again."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        end_capture()


def _runs_operators_there() -> bool:
    residency = load(".memory.manager").tensorsManager._residency
    if residency is None or residency.books.main.torch_device.type == "cpu":
        return False
    return threading.get_ident() not in residency.holds.native_blocks


#: Where torch has them; older ones have some of these only.
_GRAPHS = (
    ("torch.cuda.graphs", "CUDAGraph"),
    ("torch.xpu.graphs", "XPUGraph"),
    ("torch.accelerator.graphs", "Graph"),
)
_WRAPPERS = (
    ("capture_begin", refused_capture, "keeps addresses, replays unseen"),
    ("capture_end", ended_capture, "until then no event may be recorded on its stream"),
)
OF_GRAPHS = tuple(
    Patch(module, f"{name}.{method}", wrapper, reason)
    for module, name in _GRAPHS
    if find_spec(module) is not None
    for method, wrapper, reason in _WRAPPERS
)
