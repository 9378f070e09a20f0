"""Native regions: modules whose operators need no interception run on plain tensors.

Interception is for learning and for safety. A module that needs neither is entered with its
parameters exchanged for plain resident tensors and its inputs unwrapped, and left with its outputs,
and what it left behind in its arguments (KV caches), wrapped again. Chosen are the largest modules
whose blocks fit the budget together with what their operators take in passing; both are measured
by running them intercepted under a `Recorder` first. Any doubt means interception, never an error;
so do gradients that are noted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from ..base.activation import watch
from ..base.interrupts import lets_program_run
from ..base.options import settings
from ..interception.fallback import Generators
from ..interception.guards import may_bypass
from ..memory import core
from ..memory.budget import SHORTAGES
from ..memory.holds import PATIENCE_ROUNDS, PATIENCE_S
from ..memory.manager import TensorsManager
from ..memory.ref import TensorRef
from .entry import Entry
from .learning import kept_in, learn
from .region import (
    Part,
    Region,
    Slot,
    Structure,
    forgetter,
    is_region,
    key_of,
    listeners_of,
    same_state,
    slots_hold,
    stand_in_of,
    state_of,
    tensors_of,
)
from .tensor_tree import Exchange

#: Intercepted calls of one structure before it may run natively, and where that is forced.
CALLS_TO_LEARN = 2
CALLS_WHERE_FORCED = 1
#: Of the budget, what a module's own blocks may take to be considered at all.
LARGEST_SHARE = 0.95
#: And while the budget is too small for all: a larger module comes and goes as one piece.
SHARE_UNDER_PRESSURE = 1 / 8
#: Inputs may grow so much beyond what was recorded before the call is recorded again.
GROWTH = 1.5

_global_hooks = module_hooks._global_forward_pre_hooks
_global_after_hooks = module_hooks._global_forward_hooks


class Regions:
    """Finds the modules that may run natively, and runs them."""

    def __init__(self, manager: TensorsManager) -> None:
        self.manager = manager
        self.native_count = 0
        #: Operators that ran inside regions, by the count of their recorded calls.
        self._enabled = True
        self._regions: weakref.WeakKeyDictionary[nn.Module, Region] = weakref.WeakKeyDictionary()
        self._hook: Any = None
        #: Somebody has asked for regions: the hook is there, unless this device has none.
        self._is_wanted = False
        self._nbytes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        #: Modules inside a region: no regions of their own while the larger one may run.
        self._covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        #: How many intercepted calls of a region's module are in flight: it cannot be run natively.
        self._intercepted: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._counting = threading.Lock()

    # -- finding ----------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether modules may run natively: operators in C++ need no such thing."""
        return self._enabled and settings.regions != "off" and core.library is None

    @enabled.setter
    def enabled(self, wanted: bool) -> None:
        self._enabled = wanted
        self.watch() if wanted else self.forget()

    def watch(self) -> None:
        """Look at which modules the program calls, until the largest that fit are found."""
        if self._hook is None and self.enabled:
            self._is_wanted = True
            self._hook = module_hooks.register_module_forward_pre_hook(self._on_call)

    def _stop_looking(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def forget(self) -> None:
        """Let every module run intercepted again, and stop looking."""
        self._is_wanted = False
        self._stop_looking()
        for module, region in list(self._regions.items()):
            region.is_over = True
            # Who runs it just now has put plain tensors in the place of its parameters.
            has_ended = region.lock.acquire(timeout=PATIENCE_S * PATIENCE_ROUNDS)
            if is_region(module):
                del module.__dict__["_compiled_call_impl"]
            region.gone.set()
            if has_ended:
                region.lock.release()
        self._regions.clear()
        self._covered.clear()

    def start_again(self) -> None:
        """Forget what was learned on another device; go on looking if anybody did."""
        was_wanted = self._is_wanted
        self.forget()
        if was_wanted:
            self.watch()

    def all_regions(self) -> list[Region]:
        """Return what is known of every module that may run natively."""
        return list(self._regions.values())

    def _on_call(self, module: nn.Module, args: Any) -> None:
        """A module is about to be called: make it a region if it is the largest that fits."""
        if not self._are_possible():
            self._stop_looking()  # until another device is chosen, or another module made
            return
        if (
            torch.is_grad_enabled()
            or module in self._covered
            or module in self._regions
            or stand_in_of(module) is not None
        ):
            return
        if not self._could_be(module):
            if self._streams(module):
                self._covered.update(module.modules())
            return
        region = self._regions[module] = Region(weakref.ref(module))
        module.__dict__["_compiled_call_impl"] = partial(self._call, region)
        self._covered.update(part for part in module.modules() if part is not module)

    def _are_possible(self) -> bool:
        """Whether there are regions on this device.

        On a real accelerator code that asks a tensor for its device gets another answer inside a
        region than outside: not before that has been seen to be harmless there.
        """
        return self.manager.residency.books.main.torch_device.type == "cpu"

    def _could_be(self, module: nn.Module) -> bool:
        """Whether a module has managed parameters, and they fit the budget together."""
        residency = self.manager.residency
        ledger = residency.books.ledgers.get(residency.books.main)
        if ledger is None:
            return False
        nbytes = self._nbytes.get(module)
        if nbytes is None:
            nbytes = self._nbytes[module] = self._own_nbytes(module)
        is_short = residency.books.is_pressed and settings.regions != "forced"
        share = SHARE_UNDER_PRESSURE if is_short else LARGEST_SHARE
        return 0 < nbytes <= ledger.budget.limit_nbytes * share

    def _streams(self, module: nn.Module) -> bool:
        """Whether a module is larger than the budget, so that its parts come and go.

        Then they are intercepted, too. A part that happens to be there could run natively, but its
        blocks would leave later, and what comes after would be fetched later, than if each operator
        is seen: measured, the program took up to 4 % longer, and never less.
        """
        nbytes = self._nbytes.get(module, 0)
        ledger = self.manager.residency.books.ledgers.get(self.manager.residency.books.main)
        return (
            ledger is not None
            and settings.regions != "forced"
            and nbytes > ledger.budget.limit_nbytes * LARGEST_SHARE
        )

    def _own_nbytes(self, module: nn.Module) -> int:
        """Bytes of the distinct blocks under a module; 0 if something in it is not managed."""
        blocks = {}
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            return 0  # its registries are C++
        for _, _, ref in tensors_of(module):
            if not isinstance(ref, TensorRef):
                return 0
            blocks[ref._ttr_block] = ref._ttr_block.nbytes
        return sum(blocks.values())

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Take the hook away for a native run: each module inside would pass through it."""
        hook = self._hook
        callback = None if hook is None else _global_hooks.pop(hook.id, None)
        try:
            yield
        finally:
            if callback is not None and self._hook is hook:
                _global_hooks[hook.id] = callback

    # -- calling ----------------------------------------------------------------------------

    @lets_program_run
    def _call(self, region: Region, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a module's call: natively where nothing speaks against it."""
        module = region.module()
        assert module is not None, "a region is called through its module"
        me = threading.get_ident()
        if region.runner == me or me in self.manager.residency.holds.native_entries:
            return module._call_impl(*args, **kwargs)
        if self._must_be_intercepted(module):
            return self._call_intercepted(region, module, args, kwargs)
        self.manager.residency.repair()
        with region.lock:  # while another thread runs it, its parameters are plain
            if not region.is_over:
                region.runner = me
                try:
                    return self._call_alone(region, module, args, kwargs)
                except BaseException:
                    self.manager.doubt()
                    raise
                finally:
                    region.runner = 0
        region.gone.wait(PATIENCE_S * PATIENCE_ROUNDS)
        return module(*args, **kwargs)

    @lets_program_run
    def _call_intercepted(self, region: Region, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module as it is, while no other thread runs it natively."""
        with region.lock:
            self._count(module, 1)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            self._count(module, -1)

    def _count(self, module: nn.Module, more: int) -> None:
        with self._counting:
            self._intercepted[module] = self._intercepted.get(module, 0) + more

    @lets_program_run
    def _call_alone(self, region: Region, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._is_as_learned(region, module):
            return module._call_impl(*args, **kwargs)
        if self.manager.residency.books.is_pressed and not self._could_be(module):
            self._uncover(module)
            return module._call_impl(*args, **kwargs)
        exchange = Exchange()
        inputs = exchange.find((args, kwargs))
        structure = region.structures.setdefault(key_of(inputs), Structure())
        if structure.doubt or self._intercepted.get(module):
            return module._call_impl(*args, **kwargs)
        input_nbytes = sum(ref._ttr_block.nbytes for ref in inputs)
        is_forced = settings.regions == "forced"
        if (
            structure.call_count < (CALLS_WHERE_FORCED if is_forced else CALLS_TO_LEARN)
            or input_nbytes > structure.input_nbytes * GROWTH + 4096
        ):
            out = learn(self.manager, module, structure, inputs, args, kwargs)
            if structure.doubt:
                self._uncover(module)
            return out
        entered = self._enter(region, module, structure, exchange, inputs)
        if entered is None:
            return module._call_impl(*args, **kwargs)
        generators = Generators(structure.is_random, entered.device)
        try:
            out = entered.run(args, kwargs)
        except SHORTAGES:
            if entered.has_changed:
                raise
            structure.doubt = "memory ran out inside"
        else:
            self.native_count += 1
            return out
        generators.restore()
        return module._call_impl(*args, **kwargs)

    def _must_be_intercepted(self, module: nn.Module) -> bool:
        """Whether something outside the module wants to see its operators, or its tensors."""
        if not self.manager.residency.feed.strategy.allows_regions:
            return True
        if not self.enabled or watch.on or settings.trace:
            return True
        if torch.is_grad_enabled() or not may_bypass(autocast=False, observers=False):
            return True
        if (
            torch.jit.is_tracing()  # type: ignore[attr-defined]
            or torch.compiler.is_compiling()
        ):
            return True
        return len(_global_hooks) > (self._hook is not None) or bool(_global_after_hooks)

    def _is_as_learned(self, region: Region, module: nn.Module) -> bool:
        """Whether nothing listens inside; what was learned of a module that differs is dropped."""
        if any(part.is_heard() for part in region.parts) or any(listeners_of(module)):
            return False
        if (
            region.state
            and same_state(state_of(module), region.state)
            and region.parts_are_as_before()
        ):
            return True
        parts = list(module.modules())
        for part in parts[1:]:
            if isinstance(part, torch._dynamo.OptimizedModule):
                return False
            if stand_in_of(part) is not None:
                # Compiled, or a smaller region found earlier: what is larger takes its place.
                if not is_region(part):
                    return False
                del part.__dict__["_compiled_call_impl"]
        if region.state:
            region.structures.clear()
            region.forget()
        self._covered.update(parts[1:])
        region.parts = [Part(part) for part in parts[1:]]
        region.state = state_of(module)
        return not any(part.is_heard() for part in region.parts)

    def _uncover(self, module: nn.Module) -> None:
        """Let what is under a module be found: the module itself may not run natively."""
        self._covered.difference_update(module.children())

    # -- entering ---------------------------------------------------------------------------

    def _enter(
        self,
        region: Region,
        module: nn.Module,
        structure: Structure,
        exchange: Exchange,
        inputs: list[Any],
    ) -> Entry | None:
        """Bring everything there, or return None where something speaks against it."""
        if not region.slots or not slots_hold(region):
            region.slots, slots = [], []
            gone = forgetter(region)
            for registry, name, ref in tensors_of(module):
                if not isinstance(ref, TensorRef) or ref.is_inference():
                    return None
                weak = weakref.ref(ref, gone)
                slots.append(Slot(registry, name, weak, ref._ttr_block))
            region.own = tuple(dict.fromkeys(slot.block for slot in slots))
            region.foreign = frozenset(
                plain.untyped_storage()._cdata
                for plain in kept_in(module)[1]
                if plain.layout is torch.strided
            )
            region.slots = slots  # last, and whole: with a part of them the rest would be plain
        entry = Entry(self.manager, self.unwatched(), region, module, structure, exchange, inputs)
        return entry if entry.acquire() else None
