"""A compiled function that is called with TensorRefs: natively, by blocks, or intercepted.

The first call of a kind is intercepted and written down (`learning.py`): what the function takes in
passing, and what speaks against running it natively. From then on the blocks of its modules and
arguments are held on the device, plain tensors hang in their places, and what plain torch has
compiled runs on those (`entry.py`). A module that does not fit is called as it is, and its repeated
layers as they were compiled. Whatever else speaks against it has the program's own function called
instead, intercepted: the numbers are those of not compiling.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base import forking
from ..base.activation import watch
from ..base.interrupts import lets_program_run
from ..base.options import settings
from ..interception.fallback import Generators
from ..interception.guards import may_bypass
from ..memory.adoption import stands_for
from ..memory.budget import SHORTAGES
from ..memory.manager import TensorsManager, tensorsManager
from ..memory.ref import TensorRef
from .beside import Beside, is_beside
from .gradients import Bundle, CompiledEntry, are_ours
from .layers import has_hooks, repeated_blocks
from .learning import learn
from .reachable import Cells, holds_refs, modules_of, reaches_refs
from .region import (
    Part,
    Region,
    Structure,
    choices_of,
    forgetter,
    key_of,
    leaves_of,
    numbers_of,
    stand_in_of,
    state_of,
)
from .slots import Slots, same_state, tensors_of
from .tensor_tree import Exchange

#: How long a call waits for that of another thread, in seconds; then it goes on beside it.
PATIENCE_S = 0.02

#: Gives the compiled form of a function, as the program has asked for.
Compile = Callable[[Any], Any]


class _Reachable(nn.Module):
    """The modules that a function can reach, as one; it is never called."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)


class CompiledCall:
    """What torch.compile gave for one function.

    Parameters
    ----------
    compiled : callable
        What plain torch gave.
    function : callable
        What the program has had compiled: a function, or a method of a module.
    compile_alike : callable
        Compiles another function with the same options.
    """

    def __init__(
        self,
        compiled: Any,
        function: Any,
        compile_alike: Compile,
        manager: TensorsManager = tensorsManager,
        entry: type[CompiledEntry] = CompiledEntry,
    ) -> None:
        self._compiled = compiled
        self._function = function
        self._compile = compile_alike
        self._manager = manager
        self._entry = entry
        self._region: Region | None = None
        self._whole: nn.Module | None = None
        #: Held while one thread runs it natively or learns it, and the program's own code with it:
        #: nobody waits for that for longer than `PATIENCE_S`.
        self._alone = forking.RLock()
        #: What that thread exchanges: of calls one within the other, the innermost last.
        self._exchanges: list[Exchange] = []
        #: Held for a moment, while it is decided which way a call goes.
        self._lock = forking.RLock()
        #: Threads that call it as it is now: its parameters must stay where they are.
        self._elsewhere_count = 0
        #: Calls that came while another thread was alone in it.
        self._beside_count = 0
        #: The layers that were compiled by themselves, each with its call.
        self._blocks: weakref.WeakKeyDictionary[nn.Module, CompiledCall] | None = None

    # -- which way --------------------------------------------------------------------------

    @lets_program_run
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with TensorRefs or without."""
        if threading.get_ident() in self._manager.residency.holds.native_entries:
            return self._compiled(*args, **kwargs)  # everything is plain here
        if is_beside():
            return self._function(*args, **kwargs)
        was_alone = self._alone._is_owned()
        try:
            with self._lock:
                way, cells, exchange, inputs, modules, known = self._begin(args, kwargs)
            if way is None:
                try:
                    region, whole = known or self._looked_at(modules)
                    return self._call_alone(region, whole, exchange, inputs, cells, args, kwargs)
                except BaseException:
                    self._manager.doubt()
                    raise
                finally:
                    self._exchanges.pop()
        finally:
            if not was_alone and self._alone._is_owned():
                self._alone.release()
        try:
            return way(*args, **kwargs)
        finally:
            with self._lock:
                self._elsewhere_count -= 1

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Say what to call on what it is given; None to run it natively, and with what (locked)."""
        modules = modules_of(self._function)
        known = None
        cells, exchange, inputs = Cells(), Exchange(), []
        if self._alone._is_owned() or self._alone.acquire(timeout=PATIENCE_S):
            cells = Cells(args, kwargs, self._function)
            inputs = exchange.find((args, kwargs, cells.contents))
            known = self._known(modules)
            given = (*args, *kwargs.values())
            way = self._way(modules, given, inputs, is_known=known is not None)
        else:
            self._beside_count += 1
            way = self._beside(self._exchanges)
        if way is None:
            self._exchanges.append(exchange)
        else:
            self._elsewhere_count += 1
        return way, cells, exchange, inputs, modules, known

    def _beside(self, exchanges: list[Exchange]) -> Any:
        return partial(Beside(exchanges).run, self._function)

    def _way(
        self, modules: list[nn.Module], given: tuple[Any, ...], inputs: list[Any], *, is_known: bool
    ) -> Any:
        """Return what to call on what it is given; None to run it natively."""
        if _are_given_modules(given):
            return self._function  # it is compiled for what its own modules hold, not for these
        if not is_known:
            owned = [tensor for module in modules for tensor in tensors_of(module)]
            if any(stands_for(tensor) is not None for tensor in owned):
                return self._beside([])  # what shares a module with it runs in another thread
            refs = [*inputs, *(tensor for tensor in owned if isinstance(tensor, TensorRef))]
            if not refs and not holds_refs(self._function):
                return self._function if reaches_refs(self._function) else self._compiled
            if any(not isinstance(tensor, TensorRef) or tensor.is_inference() for tensor in owned):
                return self._function
        if self._elsewhere_count or not self._may_run_natively():
            return self._function
        self._manager.residency.repair()
        return None

    def _may_run_natively(self) -> bool:
        residency = self._manager.residency
        return not (
            settings.compiled == "off"
            or residency.books.main.is_host
            or residency.books.main.torch_device.type != "cpu"
            or watch.on
            or settings.trace
            or not residency.feed.strategy.allows_compiled
            or not may_bypass(autocast=False, observers=False)
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and not are_ours())
            or holds_refs(self._function)
        )

    @lets_program_run
    def _call_alone(
        self,
        region: Region,
        whole: nn.Module,
        exchange: Exchange,
        inputs: list[Any],
        cells: Cells,
        args: Any,
        kwargs: Any,
    ) -> Any:
        notes, leaves = torch.is_grad_enabled(), [*leaves_of((args, kwargs))]
        key = (
            key_of(inputs),
            notes and tuple(ref.requires_grad for ref in inputs),
            choices_of(leaves),
        )
        numbers = numbers_of(inputs, leaves)
        structure = region.structures.setdefault(key, Structure())
        if structure.doubt:
            return self._function(*args, **kwargs)
        passing_nbytes = structure.passing_of(numbers)
        if passing_nbytes is None:
            self._bring(inputs)
            call, beside_count = self._function, self._beside_count
            out = learn(
                self._manager,
                whole,
                structure,
                inputs,
                numbers,
                args,
                kwargs,
                call,
                gradients=notes,
            )
            if reaches_refs(self._function, {id(module) for module in whole.modules()}):
                # Whether it uses these can depend on a flag, and the compiler asks for memory.
                structure.doubt = structure.doubt or "it holds objects or lists with tensors"
            if cells.are_rebound:
                structure.doubt = "it lets a function around it hold another tensor"
            if notes and structure.writes_inputs and any(ref.requires_grad for ref in inputs):
                structure.doubt = "it writes what it is given, which has a gradient"
            if structure.doubt and beside_count != self._beside_count:
                region.structures.pop(key, None)  # who has held what may be the other thread
            return out
        entry = self._entry(
            self._manager,
            region,
            whole,
            structure,
            exchange,
            inputs,
            partial(self._run_plain, cells),
        )
        entry.passing_nbytes = passing_nbytes
        if not entry.acquire():
            return self._call_by_blocks(entry, args, kwargs)
        generators = Generators(structure.is_random, entry.device)
        compiled_before = _compiled_count()
        try:
            out = entry.run((args, cells.contents), kwargs)
        except SHORTAGES:
            if entry.has_changed:
                raise
            structure.doubt = "memory ran out inside"
        else:
            self._manager.residency.books.counts.native_call_count += 1
            if _compiled_count() != compiled_before:
                gc.collect()  # cycles of the compiler hold the tensors that it has looked at
            return out
        generators.restore()
        return self._function(*args, **kwargs)

    @lets_program_run
    def _run_plain(self, cells: Cells, args: Any, contents: Any, **kwargs: Any) -> Any:
        cells.put(contents)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            cells.put_back()

    def _bring(self, inputs: list[Any]) -> None:
        """Fetch what it is given: also what would else run where its data are is to run there."""
        residency = self._manager.residency
        blocks = list(dict.fromkeys(ref._ttr_block for ref in inputs))
        try:
            residency.release(residency.acquire(residency.books.main, blocks, [], 0))
        except SHORTAGES:
            return
        with residency.books.lock:
            for block in blocks:
                residency.readiness.set_ready(block, residency.books.main)

    # -- what it has ------------------------------------------------------------------------

    def _known(self, modules: list[nn.Module]) -> tuple[Region, nn.Module] | None:
        """Return its modules as one region, if these and their tensors are those known of."""
        region, whole = self._region, self._whole
        if region is None or whole is None or [*whole.children()] != modules:
            return None
        slots = region.slots
        if slots is None or not slots.places:
            return None
        return (region, whole) if slots.hold() and region.parts_are_as_before() else None

    def _looked_at(self, modules: list[nn.Module]) -> tuple[Region, nn.Module]:
        """Return its modules as they are now, as one region; what differs is learned anew."""
        whole, region = self._whole, self._region
        if whole is None or [*whole.children()] != modules:
            whole, region = _Reachable(modules), None
            self._whole = whole
        if region is None:
            region = self._region = Region()
        if not region.state or not region.parts_are_as_before():
            region.structures.clear()
            region.forget()
            region.parts = [Part(part) for part in whole.modules() if part is not whole]
            region.state = state_of(whole)
        if region.slots is None or not region.slots.hold():
            slots = Slots(whole.modules(), forgetter(region))
            if not same_state(slots.places, region.places):  # one has come or gone
                region.structures.clear()
            region.own, region.places = tuple(dict.fromkeys(slots.blocks)), slots.places
            region.slots = slots  # last: with these the others are taken to be right
        return region, whole

    # -- by blocks --------------------------------------------------------------------------

    @lets_program_run
    def _call_by_blocks(self, entry: CompiledEntry, args: Any, kwargs: Any) -> Any:
        """Call a module as it is, its repeated layers as they were compiled, where they fit."""
        module = getattr(self._function, "__self__", None)
        ledger = entry.residency.books.ledgers[entry.device]
        needed = sum(block.nbytes for block in entry.blocks) + entry.passing_nbytes
        if not isinstance(module, nn.Module) or needed <= ledger.budget.limit_nbytes:
            return self._function(*args, **kwargs)
        if self._blocks is None:
            self._blocks = weakref.WeakKeyDictionary(
                (part, self._of_layer(part))
                for part in repeated_blocks(module)
                if stand_in_of(part) is None
            )
        hung = [part for part in self._blocks if stand_in_of(part) is None and not has_hooks(part)]
        for part in hung:
            part.__dict__["_compiled_call_impl"] = self._blocks[part]
        try:
            return self._function(*args, **kwargs)
        finally:
            for part in hung:
                part.__dict__.pop("_compiled_call_impl", None)

    def _of_layer(self, layer: nn.Module) -> CompiledCall:
        forward = layer.forward
        return CompiledCall(self._compile(forward), forward, self._compile, self._manager, Bundle)


def _are_given_modules(values: tuple[Any, ...]) -> bool:
    """Whether a function is called with a module of TensorRefs: it cannot reach that by itself."""
    modules = (value for value in values if isinstance(value, nn.Module))
    found = (tensor for module in modules for tensor in tensors_of(module))
    return any(isinstance(tensor, TensorRef) for tensor in found)


def _compiled_count() -> int:
    return int(torch._dynamo.utils.counters["frames"]["total"])
