"""Models that were built before torch was patched.

Their own parameters and buffers are adopted when one is first called with TensorRefs: then
no graph holds them yet, and they are certain to be a module's. Each stays the same Python object,
so optimizers and tied modules see the change; who shares its memory goes on sharing it. Where that
cannot be (a graph or a weak reference holds it), and for parameters of no module, it stays plain
and is fetched anew by every operator: that is said, once.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.activation import when_plain
from ..memory.adoption import without_own_references
from ..memory.once import note_plain
from .factories import _core, is_plain_world
from .hooks import is_disabled, state
from .inject_to import injectTo
from .registration import module_behind
from .unpickled import adopt_certain, is_left

#: So often a plain parameter meets TensorRefs before it is said: a scalar may do so once.
PATIENCE = 3


class BuiltBefore:
    """The modules that were there when torch was patched and have not been called since."""

    def __init__(self, register: Callable[..., Any], *, torch_arrives: bool) -> None:
        self._register = register
        self._torch_arrives = torch_arrives
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle: Any = None
        #: How often plain parameters have met TensorRefs, by id, and by what we know each again (a
        #: weak reference to a parameter would keep it from being adopted); None when it was said.
        self._meetings: dict[int, tuple[StorageWeakRef, int]] | None = {}

    def begin(self) -> None:
        """Find them: 70 ms among 170,000 objects. Where torch is just arriving there are none."""
        if not self._torch_arrives:
            self._modules.update(filter(_is_plain, gc.get_objects()))
        self.look()
        when_plain.append(self._on_plain)

    def end(self) -> None:
        """Let them be."""
        self.stop_looking()
        self._modules.clear()
        when_plain.remove(self._on_plain)

    def look(self) -> None:
        """Have the hook called, if there is anything to be found."""
        if self._modules and self._handle is None:
            self._handle = self._register(self._on_call)

    def stop_looking(self) -> bool:
        """Remove the hook; return whether it was there."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        return handle is not None

    def _on_call(self, module: nn.Module, args: Any) -> None:
        """A module is about to be called: adopt what it has itself, if it was built before."""
        if module not in self._modules or not state.active or is_disabled.get():
            return
        TensorRef = _core().TensorRef
        if not any(isinstance(arg, TensorRef) for arg in args) or not is_plain_world():
            return
        if not injectTo.decisions[module_behind(sys._getframe(1))]:
            return
        self._modules.discard(module)
        with without_own_references(module):
            adopt_certain(module)
        if not self._modules:
            self.stop_looking()

    def _on_plain(self, parameter: Tensor) -> None:
        """A plain parameter meets TensorRefs in an operator."""
        if self._meetings is None or is_disabled.get():
            return
        storage = StorageWeakRef(parameter.untyped_storage())
        known, count = self._meetings.get(id(parameter), (storage, 0))
        count = count + 1 if known == storage else 1
        self._meetings[id(parameter)] = storage, count
        if count >= PATIENCE:
            self._meetings = None
            note_plain(parameter.numel())


def _is_plain(thing: Any) -> bool:
    if not issubclass(type(thing), nn.Module):  # a look at its class may be an attribute of its own
        return False
    registries = (thing.__dict__.get("_parameters"), thing.__dict__.get("_buffers"))
    return any(is_left(t) for registry in registries if registry for t in registry.values())


#: The one at work, in a list that is empty while there is none.
_at_work: list[BuiltBefore] = []
_has_begun = False


def watch_modules(modules: Any) -> Callable[[], None]:
    """Look for modules that are there already; return what ends it."""
    global _has_begun
    found = BuiltBefore(
        modules.register_module_forward_pre_hook,
        torch_arrives=not (state.torch_was_first or _has_begun),
    )
    _has_begun = True
    found.begin()
    _at_work[:] = [found]

    def undo() -> None:
        _at_work.clear()
        found.end()

    return undo


@contextmanager
def unwatched() -> Iterator[None]:
    """Call no hook of ours inside: torch.compile warns of hooks on all modules."""
    watching = [found for found in _at_work if found.stop_looking()]
    try:
        yield
    finally:
        for found in watching:
            found.look()
