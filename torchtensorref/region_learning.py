"""Learning a region: an intercepted call of a module is written down, and judged."""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .blocks.block import Block
from .config import settings
from .exchange import Exchange
from .manager import TensorsManager
from .recorder import Recorder
from .region import NOWHERE, Structure, attributes_of, tensors_of
from .views import newcomers

#: Where gradients are noted, entering and leaving takes as long as so many operators.
OPS_AT_LEAST = 8


def learn(
    manager: TensorsManager,
    module: nn.Module,
    structure: Structure,
    inputs: list[Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Run a module intercepted, and write down what the call uses, makes and leaves behind."""
    residency = manager.residency
    refs = [ref for _, _, ref in tensors_of(module)]
    if any(type(ref) is not manager.ref_type for ref in refs):
        return module._call_impl(*args, **kwargs)  # another thread's region has a part of it
    in_order = dict.fromkeys(ref._b for ref in refs)
    own = set(in_order)
    given = [block for block in dict.fromkeys(ref._b for ref in inputs) if block not in own]
    recorder: Recorder | None = Recorder(tuple(in_order), given)
    with residency.lock:
        if residency.recorder is not None:
            recorder = None
        else:
            residency.recorder = recorder
            residency.fast_device = residency.fast_host = NOWHERE
    if recorder is None:
        return module._call_impl(*args, **kwargs)
    made: list[weakref.ref[Any]] = []
    newcomers.refs = made if recorder.notes_gradients else None
    before_ns = residency.main.clocks().compute_ns
    before_ops = residency.counts.op_count
    had_gradients = [ref.requires_grad for ref in inputs]
    try:
        out = module._call_impl(*args, **kwargs)
    finally:
        with residency.lock:
            residency.recorder = newcomers.refs = None
            residency.fast_device, residency.fast_host = residency.main, residency.host
    if had_gradients != [ref.requires_grad for ref in inputs]:
        recorder.mistrust("it decides whether what it is given has a gradient")
    structure.call_count += 1
    structure.input_nbytes = max(structure.input_nbytes, sum(ref._b.nbytes for ref in inputs))
    structure.passing_nbytes = max(structure.passing_nbytes, recorder.most_nbytes)
    structure.compute_ns = residency.main.clocks().compute_ns - before_ns
    structure.op_count = residency.counts.op_count - before_ops
    structure.uses, structure.block_count = tuple(recorder.uses), len(own) + len(given)
    structure.writes_inputs = structure.writes_inputs or recorder.writes_any(set(given))
    structure.is_random = structure.is_random or recorder.is_random
    structure.doubt = structure.doubt or _doubt_about(
        manager, recorder, module, own, (args, kwargs), out, made
    )
    return out


def kept_in(module: nn.Module, ref_type: type) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the TensorRefs and the plain tensors in the attributes of modules."""
    exchange = Exchange(ref_type)
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
    made: list[weakref.ref[Any]],
) -> str:
    """Say what speaks against running natively what has just been recorded."""
    exchange = Exchange(manager.ref_type)
    inputs = exchange.find(given)
    own_plain = {id(plain) for plain in exchange.plain_tensors()}
    results = exchange.find(out)
    reachable = {ref._b for ref in (*inputs, *results)}
    if any(id(plain) not in own_plain for plain in exchange.plain_tensors()):
        return "its result holds a plain tensor"
    if not exchange.is_open(out):
        return "its result goes on by itself"
    if recorder.notes_gradients:
        if recorder.op_count < OPS_AT_LEAST and settings.regions != "forced":
            return "it is too small to gain anything where gradients are noted"
        doubt = _doubt_about_graph(module, inputs, results, own)
        if doubt or recorder.writes_any({ref._b for ref in inputs}):
            return doubt or "it writes what it is given, and gradients are noted"
        reachable |= _held_by_graph(made, recorder.alive() - reachable)
    kept = {ref._b for ref in kept_in(module, manager.ref_type)[0]}
    return recorder.doubt(own, reachable, kept)


# -- gradients ----------------------------------------------------------------------------------


def _doubt_about_graph(
    module: nn.Module, inputs: list[Any], results: list[Any], own: set[Block]
) -> str:
    """Say what in the graph that a call has left behind would be another one natively.

    Where a tensor is used in several places of the region and in others besides, torch sums its
    gradients in the order in which they come; a region would first sum its own: other last bits.
    """
    blocks = [ref._b for ref in results if not any(ref is given for given in inputs)]
    if len(set(blocks)) < len(blocks) or not own.isdisjoint(blocks):
        return "its results share memory"
    if not {ref._b for ref in inputs}.isdisjoint(blocks):
        return "its result is a view of what it is given"
    edges: collections.Counter[Any] = collections.Counter()
    made = [ref for ref in results if not any(ref is given for given in inputs)]
    if any(ref.is_leaf and ref.requires_grad and ref._b not in own for ref in made):
        return "its result is a leaf"
    ends = {(ref.grad_fn, ref.output_nr) for ref in inputs if ref.grad_fn is not None}
    for node in _nodes(results, {node for node, _ in ends}):
        kind = type(node)
        if issubclass(kind, torch.autograd.function.BackwardCFunction) and not getattr(
            kind, "stands_for_torchs", False
        ):
            return f"{kind.__name__} is in Python"
        for successor, place in node.next_functions:
            variable = getattr(successor, "variable", None)
            edges[(successor, place) if variable is None else id(variable)] += 1
    if any(edges[end] > 1 for end in ends):
        return "it uses what it is given more than once, and gradients are noted"
    if any(edges[ref.grad_fn, ref.output_nr] for ref in made if ref.grad_fn is not None):
        # Natively a result's gradient would not go on to what else is made of it.
        return "one of its results is made of another, and gradients are noted"
    places = collections.Counter(id(ref) for _, _, ref in tensors_of(module))
    places.update(id(ref) for ref in inputs if ref.is_leaf)
    if any(edges[key] > count for key, count in places.items()):
        return "it uses a parameter more than once, and gradients are noted"
    return ""


def _nodes(results: list[Any], ends: set[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph between the results and where it ends."""
    found = dict.fromkeys(ref.grad_fn for ref in results if ref.grad_fn not in (None, *ends))
    pending = list(found)
    while pending:
        node = pending.pop()
        yield node
        for successor, _ in node.next_functions:
            if successor is not None and successor not in ends and successor not in found:
                found[successor] = None
                pending.append(successor)


def _held_by_graph(made: list[weakref.ref[Any]], blocks: set[Block]) -> set[Block]:
    """Return those blocks that nothing in Python refers to: only the graph has saved them."""
    held: set[Block] = set()
    kept: set[Block] = set()
    for reference in made:
        ref = reference()
        if ref is not None and ref._b in blocks:
            # Here, in the call, and once by torch, as long as something in C++ refers to it.
            is_kept = sys.getrefcount(ref) > 3 or ref._use_count() < 2
            (kept if is_kept else held).add(ref._b)
    return held - kept
