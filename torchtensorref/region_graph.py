"""Gradients through a native region: torch's own graph, between two nodes of ours.

A region that runs while gradients are noted leaves torch's graph of plain tensors behind. It begins
with one `Unwrapped` for each parameter and input that has a gradient, and ends with one `Wrapped`
for each result; both are differentiable again and again. What the graph saves for the backward
pass (`torch.autograd.graph.saved_tensors_hooks`) is counted as blocks like all else, which may be
evicted until that pass begins: then all of it is fetched, and held until the pass is over. Where it
does not fit, and where the graph of a second derivative would keep it, each node is given copies.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from .blocks.block import Block
from .budget import SHORTAGES
from .devices.base import bytes_of
from .errors import TransferError
from .formulas import is_batched, node_named
from .manager import TensorsManager
from .region_results import copied, is_sole, settled
from .views import make_ref, view_over

_current_pass = torch._C._current_graph_task_id

#: The engine runs a node with this number as soon as it can, as it does where gradients end.
AT_ONCE = 2**63 - 1

#: The lower bits of a version count writes; the upper ones tell whose versions these are.
WRITES = (1 << 16) - 1

_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


class Saved:
    """What a node of the graph has saved: a tensor for the backward pass."""

    __slots__ = ("__weakref__", "block", "graph", "plain", "version", "watched", "watched_version")

    def __init__(self, graph: Graph, plain: torch.Tensor) -> None:
        self.graph = graph
        #: Counts versions together with the tensor that was saved, and is no part of the graph.
        self.plain = plain.detach()
        self.version = plain._version
        #: The block over its bytes, once the region has been left; None: they are not ours.
        self.block: Block | None = None
        #: The TensorRef by which the program may write the bytes from now on, and its version.
        self.watched: Any = None
        self.watched_version = 0


def _unpack(saved: Saved) -> torch.Tensor:
    """Give a node what it has saved. Written out flat: it runs between large kernels."""
    plain, watched = saved.plain, saved.watched
    if plain._version != saved.version or (
        watched is not None and watched._version != saved.watched_version
    ):
        _raise_written(saved)
    if saved.block is None or _current_pass() in saved.graph.passes:
        return plain
    return saved.graph.copy_of(saved.block, plain)


def _raise_written(saved: Saved) -> None:
    plain, version = saved.plain, saved.version
    now = plain._version
    if saved.watched is not None:
        now, version = saved.watched._version, saved.watched_version
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{plain.type()} {list(plain.shape)}] is at version {now}; expected version "
        f"{version} instead. Hint: run it with tensorsManager.regions = False and "
        "torch.autograd.set_detect_anomaly(True) to find the operation that failed to compute its "
        "gradient."
    )


class Graph:
    """The graph that one native run leaves behind, and the passes through it."""

    def __init__(self, manager: TensorsManager) -> None:
        self.manager = manager
        self.device = manager.residency.main
        #: What nodes have saved, as long as they hold it.
        self.saved: list[weakref.ref[Saved]] = []
        #: Backward passes that hold all of it on the device, by the engine's number; and those
        #: that could not.
        self.passes: set[int] = set()
        self.refused: set[int] = set()
        #: By what the program may write the bytes of a plain tensor, by the number in its version.
        self._writers: list[Any] = [None]

    @property
    def residency(self) -> Any:
        """The present one: the program may have changed the device since."""
        return self.manager.residency

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which what nodes save is noted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, plain: torch.Tensor) -> Saved:
        saved = Saved(self, plain)
        self.saved.append(weakref.ref(saved))
        return saved

    def settle(self, block_for: Callable[[torch.Tensor], Block | None]) -> None:
        """Count what has been saved, when the region is left.

        Parameters
        ----------
        block_for : callable
            Gives the block over a saved tensor's bytes, and makes one where there is none.
        """
        living = [saved for reference in self.saved if (saved := reference()) is not None]
        self.saved = [weakref.ref(saved) for saved in living]
        for saved in living:
            if type(saved.plain) is not torch.Tensor or saved.plain.layout is not torch.strided:
                continue
            saved.block = block_for(saved.plain)
            version = saved.plain._version
            if (version ^ saved.version) & WRITES == 0:  # else written inside after it was saved
                saved.version = version
            saved.watched = watched = self._writers[version >> 16]
            saved.watched_version = 0 if watched is None else watched._version
        self._writers = [None]

    def _mark(self, plain: torch.Tensor, writer: Any) -> None:
        """Note by what the program may write a plain tensor, in its version.

        All that shares its memory as autograd sees it shares the version, and nothing else does.
        """
        number = len(self._writers)
        if number <= WRITES:
            self._writers.append(writer)
            _set_versions((plain,), (number << 16 | plain._version & WRITES,))

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks over what is still saved."""
        for reference in self.saved:
            saved = reference()
            if saved is not None and saved.block is not None:
                yield saved.block

    # -- entering and leaving -------------------------------------------------------------------

    def inside_for(self, ref: Any, alias: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor that stands for a TensorRef inside; `alias` is over its bytes."""
        inside = self.unwrapped(ref, alias) if ref.requires_grad else alias
        self._mark(inside, ref)
        return inside

    def watch_result(self, plain: torch.Tensor, ref: Any) -> None:
        """Note by which TensorRef the program may write a result."""
        if plain._version <= WRITES:  # else it shares its version with what was given
            with torch.no_grad():
                # Another object: the result's own graph leads to what has been saved.
                self._mark(plain, ref.detach())

    def unwrapped(self, ref: Any, plain: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor that stands for a TensorRef inside, with its gradient.

        The engine hands its gradient out when it is through with the region, so that our code runs
        once and not between large kernels, which leave cold caches: that took seven times as long.
        """
        inside: torch.Tensor = Unwrapped.apply(self, ref, lambda: plain)
        return inside

    def wrapped(self, plain: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """Return the TensorRef of a result, with its gradient; `make` makes it without."""
        name = "" if plain.grad_fn is None else plain.grad_fn.name()
        return _wrapped_as(name.rpartition("::")[2]).apply(self, plain, make)

    # -- passes ---------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Fetch and hold what has been saved until the engine's present pass is over.

        Not where the pass makes a graph itself, which would go on holding what nobody counts.
        """
        number = _current_pass()
        if number in self.passes or number in self.refused or torch.is_grad_enabled():
            return
        hold = _Hold(self, number)
        # Announce first, look second: who evicts does it the other way round.
        self.residency.native_blocks[hold.key] = _Living(self)
        if not self._fetch(list(dict.fromkeys(self.blocks()))):
            self.refused.add(number)
            hold.end()
            return
        self.passes.add(number)
        # The engine keeps it exactly as long as the pass: also one that fails.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(hold)

    def _fetch(self, blocks: list[Block]) -> bool:
        """Bring blocks that are announced to the device; False if they do not fit together."""
        residency, device = self.residency, self.device
        for block in blocks:
            block.last_use = residency.tick
        missing = [block for block in blocks if block.ready is not device]
        if not missing:
            return True
        ledger = residency.ledgers.get(device)
        if ledger is None or sum(b.nbytes for b in blocks) > ledger.budget.limit_nbytes:
            return False
        try:
            residency.release(residency.acquire(device, missing, (), 0))
        except SHORTAGES:
            return False
        with residency.lock:
            for block in missing:
                residency.set_ready(block, device)
        return True

    def copy_of(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device that nobody counts, for one node; laid out as `like`."""
        residency, device = self.residency, self.device
        try:
            if device not in residency.ledgers:
                raise TransferError(f"{device.name} is not in use any more")
            held = residency.acquire(device, (block,), (), block.nbytes)
        except SHORTAGES:
            base = residency.peek(block)
            copy = bytes_of(base).to(device.torch_device, copy=True)
        else:
            try:
                copy = bytes_of(block.base_on(device)).clone()
            finally:
                residency.release(held)
        return view_over(like, copy.untyped_storage())

    # -- gradients ------------------------------------------------------------------------------

    def plain_gradient(self, grad: Any) -> Any:
        """Return a gradient from outside as a plain tensor for the graph to keep."""
        if type(grad) is not self.manager.ref_type:
            return grad
        return self.copy_of(grad._b, grad)

    def wrapped_gradient(self, grad: torch.Tensor, label: torch.device) -> Any:
        """Return a gradient from inside as a TensorRef of its own bytes."""
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided or is_batched(grad):
            return grad
        plain = grad.data if is_sole(grad) else copied(grad)
        plain, block, device = settled(self.residency, plain, self.device)
        return make_ref(self.manager.ref_type, plain, block, device, label)


def run_at_once(inside: torch.Tensor) -> None:
    """Have the gradient of a plain tensor inside handed out as soon as it is there.

    Where a tensor hangs in more than two places its gradients are to be added up in the order in
    which they come.
    """
    node: Any = inside.grad_fn
    node._set_sequence_nr(AT_ONCE)


class _Living:
    """What a graph has saved, for who wants to evict: without holding it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = weakref.ref(graph)

    def __iter__(self) -> Iterator[Block]:
        graph = self._graph()
        return iter(()) if graph is None else graph.blocks()


class _Hold:
    """Holds what a graph has saved as long as the engine holds this."""

    def __init__(self, graph: Graph, number: int) -> None:
        self.key = (threading.get_ident(), id(self))
        self._graph = graph
        self._number = number

    def __call__(self) -> None:
        """End: the pass is over."""
        self.end()
        with self._graph.residency.lock:
            self._graph.residency.unpinned.notify_all()

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """Let go; again is nothing."""
        self._graph.residency.native_blocks.pop(self.key, None)
        self._graph.passes.discard(self._number)


class Unwrapped(torch.autograd.Function):
    """From a TensorRef to the plain tensor that stands for it."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, ref: Any, plain: Callable[[], torch.Tensor]) -> Any:
        """Hand the plain tensor on."""
        ctx.graph = graph
        ctx.label = ref.device
        ctx.set_materialize_grads(False)
        return plain()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Make the gradient a TensorRef."""
        (grad,), graph, label = grads, ctx.graph, ctx.label
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled() and grad.requires_grad:
            grad = graph.wrapped(grad, lambda plain: graph.wrapped_gradient(plain, label))
        else:
            grad = graph.wrapped_gradient(grad, label)
        return None, grad, None


class Wrapped(torch.autograd.Function):
    """From a plain result to its TensorRef."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, plain: Any, make: Callable[[Any], Any]) -> Any:
        """Make the TensorRef."""
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return make(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Take the gradient inside, when all that has been saved is there."""
        (grad,), graph = grads, ctx.graph
        if grad is None:
            return None, None, None
        graph.begin_pass()
        plain = graph.plain_gradient(grad)
        has_graph = torch.is_grad_enabled() and grad.requires_grad
        return None, graph.unwrapped(grad, plain) if has_graph else plain, None


@functools.cache
def _wrapped_as(name: str) -> Any:
    """Return `Wrapped` under the name of the node before it, as the program expects to see it."""
    return node_named(name or "WrappedBackward", Wrapped)
