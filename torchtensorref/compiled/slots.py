"""Where the parameters and buffers of a compiled function hang, and what stands in for them.

All of them are looked at before each call, and exchanged twice. So whole lists are compared in C;
single ones are looked at where that finds a difference.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..devices.base import Device
from ..memory.adoption import StoodFor, ref_behind
from ..memory.plain_views import plain_on, view_of
from ..memory.ref import attributes_given

#: A dictionary of parameters or buffers, and a name in it.
Place = tuple[dict[str, Any], str]

_values_of = methodcaller("values")
_block_of = attrgetter("_ttr_block")
_view_of = attrgetter("_ttr_plain")
_device_of = attrgetter("_ttr_device")
_needs_gradient = attrgetter("requires_grad")
#: Torch's own: that of `torch.Tensor` tells of it, for what the program does.
data_of = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]


class Slots:
    """The places of some modules' parameters and buffers, with the TensorRefs that hang there.

    It holds no TensorRef: a parameter that is exchanged for another is gone at once. Those that it
    knows by their ids are there, or `gone` was called.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Whose own tensors, each a TensorRef or None, are meant.
    gone : callable, optional
        Called with a weak reference when one of the TensorRefs is gone.
    """

    def __init__(self, modules: Iterable[nn.Module], gone: Any = None) -> None:
        registries = list(registries_of(modules))
        self._registries = [registry for registry in registries if registry]
        self._empty = [registry for registry in registries if not registry]
        self._names = [*chain.from_iterable(self._registries)]
        hanging = self._hanging()
        self._ids = _ids_of(hanging)
        refs = [ref for ref in hanging if ref is not None]
        self._weak = [weakref.ref(ref, gone) for ref in refs]
        #: Where they hang, and their blocks, in the same order.
        self.places: list[Place] = [
            (registry, name)
            for registry in self._registries
            for name, ref in registry.items()
            if ref is not None
        ]
        self.blocks = [ref._ttr_block for ref in refs]
        #: The plain tensors that hang there during a call, and the views they were made of.
        self._plains: list[Any] = [None] * len(refs)
        self._views: list[Any] = [...] * len(refs)  # as yet of nothing
        #: What the program has noted on the TensorRefs, and so stands on the plain tensors.
        self._given: list[dict[str, Any]] = []

    def hold(self) -> bool:
        """Whether the same TensorRefs hang where they did, over the same blocks, and no others."""
        hanging = self._hanging()
        if _ids_of(hanging) != self._ids:
            return False
        refs = [ref for ref in hanging if ref is not None]
        return (
            all(map(is_, map(_block_of, refs), self.blocks))
            and [*chain.from_iterable(self._registries)] == self._names
            and not any(self._empty)
        )

    def refs(self) -> list[Any]:
        """Return the TensorRefs, in the order of `places`."""
        return [weak() for weak in self._weak]

    def stand_ins(self, refs: list[Any], device: Device) -> tuple[list[torch.Tensor], bool]:
        """Return what takes the TensorRefs' places on a device, and whether some are new.

        The blocks must have their bytes there. They are kept for the next time, each until its
        TensorRef stands for other memory.
        """
        fit = all(map(is_, map(_view_of, refs), self._views)) and {device}.issuperset(
            map(_device_of, refs)
        )
        if not fit:
            self._renew(refs, device)
            self._given = []
        plains = self._plains
        self._give_attributes(refs, plains)
        if [*map(_needs_gradient, plains)] != [*map(_needs_gradient, refs)]:
            for plain, ref in zip(plains, refs, strict=True):
                if plain.requires_grad != ref.requires_grad:
                    plain.requires_grad_(ref.requires_grad)
        return list(plains), not fit

    def _renew(self, refs: list[Any], device: Device) -> None:
        made: dict[int, Any] = {}
        for i, ref in enumerate(refs):
            if ref._ttr_plain is not self._views[i] or ref._ttr_device is not device:
                plain, view = made.get(id(ref)), plain_on(ref, device)
                if plain is None:
                    plain = made[id(ref)] = _stand_in(ref, self.blocks[i].base_on(device))
                    plain._ttr_ref = StoodFor(ref, view)  # who keeps it is to have the TensorRef
                self._views[i], self._plains[i] = view, plain

    def _give_attributes(self, refs: list[Any], plains: list[Any]) -> None:
        """Let the stand-ins have what the program has noted on the TensorRefs."""
        given = [*map(attributes_given, refs)]
        if same_state(given, self._given):
            return
        for plain, own in zip(plains, given, strict=True):
            for name in attributes_given(plain):
                delattr(plain, name)
            vars(plain).update(own)
        self._given = given

    def _hanging(self) -> list[Any]:
        return [*chain.from_iterable(map(_values_of, self._registries))]


def same_state(now: object, before: object) -> bool:
    """Whether attributes hold the same objects, or equal ones."""
    try:
        return bool(now == before)
    except Exception:
        return False  # what cannot be compared (tensors, arrays) is not the same object


def _ids_of(hanging: list[Any]) -> array[int]:
    return array("Q", map(id, hanging))


def registries_of(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries in which modules have their own parameters and buffers."""
    for module in modules:
        yield module._parameters
        yield module._buffers


def tensors_of(module: nn.Module) -> Iterator[Any]:
    """Yield each parameter and buffer under a module."""
    for registry in registries_of(module.modules()):
        yield from (tensor for tensor in registry.values() if tensor is not None)


def _stand_in(ref: Any, base: torch.Tensor) -> Any:
    """Make what takes a parameter's or a buffer's place; its version counts writes from 0."""
    with torch.inference_mode(False), torch.no_grad():
        view = data_of(view_of(ref, base))  # with a count of versions of its own
        if not isinstance(ref, nn.Parameter):
            return view
        can_have_gradient = view.is_floating_point() or view.is_complex()
        plain = nn.Parameter(view, requires_grad=can_have_gradient)
        if can_have_gradient:
            plain.register_post_accumulate_grad_hook(_hand_on)
        return plain.requires_grad_(ref.requires_grad)


def _hand_on(plain: torch.Tensor) -> None:
    """Give the gradient of what was kept to the parameter that it stood for."""
    ref = ref_behind(plain)
    if ref is not None and ref.requires_grad:
        gradient, plain.grad = plain.grad, None
        accumulate: Any = get_gradient_edge(ref).node
        accumulate(gradient)
