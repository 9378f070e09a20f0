"""Learning a region: an intercepted call of a module is written down, and judged."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import gt
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from ..base.interrupts import holds_operands, lets_program_run
from ..memory.manager import TensorsManager
from ..memory.ref import TensorRef, attributes_given, is_of_own_class
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
    numbers: tuple[int, ...],
    args: Any,
    kwargs: Any,
    call: Any = None,
    *,
    gradients: bool = False,
) -> Any:
    """Run a module intercepted, and write down what the call uses, makes and leaves behind.

    `call` runs it, if not its own: a function that was compiled, with the modules it can reach.
    What it takes in passing is kept by `numbers`, the sizes and numbers that it is given.
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
    attributes = _attributes(module)
    made: list[Any] = []  # the only one here who holds the result
    reached = args, kwargs, made
    elsewhere = partial(_elsewhere, recorder, inputs, module, attributes, reached)
    held_before = elsewhere()
    try:
        with _noting(recorder) if gradients else nullcontext():
            made.append(call(*args, **kwargs))
    finally:
        with residency.books.lock:
            residency.recorder = None
            residency.books.sees_all = False
            residency.books.reopen()
    if any(map(gt, elsewhere(), held_before)):
        gc.collect()  # what only cycles hold is nobody's
        if any(map(gt, elsewhere(), held_before)):
            recorder.mistrust("it keeps a tensor where neither its arguments nor its result lead")
    if any(map(is_of_own_class, (*refs, *inputs))):
        recorder.mistrust("a tensor is of a class of the program's")
    for ref, seen in zip((*refs, *inputs), before, strict=True):
        for what, was, now in zip(_SEEN, seen, _seen_of(ref), strict=True):
            if not same_state(was, now):
                recorder.mistrust(f"it changes the {what} of a tensor that was there before")
    structure.note_passing(numbers, recorder.most_nbytes)
    structure.compute_ns = residency.books.main.clocks().compute_ns - before_ns
    structure.op_count = residency.books.counts.slow_op_count - before_ops
    structure.uses, structure.block_count = tuple(recorder.uses), len(own) + len(given)
    structure.writes_inputs = structure.writes_inputs or recorder.writes_any(set(given))
    structure.is_random = structure.is_random or recorder.is_random
    structure.doubt = structure.doubt or _doubt_about(
        manager, recorder, module, own, (args, kwargs), made[0]
    )
    return made[0]


#: What `_seen_of` looks at.
_SEEN = ("memory", "dtype", "need for a gradient", "layout", "attributes")


def _seen_of(ref: Any) -> tuple[Any, ...]:
    """Return what of a TensorRef is its own, and would be its stand-in's during a native run."""
    layout = ref.size(), ref.stride(), ref.storage_offset()
    return ref._ttr_block, ref.dtype, ref.requires_grad, layout, attributes_given(ref)


def _elsewhere(
    recorder: Recorder, refs: list[Any], module: nn.Module, before: Any, reached: Any
) -> list[int]:
    """Count who holds each argument in Python where a native run would not put it back.

    It does in what is given, in the result, and in attributes that are others than `before`. All
    that C++ holds (views, a graph) is one holder to Python.
    """
    now = _attributes(module)
    fresh = [value for place, value in now.items() if before.get(place) is not value]
    places = Exchange().places_in(reached, fresh)
    del now, fresh
    return [
        getrefcount(ref) - (ref._use_count() > 1) - places[id(ref)] - recorder.saved_count(ref)
        for ref in refs
    ]


def _attributes(module: nn.Module) -> dict[Any, Any]:
    """Return all attributes of modules, by the module's id and the name."""
    return {
        (id(part), name): part.__dict__[name]
        for part in module.modules()
        for name in attributes_of(part)
    }


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
    refs = exchange.find([*_attributes(module).values()])
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
    if any(map(is_of_own_class, results)):
        return "its result is of a class of the program's"
    reachable = {ref._ttr_block for ref in (*inputs, *results)}
    if any(id(plain) not in own_plain for plain in exchange.plain_tensors()):
        return "its result holds a plain tensor"
    if not exchange.is_open(out):
        return "its result goes on by itself"
    kept = {ref._ttr_block for ref in kept_in(module)[0]}
    return recorder.doubt(own, reachable, kept)
