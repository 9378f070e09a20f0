"""Learning a region: an intercepted call of a module is written down, and judged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from ..base.interrupts import holds_operands, lets_program_run
from ..memory.manager import TensorsManager
from ..memory.ref import TensorRef, attributes_given
from .recorder import Recorder, SavedVersion
from .region import Structure, attributes_of
from .slots import same_state, tensors_of
from .tensor_tree import Exchange

_autograd = torch._C._autograd


@holds_operands
@lets_program_run
def learn(
    manager: TensorsManager,
    module: nn.Module,
    structure: Structure,
    inputs: list[Any],
    args: Any,
    kwargs: Any,
    call: Any = None,
    *,
    gradients: bool = False,
) -> Any:
    """Run a module intercepted, and write down what the call uses, makes and leaves behind.

    `call` runs it, if not its own: a function that was compiled, with the modules it can reach.
    With `gradients` it may note them, and what is saved for a backward pass is not left behind.
    """
    call = call or module._call_impl
    residency = manager.residency
    refs = [*tensors_of(module)]
    if any(not isinstance(ref, TensorRef) for ref in refs):
        return call(*args, **kwargs)  # another thread's region has a part of it
    in_order = dict.fromkeys(ref._ttr_block for ref in refs)
    own = set(in_order)
    given = [block for block in dict.fromkeys(ref._ttr_block for ref in inputs) if block not in own]
    recorder: Recorder | None = Recorder(tuple(in_order), given, gradients)
    with residency.books.lock:
        if residency.recorder is not None:
            recorder = None
        else:
            residency.recorder, residency.recording_ident = recorder, threading.get_ident()
            residency.books.sees_all = True
            residency.books.reopen()
    if recorder is None:
        return call(*args, **kwargs)
    before_ns = residency.books.main.clocks().compute_ns
    before_ops = residency.books.counts.slow_op_count
    before = [_seen_of(ref) for ref in (*refs, *inputs)]
    try:
        with _noting(recorder) if gradients else nullcontext():
            out = call(*args, **kwargs)
    finally:
        with residency.books.lock:
            residency.recorder = None
            residency.books.sees_all = False
            residency.books.reopen()
    for ref, seen in zip((*refs, *inputs), before, strict=True):
        for what, was, now in zip(_SEEN, seen, _seen_of(ref), strict=True):
            if not same_state(was, now):
                recorder.mistrust(f"it changes the {what} of a tensor that was there before")
    structure.call_count += 1
    structure.input_nbytes = max(
        structure.input_nbytes, sum(ref._ttr_block.nbytes for ref in inputs)
    )
    structure.passing_nbytes = max(structure.passing_nbytes, recorder.most_nbytes)
    structure.compute_ns = residency.books.main.clocks().compute_ns - before_ns
    structure.op_count = residency.books.counts.slow_op_count - before_ops
    structure.uses, structure.block_count = tuple(recorder.uses), len(own) + len(given)
    structure.writes_inputs = structure.writes_inputs or recorder.writes_any(set(given))
    structure.is_random = structure.is_random or recorder.is_random
    structure.doubt = structure.doubt or _doubt_about(
        manager, recorder, module, own, (args, kwargs), out
    )
    return out


#: What `_seen_of` looks at.
_SEEN = ("need for a gradient", "layout", "attributes")


def _seen_of(ref: Any) -> tuple[Any, ...]:
    """Return what of a TensorRef is its own, and would be its stand-in's during a native run."""
    layout = ref.size(), ref.stride(), ref.storage_offset()
    return ref.requires_grad, layout, attributes_given(ref)


@contextmanager
def _noting(recorder: Recorder) -> Iterator[None]:
    """Have a recorder note what is saved for a backward pass.

    Transforms of `torch.func` refuse to run while there are hooks. The program has none, so inside
    of a transform there are none, and what is compiled, where they are always, is left alone.
    """
    hooks = (recorder.save, _as_saved)
    refuse = graph.disable_saved_tensors_hooks

    @contextmanager
    def without_ours(message: str) -> Iterator[None]:
        is_ours = _autograd._top_saved_tensors_default_hooks(True) == hooks
        if is_ours:
            recorder.mistrust("a transform inside takes no hooks")
            _autograd._pop_saved_tensors_default_hooks()
        try:
            with refuse(message):
                yield
        finally:
            if is_ours:
                _autograd._push_saved_tensors_default_hooks(*hooks)

    graph.disable_saved_tensors_hooks = without_ours  # type: ignore[assignment]
    try:
        with graph.saved_tensors_hooks(*hooks):
            yield
    finally:
        graph.disable_saved_tensors_hooks = refuse


def _as_saved(saved: SavedVersion) -> torch.Tensor:
    saved.check()
    return saved.tensor


def kept_in(module: nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the TensorRefs and the plain tensors in the attributes of modules."""
    exchange = Exchange()
    refs = exchange.find(
        [[part.__dict__[name] for name in attributes_of(part)] for part in module.modules()]
    )
    return refs, exchange.plain_tensors()


def _doubt_about(
    manager: TensorsManager,
    recorder: Recorder,
    module: nn.Module,
    own: Any,
    given: Any,
    out: Any,
) -> str:
    """Say what speaks against running natively what has just been recorded."""
    exchange = Exchange()
    inputs = exchange.find(given)
    own_plain = {id(plain) for plain in exchange.plain_tensors()}
    results = exchange.find(out)
    reachable = {ref._ttr_block for ref in (*inputs, *results)}
    if any(id(plain) not in own_plain for plain in exchange.plain_tensors()):
        return "its result holds a plain tensor"
    if not exchange.is_open(out):
        return "its result goes on by itself"
    kept = {ref._ttr_block for ref in kept_in(module)[0]}
    return recorder.doubt(own, reachable, kept)
