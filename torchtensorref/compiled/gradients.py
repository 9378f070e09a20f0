"""Gradients of what is compiled: plain torch's own backward pass, on what it saved as TensorRefs.

Inside a call the compiled function notes its graph on plain tensors. What it saves for its backward
pass is packed: when the call ends it is a TensorRef as any other, and may leave the device. Outside
the call is one node of the program's own graph. Its backward pass is a native run of what the
compiler has made for it, with all that was saved held on the device; where that does not fit, what
was saved is brought home, and it runs there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..base.activation import disabled
from ..base.interrupts import lets_program_run
from ..memory.ledger import Ledger
from ..memory.manager import TensorsManager, tensorsManager
from ..memory.ref import TensorRef
from .entry import Entry
from .recorder import SavedVersion
from .region import Region, Structure, state_of
from .slots import Slots, data_of
from .tensor_tree import Exchange

#: A backward pass has about twice the arithmetic of its forward pass.
BACKWARD_SHARE = 2

_autograd = torch._C._autograd


def are_ours() -> bool:
    """Whether what is saved for a backward pass may be packed by us: nobody else's hooks are on."""
    return (
        _autograd._top_saved_tensors_default_hooks(True) is None
        and _autograd._saved_tensors_hooks_get_disabled_error_message() is None
        and not torch._dynamo.compiled_autograd.compiled_autograd_enabled
    )


class Saved:
    """A tensor that autograd keeps for a backward pass."""

    __slots__ = ("__weakref__", "kept", "plain", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        #: The tensor itself, while a native run holds its bytes. A tensor of its own, and no view,
        #: which would hold the graph: so it can be told whether somebody else holds the memory.
        self.plain: torch.Tensor | None = data_of(tensor)
        #: What is kept of it in between: a TensorRef, or a tensor that is not managed.
        self.kept: Any = None
        #: Whether the function itself has written it, as is asked while it runs, and found then.
        self.written: SavedVersion | RuntimeError | None = SavedVersion(tensor)

    def end_of_run(self) -> None:
        """Find out whether it was written in the run that has saved it."""
        try:
            self.check()
            self.written = None
        except RuntimeError as error:
            self.written = error.with_traceback(None)

    def check(self) -> None:
        """Raise what torch raises where the function itself has written it."""
        if isinstance(self.written, RuntimeError):
            raise self.written
        if self.written is not None:
            self.written.check()


class CompiledEntry(Entry):
    """One native run of what is compiled; what it notes for gradients becomes ours at its end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.notes = torch.is_grad_enabled()
        self.saved: list[Saved] = []
        #: All that was saved; what the function has let go of again is gone.
        self.packed: list[weakref.ref[Saved]] = []
        #: What has a gradient: TensorRefs, each with the leaf that stood for it.
        self.leaves: dict[int, tuple[Any, torch.Tensor]] = {}
        #: Results that have one, each with the edge of the graph inside that leads to it.
        self.results: list[tuple[Any, Any]] = []

    @lets_program_run
    def run(self, args: Any, kwargs: Any) -> Any:
        """Run it, and connect its results with what they were made of."""
        if not self.notes:
            return super().run(args, kwargs)
        call = self.call
        self.call = partial(self._run_noting, call)
        try:
            return super().run(args, kwargs)
        finally:
            self.call = call  # no cycle: what is let go of is gone at once

    @lets_program_run
    def _run_noting(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        # The graph keeps the hooks, which must not lead back to what holds the graph.
        with saved_tensors_hooks(partial(_pack, self.packed), _unpack):
            return call(*args, **kwargs)

    def _stand_in(self, ref: Any) -> torch.Tensor:
        plain = super()._stand_in(ref)
        if self.notes and ref.requires_grad:
            plain = plain.detach().requires_grad_()
            self.leaves[id(ref)] = ref, plain
        return plain

    def _wrap(self, out: Any, args: Any, kwargs: Any) -> Any:
        if not self.notes:
            return super()._wrap(out, args, kwargs)
        for ref, plain in zip(self.refs, self.plains, strict=True):
            if plain.requires_grad:
                self.leaves[id(ref)] = ref, plain
        self.saved = [saved for weak in self.packed if (saved := weak()) is not None]
        for saved in self.saved:
            saved.end_of_run()
        others = self._held_by_others(out)
        out = super()._wrap(out, args, kwargs)
        for saved in self.saved:
            held = saved.plain
            assert held is not None
            key = held.untyped_storage()._cdata
            # A result's view has its base hold the memory, too; that is a block by now.
            is_other = key in others and self._block_over(key) is None
            saved.kept, saved.plain = held if is_other else self.ref_for(held), None
        return out

    def _held_by_others(self, out: Any) -> set[int]:
        """Return the storages of saved tensors that somebody besides the graph holds.

        A constant of a graph comes again in the next call: its memory is not ours to empty.
        """
        exchange = Exchange()
        exchange.find(out)
        tensors = {id(plain): plain for plain in exchange.plain_tensors()}
        tensors.update(
            (id(held), held) for saved in self.saved if (held := saved.plain) is not None
        )
        holders = Counter(
            plain.untyped_storage()._cdata
            for plain in tensors.values()
            if type(plain) in (torch.Tensor, nn.Parameter) and plain.layout is torch.strided
        )
        return {
            key
            for key, count in holders.items()
            if self._block_over(key) is None and _holder_count(key) > count
        }

    def ref_for(self, plain: torch.Tensor) -> Any:
        """Make the TensorRef of a tensor; that of a result with a gradient is to be connected."""
        if not (self.notes and plain.requires_grad) or plain.grad_fn is None:
            return super().ref_for(plain)
        ref = super().ref_for(data_of(plain))  # a block must not hold the graph that holds blocks
        if isinstance(ref, TensorRef):
            self.results.append((ref, get_gradient_edge(plain)))
            return ref
        self.mistrust("a result with a gradient is not managed")
        return plain

    def _connect(self) -> None:
        """Make the results that have a gradient those of a node in the program's graph."""
        if not self.results:
            return
        refs = [ref for ref, _ in self.leaves.values()]
        kept = {saved.kept._ttr_block for saved in self.saved if isinstance(saved.kept, TensorRef)}
        given = [ref for _, ref, _ in self.unwrapped]
        results = [ref for ref, _ in self.results]
        read = {id(r): r for r in (*self.refs, *given, *results) if r._ttr_block in kept}
        _Node.apply(Backward(self), results, [*read.values()], *refs)
        self.results = []


class Bundle(CompiledEntry):
    """A layer's run; what comes after it is fetched while it is computed."""

    #: Whether room is made for gradients, too: what is fetched ahead must not take it.
    has_gradients = False

    def acquire(self) -> bool:
        """Hold the layer's blocks, and let the strategy ask for what comes next."""
        if not super().acquire():
            return False
        residency = self.residency
        if self.notes or self.has_gradients:
            return True
        if residency.books.is_pressed and residency.books.looks_ahead:
            residency.prefetcher.issue_wishes(self.device)
        return True


class _Node(torch.autograd.Function):
    """A call in the graph of the program."""

    @staticmethod
    def forward(ctx: Any, backward: Any, results: list[Any], read: list[Any], *_: Any) -> Any:
        """Hand the results on; what the backward pass reads must not be written until then."""
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*read)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Run the backward pass that the compiler has made."""
        _ = ctx.saved_tensors  # raises where one of them was written
        with torch.no_grad():
            found = ctx.run_backward(gradients, ctx.needs_input_grad[3:])
        if torch.is_grad_enabled():
            found = _Once.apply(torch.empty((0,), requires_grad=True), *found)
        return None, None, None, *found


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated, and say so: the compiler made no second pass."""

    @staticmethod
    def forward(ctx: Any, _: Any, *gradients: Any) -> Any:
        """Hand them on."""
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise RuntimeError("what torch.compile gave cannot be differentiated twice")


class Backward:
    """The backward pass of one call."""

    def __init__(self, entry: CompiledEntry) -> None:
        self._manager: TensorsManager = entry.manager
        self._saved: list[Saved] = entry.saved
        self._heads = [edge for _, edge in entry.results]
        self._leaves = [get_gradient_edge(leaf) for _, leaf in entry.leaves.values()]
        forward = entry.structure
        #: Not recorded, but put together from what is known.
        self._structure = Structure(
            passing_nbytes=_passing_nbytes(entry),
            compute_ns=forward.compute_ns * BACKWARD_SHARE,
            op_count=forward.op_count * BACKWARD_SHARE,
        )

    @lets_program_run
    def __call__(self, gradients: Any, needed: Any) -> list[Any]:
        """Return the gradient of each leaf; None for those that are not needed."""
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        wanted = [place for place, is_needed in enumerate(needed) if is_needed]
        found: list[Any] = [None] * len(needed)
        if not given or not wanted:
            return found
        keeps = _autograd._get_current_graph_task_keep_graph()
        call = partial(
            torch.autograd.grad,
            [self._heads[place] for place in given],
            [self._leaves[place] for place in wanted],
            retain_graph=keeps,
            allow_unused=True,
        )
        try:
            several = self._run(call, [gradients[place] for place in given])
        except BaseException:
            self._manager.doubt()
            raise
        if not keeps:
            self._saved = []
        for place, gradient in zip(wanted, several, strict=True):
            found[place] = gradient
        return found

    @lets_program_run
    def _run(self, call: Any, gradients: list[Any]) -> Any:
        manager = self._manager
        manager.residency.repair()
        entry = self._entry(call, gradients)
        if entry.acquire():
            found = entry.run((gradients,), {})
            manager.residency.books.counts.native_call_count += 1
        else:
            plain = [manager.ownership.plain_at_home(gradient) for gradient in gradients]
            with disabled():
                found = call(plain)
            found = manager.adopt(found, sole=True)
        return found

    def _entry(self, call: Any, gradients: list[Any]) -> _BackwardEntry:
        refs = [saved.kept for saved in self._saved if isinstance(saved.kept, TensorRef)]
        nothing = nn.Module()
        region = Region(state=state_of(nothing), slots=Slots([nothing]))
        region.own = tuple(dict.fromkeys(ref._ttr_block for ref in refs))
        exchange = Exchange()
        inputs = exchange.find(gradients)
        entry = _BackwardEntry(
            self._manager,
            region,
            nothing,
            self._structure,
            exchange,
            inputs,
            call,
        )
        entry.unpacked = self._saved
        return entry


def _passing_nbytes(entry: CompiledEntry) -> int:
    """Estimate what a backward pass takes in passing.

    That is its results, two gradients between them, and what the forward pass has taken and not
    saved. What is saved is held, and counted with what is held.
    """
    saved = {saved.kept._ttr_block for saved in entry.saved if isinstance(saved.kept, TensorRef)}
    made: list[int] = [block.nbytes for block in saved.difference(entry.blocks)]
    gradients_nbytes: int = sum(leaf.nbytes for _, leaf in entry.leaves.values())
    rest_nbytes = max(entry.passing_nbytes - sum(made), 0)
    largest_nbytes: int = max(made, default=0)
    return gradients_nbytes + 2 * largest_nbytes + rest_nbytes


class _BackwardEntry(Bundle):
    """One native run of a backward pass."""

    has_gradients = True
    keeps_views = False
    unpacked: list[Saved]

    def _is_worth_it(self, ledger: Ledger, passing_nbytes: int) -> bool:
        return True  # else it runs at home

    @lets_program_run
    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        try:
            for saved in self.unpacked:
                kept = saved.kept
                is_ref = isinstance(kept, TensorRef)
                saved.plain = super()._plain_input(kept) if is_ref else kept
            return super()._run_plain(args, kwargs)
        finally:
            for saved in self.unpacked:
                saved.plain = None


def _holder_count(key: int) -> int:
    """Return how many tensors hold a storage; Python's own hold on it differs between versions."""
    alone = torch._C._VariableFunctions.empty((0,))
    beside = torch._C._storage_Use_Count(alone.untyped_storage()._cdata) - 1
    count: int = torch._C._storage_Use_Count(key) - beside
    return count


def _pack(several: list[weakref.ref[Saved]], tensor: torch.Tensor) -> Saved:
    saved = Saved(tensor)
    several.append(weakref.ref(saved))
    return saved


def _unpack(saved: Saved) -> Any:
    saved.check()
    if saved.plain is not None:
        return saved.plain
    return tensorsManager.ownership.plain_at_home(saved.kept)  # it runs at home
