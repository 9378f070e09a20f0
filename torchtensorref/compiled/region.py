"""What is known of the modules of a compiled function: parts, tensors, kinds of calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..memory.block import Block
from .recorder import Use


@dataclass
class Structure:
    """What is known about calls of one module with arguments of one kind."""

    call_count: int = 0
    #: Why it may not run natively, in words; empty while nothing speaks against it.
    doubt: str = ""
    #: Bytes of its inputs when it was recorded, and the most its results took in passing.
    input_nbytes: int = 0
    passing_nbytes: int = 0
    #: Time its operators take on the device, and how many there are.
    compute_ns: int = 0
    op_count: int = 0
    #: Whether it writes what it is given: a static cache.
    writes_inputs: bool = False
    #: Whether it draws random numbers.
    is_random: bool = False
    #: Its operators' uses of the module's blocks and of those given, and how many blocks these are.
    uses: tuple[Use, ...] = ()
    block_count: int = 0


class Slot(NamedTuple):
    """Where a parameter or buffer hangs, and the plain tensor that stands in for it."""

    registry: dict[str, Any]
    name: str
    ref: weakref.ref[Any]
    block: Block
    view: torch.Tensor | None = None
    plain: torch.Tensor | None = None


class Part:
    """A module under a region as it was when it was learned; holds no module above it."""

    __slots__ = ("attributes", "children", "module", "names")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.children = dict(module._modules)
        self.names = _names_of(module)

    def is_as_before(self) -> bool:
        """Whether no attribute, child, parameter or buffer has come, gone or been exchanged."""
        module = self.module
        return (
            same_state(module.__dict__, self.attributes)
            and [*module._modules.items()] == [*self.children.items()]
            and _names_of(module) == self.names
        )


class Outline:
    """All parts of a region, to be compared at once: that is asked twice for each call.

    Whole dictionaries are compared in C, which is quick where they hold the same objects. It does
    not look at the order of children, nor which tensors hang where: `slots_hold` does.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.modules = [part.module for part in parts]
        registries = [r for m in self.modules for r in (m._parameters, m._buffers)]
        self.registries = [registry for registry in registries if registry]
        self.empty = [registry for registry in registries if not registry]
        self._before = (
            [part.attributes for part in parts],
            [part.children for part in parts],
            self._kinds(),
        )

    def holds(self) -> bool:
        """Whether nothing has come, gone or been exchanged; False where it cannot be told."""
        attributes = [module.__dict__ for module in self.modules]
        children = [one["_modules"] for one in attributes]
        return same_state((attributes, children, self._kinds()), self._before) and not any(
            self.empty
        )

    def _kinds(self) -> list[list[type]]:
        """Return the classes of what hangs in the registries: a parameter may have become None."""
        return [[*map(type, registry.values())] for registry in self.registries]


@dataclass
class Region:
    """The modules that one compiled function can reach, as one.

    It holds neither the module, which owns it, nor the TensorRefs: a module that is let go of is
    gone at once, and so is a parameter that is exchanged for another.
    """

    structures: dict[Any, Structure] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    #: The modules under it, looked at before each run, and the distinct blocks.
    parts: list[Part] = field(default_factory=list)
    #: The module itself as it was when it was learned.
    state: tuple[Any, ...] = ()
    #: The parts, to be compared at once; None where that has to be done one by one.
    outline: Outline | None = None
    own: tuple[Block, ...] = ()
    #: Its own blocks by their storages on the device; empty where that is to be asked again.
    storages: dict[int, Block] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of all that was noted about the module's parts and tensors."""
        self.slots, self.parts, self.own, self.state, self.storages = [], [], (), (), {}
        self.outline = None

    def parts_are_as_before(self) -> bool:
        """Whether no module under it has changed."""
        if self.outline is not None and self.outline.holds():
            return True
        if not all(part.is_as_before() for part in self.parts):
            return False
        self.outline = Outline(self.parts)
        return True


def same_state(now: object, before: object) -> bool:
    """Whether attributes hold the same objects, or equal ones."""
    try:
        return bool(now == before)
    except Exception:
        return False  # what cannot be compared (tensors, arrays) is not the same object


def slots_hold(region: Region) -> bool:
    """Whether the TensorRefs that were noted hang where they were, over the same blocks."""
    for registry, name, weak, block, *_ in region.slots:
        ref = weak()
        if ref is None or registry.get(name) is not ref:
            return False
        if ref._ttr_block is not block:  # type: ignore[union-attr]
            return False
    return True


def stand_in_of(module: nn.Module) -> Any:
    """Return what torch calls in place of a module: what it was compiled to."""
    return module.__dict__.get("_compiled_call_impl")


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's attributes and children, and which parameters and buffers it has."""
    return *module.__dict__.values(), *module._modules.values(), *_names_of(module)


def _names_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that a module has."""
    names = [name for name, x in module._parameters.items() if x is not None]
    if module._buffers:
        names += [name for name, x in module._buffers.items() if x is not None]
    return names


_OF_TORCH = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}


def attributes_of(module: nn.Module) -> list[str]:
    """Return the names of the attributes that the program has given a module."""
    return [name for name in module.__dict__ if name not in _OF_TORCH]


def tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield where each parameter and buffer under a module hangs, its name, and the tensor."""
    for part in module.modules():
        for registry in (part._parameters, part._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    yield registry, name, tensor


def forgetter(region: Region) -> Any:
    """Return a callback that drops what a region holds; it does not hold the region."""
    reference = weakref.ref(region)

    def drop(_: Any) -> None:
        found = reference()
        if found is not None:
            found.forget()

    return drop


def key_of(inputs: list[Any]) -> Any:
    """Calls with equal keys are taken to be of one structure."""
    size = sum(ref._ttr_block.nbytes for ref in inputs)
    kinds = tuple((ref.dtype, ref.dim()) for ref in inputs[:8])
    return len(inputs), kinds, size.bit_length()
