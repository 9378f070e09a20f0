"""Names: what the program calls its modules, and the blocks of their parameters and buffers.

Modules are noted as they are registered in one another; names are looked up when somebody asks,
from the modules that are in no other one. Nothing of it is done while operators run.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..base.at_once import items_at_once
from .ref import TensorRef

#: Between two looks for names that may have come, at least so many times what a look takes.
LOOKING_SHARE = 20


class Names:
    """The names of modules and blocks, by the largest models that they are part of.

    Notes
    -----
    What an optimizer keeps goes by its parameter: ``layers.0.weight: exp_avg``.

    A block that several modules have goes by the first name. Where two models would give one name
    to different tensors, the classes of the models stand before it: ``UNet:conv.weight``.
    """

    def __init__(self) -> None:
        #: Modules that have met, by their ids.
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._is_stale = False
        self._of_blocks: dict[int, str] = {}
        self._of_modules: weakref.WeakValueDictionary[int, nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self._paths: dict[int, str] = {}
        #: What has been made, and the names of what they keep for each parameter.
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._of_states: dict[int, str] = {}
        #: When one may look for a name that was not there: looking takes its time.
        self._again_s = 0.0
        #: When the look began that has found what is here.
        self._began_s = 0.0

    def note_module(self, module: nn.Module) -> None:
        """Note a module: it has been given a tensor, or another module."""
        if id(module) not in self._modules and "_modules" in module.__dict__:
            self._modules[id(module)] = module
        self._is_stale = True

    def note_modules(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Note that a module has become part of another; torch calls this as a hook."""
        self.note_module(parent)
        if child is not None:
            self.note_module(child)

    def note_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer, whose state is made later."""
        self._optimizers[id(optimizer)] = optimizer

    def of_block(self, block_id: int) -> str:
        """Return the name of a block: that of its tensor in a module, else ``b7``."""
        if self._is_stale:
            self.look()
        return self.last_of_block(block_id) or f"b{block_id}"

    def is_state(self, block: Any) -> bool:
        """Whether an optimizer keeps a block; look once more for one that stays."""
        return not self.of_operand(block) and block.block_id in self._of_states

    def of_operand(self, block: Any) -> str:
        """Return the name of a module's block, "" of others; look once more for one that stays."""
        name = self._of_blocks.get(block.block_id)
        is_unknown = name is None and block.block_id not in self._of_states
        if self._is_stale or (
            is_unknown and block.is_persistent and time.monotonic() > self._again_s
        ):
            self.look()
            name = self._of_blocks.get(block.block_id)
        return name or ""

    def last_of_block(self, block_id: int) -> str:
        """Return the name that a block had at the last look; "" if it had none."""
        return self._of_blocks.get(block_id) or self._of_states.get(block_id, "")

    def known(self) -> list[str]:
        """Return the paths of all modules that are there, and the names of their blocks."""
        self.look()
        return [*filter(None, self._paths.values()), *self._of_blocks.values()]

    def of_module(self, module: nn.Module, within: nn.Module | None = None) -> str:
        """Return the path of a module in the model that it is part of; "" for a whole model.

        Parameters
        ----------
        within : nn.Module, optional
            A module around it, which may never have been noted: it was copied, or unpickled.
        """
        known = self._of_modules.get(id(module)) is module
        if not known or (self._is_stale and within is not None):
            self.note_module(module if within is None else within)
            self.look()
        return self._paths.get(id(module), "")

    def look(self) -> None:
        """Look the names up again, in all models that are there.

        No lock is held, since a finalizer that the collector runs in here may come here again. What
        is found is exchanged at the end; of several looks the one counts that began last.
        """
        began_s = time.monotonic()
        self._is_stale = False
        found: dict[str, list[tuple[str, int]]] = {}
        paths: dict[int, str] = {}
        modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        for model, root in self._roots():
            for path, module in _modules_in(root):
                modules[id(module)] = module
                paths.setdefault(id(module), path)
                for name, block_id in _blocks_of(module):
                    full = f"{path}.{name}" if path else name
                    found.setdefault(full, []).append((model, block_id))
        of_blocks = _unique(found)
        of_states = {
            block_id: f"{of_blocks.get(of, f'b{of}')}: {name}"
            for optimizer in _alive(self._optimizers)
            for of, name, block_id in _states_of(optimizer)
        }
        if began_s >= self._began_s:
            self._began_s = began_s
            self._paths, self._of_modules = paths, modules
            self._of_blocks, self._of_states = of_blocks, of_states
        now_s = time.monotonic()
        self._again_s = now_s + LOOKING_SHARE * (now_s - began_s)

    def _roots(self) -> list[tuple[str, nn.Module]]:
        """The noted modules that are in no other noted one, with names that tell them apart."""
        noted = _alive(self._modules)
        inner = {id(child) for module in noted for child in list(module._modules.values())}
        roots = [module for module in noted if id(module) not in inner]
        names: dict[str, int] = {}
        told = []
        for root in roots:
            kind = type(root).__name__
            names[kind] = names.get(kind, 0) + 1
            told.append((kind if names[kind] == 1 else f"{kind}#{names[kind]}", root))
        return told


def _alive(noted: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    """Return what is there; all at once, since other threads note more meanwhile."""
    return [one for reference in noted.valuerefs() if (one := reference()) is not None]


def _modules_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield as `named_modules` does, also while other threads put modules into one another."""
    waiting, seen = [("", root)], set[nn.Module]()
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        inner = [(f"{path}.{name}" if path else name, child) for name, child in _children(module)]
        waiting += reversed(inner)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in items_at_once(module._modules) if child is not None]


def _blocks_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    for registry in (module._parameters, module._buffers):
        for name, tensor in items_at_once(registry):
            if isinstance(tensor, TensorRef):
                yield name, tensor._ttr_block.block_id


def _states_of(optimizer: Any) -> Iterator[tuple[int, str, int]]:
    """Yield the parameter's block, the name, and the block of what an optimizer keeps."""
    kept = vars(optimizer).get("state")  # none where it was refused its parameters; or its own kind
    for parameter, state in items_at_once(kept) if isinstance(kept, Mapping) else ():
        if not (isinstance(parameter, TensorRef) and isinstance(state, dict)):
            continue
        for name, value in items_at_once(state):
            if isinstance(value, TensorRef):
                yield parameter._ttr_block.block_id, str(name), value._ttr_block.block_id


def _unique(found: dict[str, list[tuple[str, int]]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, owners in found.items():
        are_several = len({block_id for _, block_id in owners}) > 1
        for model, block_id in owners:
            names.setdefault(block_id, f"{model}:{name}" if are_several else name)
    return names


#: Of this process: modules are noted before there is a manager.
names = Names()
