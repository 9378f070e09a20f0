"""What is known of the modules of a compiled function: parts, tensors, kinds of calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..memory.block import Block
from .recorder import Use
from .slots import Place, Slots, same_state
from .tensor_tree import FROZEN, kind_of

#: How much larger than one that was recorded a call may be: beyond, it is recorded itself.
MOST_GROWTH = 1.25
#: By which power of that a result may grow: `x @ x.T`, products of three sizes.
POWER = 3
#: Sizes that are kept of a structure.
MOST_LEARNED = 16


@dataclass
class Structure:
    """What is known about calls of one module with arguments of one kind."""

    #: Why it may not run natively, in words; empty while nothing speaks against it.
    doubt: str = ""
    #: The most its results took in passing when it was recorded last, and by sizes and numbers.
    passing_nbytes: int = 0
    learned: dict[tuple[int, ...], int] = field(default_factory=dict)
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

    def note_passing(self, numbers: tuple[int, ...], nbytes: int) -> None:
        """Note what a recorded call with such sizes and numbers took in passing."""
        self.learned[numbers] = self.passing_nbytes = nbytes
        if len(self.learned) > MOST_LEARNED:
            del self.learned[next(iter(self.learned))]

    def passing_of(self, numbers: tuple[int, ...]) -> int | None:
        """Return what a call with these takes in passing; None where that is to be learned.

        Somewhat larger than one that was learned, it is taken to need more by a power. What two
        have in common (the length of all caches) has grown once.
        """
        known = self.learned.get(numbers)
        if known is not None:
            return known
        found = []
        for before, nbytes in self.learned.items():
            pairs = {*zip(before, numbers, strict=True)}
            growth = prod(now / was for was, now in pairs if now > was)
            if growth <= MOST_GROWTH:
                found.append(int(nbytes * growth**POWER))
        return min(found, default=None)


class Part:
    """A module under a region as it was when it was learned; holds no module above it."""

    __slots__ = ("attributes", "children", "module", "registries")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = _looked_at(module)
        self.registries = _registries_of(module)
        self.children = dict(module._modules)

    def is_as_before(self) -> bool:
        """Whether no attribute or child has come, gone or been exchanged."""
        module = self.module
        return (
            same_state(_looked_at(module), self.attributes)
            and all(map(is_, _registries_of(module), self.registries))
            and [*module._modules.items()] == [*self.children.items()]
        )


class Outline:
    """All parts of a region, to be compared at once: that is asked before and after each call.

    What was computed last has left nothing in the processor's caches. So whole lists are compared
    in C, and nothing is looked at that need not be. The order of children is not, nor are
    parameters and buffers: `Slots` does that.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._modules = [part.module for part in parts]
        getters: dict[Any, Any] = {}  # modules of one class share one
        self._getters = [
            getters.setdefault(names, itemgetter(*names))
            for names in (tuple(part.attributes) for part in parts)
        ]
        self._attributes = [
            getter(part.attributes) for getter, part in zip(self._getters, parts, strict=True)
        ]
        self._sizes = [len(part.module.__dict__) for part in parts]
        self._registries = [*chain.from_iterable(part.registries for part in parts)]
        self._parents = [part.module._modules for part in parts if part.children]
        self._leaves = [part.module._modules for part in parts if not part.children]
        self._children = [part.children for part in parts if part.children]

    def attributes_hold(self) -> bool:
        """Whether no attribute has come, gone or been exchanged; False where nobody can tell."""
        own = [*map(vars, self._modules)]
        try:
            now = [getter(one) for getter, one in zip(self._getters, own, strict=True)]
        except KeyError:
            return False
        return [*map(len, own)] == self._sizes and same_state(now, self._attributes)

    def holds(self) -> bool:
        """Whether no child has, either."""
        return (
            self.attributes_hold()
            and all(map(is_, self._registries_now(), self._registries))
            and same_state(self._parents, self._children)
            and not any(self._leaves)
        )

    def _registries_now(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(map(_registries_of, self._modules))


@dataclass
class Region:
    """The modules that one compiled function can reach, as one.

    It holds neither the module, which owns it, nor the TensorRefs: a module that is let go of is
    gone at once, and so is a parameter that is exchanged for another.
    """

    structures: dict[Any, Structure] = field(default_factory=dict)
    #: Where its parameters and buffers hang; None where that is to be looked at again.
    slots: Slots | None = None
    #: Which there were when the structures were learned.
    places: list[Place] = field(default_factory=list)
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
        self.slots, self.outline, self.parts, self.own = None, None, [], ()
        self.state, self.storages, self.places = (), {}, []

    def attributes_are_as_before(self) -> bool:
        """Whether no module under it has other attributes."""
        outline = self.outline
        return (outline is not None and outline.attributes_hold()) or self.parts_are_as_before()

    def parts_are_as_before(self) -> bool:
        """Whether no module under it has changed."""
        if self.outline is not None and self.outline.holds():
            return True
        if not all(part.is_as_before() for part in self.parts):
            return False
        self.outline = Outline(self.parts)
        return True


def stand_in_of(module: nn.Module) -> Any:
    """Return what torch calls in place of a module: what it was compiled to."""
    return module.__dict__.get("_compiled_call_impl")


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's attributes and children."""
    return *module.__dict__.values(), *module._modules.values()


_OF_TORCH = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
#: Of these, all that does not decide how a module is called. Who listens is asked when it is.
_LEFT_OUT = _OF_TORCH - {"training", "_compiled_call_impl"}

_registries_of = attrgetter("_parameters", "_buffers", "_modules")


def attributes_of(module: nn.Module) -> list[str]:
    """Return the names of the attributes that the program has given a module."""
    return [name for name in module.__dict__ if name not in _OF_TORCH]


def _looked_at(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _LEFT_OUT}


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
    kinds = tuple((type(ref), ref.dtype, *map(_magnitude, ref.size())) for ref in inputs)
    return kinds, size.bit_length()


def leaves_of(arguments: Any) -> Iterator[Any]:
    """Yield what a call is told beside tensors."""
    for leaf in tree_leaves(arguments):
        if kind_of(leaf) is FROZEN:  # torch's trees end at these
            yield from leaves_of(dict(leaf))
        elif not isinstance(leaf, torch.Tensor):
            yield leaf


def choices_of(leaves: list[Any]) -> Any:
    """Return what of that may decide what a call does."""
    return tuple(
        leaf
        if isinstance(leaf, (bool, str))
        else (type(leaf), leaf < 0, _magnitude(leaf))
        if isinstance(leaf, int)
        else type(leaf)
        for leaf in leaves
    )


def numbers_of(inputs: list[Any], leaves: list[Any]) -> tuple[int, ...]:
    """Return the sizes and numbers of which calls with equal keys know the magnitudes only."""
    told = (abs(leaf) for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool))
    return *chain.from_iterable(ref.size() for ref in inputs), *told


#: Of a number: what a call takes in passing may grow by it, be it that of columns or of rounds.
_magnitude = int.bit_length
