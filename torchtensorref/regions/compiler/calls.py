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

from ...base.activation import watch
from ...base.interrupts import lets_program_run
from ...base.options import settings
from ...interception.fallback import Generators
from ...interception.guards import may_bypass
from ...memory.budget import SHORTAGES
from ...memory.ledger import Ledger
from ...memory.manager import TensorsManager, tensorsManager
from ...memory.ref import TensorRef
from ..entry import Entry
from ..learning import learn
from ..region import (
    Part,
    Region,
    Slot,
    Structure,
    is_region,
    key_of,
    stand_in_of,
    state_of,
    tensors_of,
)
from ..tensor_tree import Exchange
from .blocks import has_hooks, repeated_blocks
from .reachable import Cells, holds_refs, modules_of

#: Gives the compiled form of a function, as the program has asked for.
Compile = Callable[[Any], Any]


class _Reachable(nn.Module):
    """The modules that a function can reach, as one; it is never called."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)


class _Bundle(Entry):
    """A layer's run: what it uses is fetched as one bundle, whether memory is short or not."""

    def _is_worth_it(self, ledger: Ledger, passing_nbytes: int) -> bool:
        return True


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
        entry: type[Entry] = Entry,
    ) -> None:
        self._compiled = compiled
        self._function = function
        self._compile = compile_alike
        self._manager = manager
        self._entry = entry
        self._region: Region | None = None
        self._whole: nn.Module | None = None
        self._lock = threading.RLock()
        #: The layers that were compiled by themselves, each with its call.
        self._blocks: weakref.WeakKeyDictionary[nn.Module, CompiledCall] | None = None

    # -- which way --------------------------------------------------------------------------

    @lets_program_run
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with TensorRefs or without."""
        if threading.get_ident() in self._manager.residency.holds.native_entries:
            return self._compiled(*args, **kwargs)  # everything is plain here
        cells = Cells(args, kwargs, self._function)
        exchange = Exchange()
        inputs = exchange.find((args, kwargs, cells.contents))
        modules = modules_of(self._function)
        owned = [tensor for module in modules for _, _, tensor in tensors_of(module)]
        refs = [*inputs, *(tensor for tensor in owned if type(tensor) is TensorRef)]
        if not refs and not holds_refs(self._function):
            return self._compiled(*args, **kwargs)
        if not self._may_run_natively(owned):
            return self._function(*args, **kwargs)
        self._manager.residency.repair()
        with self._lock:  # while another thread runs it, its parameters are plain
            try:
                return self._call_alone(modules, exchange, inputs, cells, args, kwargs)
            except BaseException:
                self._manager.doubt()
                raise

    def _may_run_natively(self, owned: list[Any]) -> bool:
        residency = self._manager.residency
        return not (
            settings.regions == "off"
            or residency.books.main.is_host
            or residency.books.main.torch_device.type != "cpu"
            or watch.on
            or settings.trace
            or not residency.feed.strategy.allows_regions
            or not may_bypass(autocast=False, observers=False)
            or torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or any(type(tensor) is not TensorRef or tensor.is_inference() for tensor in owned)
            or holds_refs(self._function)
        )

    @lets_program_run
    def _call_alone(
        self,
        modules: list[nn.Module],
        exchange: Exchange,
        inputs: list[Any],
        cells: Cells,
        args: Any,
        kwargs: Any,
    ) -> Any:
        region, whole = self._look_at(modules)
        structure = region.structures.setdefault(key_of(inputs), Structure())
        if structure.doubt:
            return self._function(*args, **kwargs)
        if not structure.call_count:
            self._bring(inputs)
            call = self._function
            return learn(self._manager, whole, structure, inputs, args, kwargs, call)
        entry = self._entry(
            self._manager,
            self._manager.native.unwatched(),
            region,
            whole,
            structure,
            exchange,
            inputs,
            partial(self._run_plain, cells),
        )
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
            self._manager.native.native_count += 1
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
                residency.set_ready(block, residency.books.main)

    # -- what it has ------------------------------------------------------------------------

    def _look_at(self, modules: list[nn.Module]) -> tuple[Region, nn.Module]:
        """Return its modules as they are now, as one region; what differs is learned anew."""
        if self._whole is None or [*self._whole.children()] != modules:
            self._whole, self._region = _Reachable(modules), None
        whole, region = self._whole, self._region
        if region is None:
            region = self._region = Region(weakref.ref(whole))
        if not region.state or not all(part.is_as_before() for part in region.parts):
            for part in whole.modules():
                if is_region(part):
                    del part.__dict__["_compiled_call_impl"]  # the compiler would stumble over it
            region.structures.clear()
            region.forget()
            region.parts = [Part(part) for part in whole.modules() if part is not whole]
            region.state = state_of(whole)
        slots = [
            Slot(registry, name, weakref.ref(ref), ref._ttr_block)
            for registry, name, ref in tensors_of(whole)
        ]
        if not _are_alike(slots, region.slots):
            region.own = tuple(dict.fromkeys(slot.block for slot in slots))
            region.slots = slots  # last: with these the others are taken to be right
        return region, whole

    # -- by blocks --------------------------------------------------------------------------

    @lets_program_run
    def _call_by_blocks(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """Call a module as it is, its repeated layers as they were compiled, where they fit."""
        module = getattr(self._function, "__self__", None)
        ledger = entry.residency.books.ledgers[entry.device]
        needed = sum(block.nbytes for block in entry.blocks) + entry.structure.passing_nbytes
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
        return CompiledCall(self._compile(forward), forward, self._compile, self._manager, _Bundle)


def _compiled_count() -> int:
    return int(torch._dynamo.utils.counters["frames"]["total"])


def _are_alike(now: list[Slot], before: list[Slot]) -> bool:
    return len(now) == len(before) and all(
        a.registry is b.registry and a.name == b.name and a.ref() is b.ref() and a.block is b.block
        for a, b in zip(now, before, strict=True)
    )
