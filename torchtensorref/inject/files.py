"""What our patches do around functions that read files: their tensors are TensorRefs."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, MutableMapping, MutableSequence
from contextlib import suppress
from sys import _getframe
from typing import Any

import torch
from torch import Tensor

from ..base.interrupts import lets_program_run
from ..base.progress import Bar
from ..base.scopes import Scopes
from ..base.tuples import tuple_like
from ..base.units import format_nbytes
from ..interception.tracebacks import hides
from .factories import _core, is_plain_world, takes_part
from .hooks import load
from .patches import Patch

__tracebackhide__ = hides


@lets_program_run
def load_wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that reads a file, and adopt the tensors in what it gives."""
    if not takes_part(_getframe(1).f_globals.get("__name__")):
        return wrapped(*args, **kwargs)
    adoption = Adoption()
    try:
        with Bar(f"loading {_name_of_file(args[0] if args else kwargs.get('f'))}"):
            with loading.entered(adoption):
                loaded = wrapped(*args, **kwargs)
            return adoption.of(loaded) if is_plain_world() else loaded
    finally:
        adoption.forget()  # a scope that is over is kept for a while


def _name_of_file(file: Any) -> str:
    """Name what is read, and how much it is, as far as that is known."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        return "tensors"
    return f"{os.path.basename(path)}, {format_nbytes(os.path.getsize(path))}"


class Adoption:
    """Adopts the tensors inside what was just read from a file, which nobody else holds.

    Dictionaries and lists are changed in place, so that what they carry beside their entries stays
    (a state dict's `_metadata`). One tensor at two places stays one.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._wholes: list[Any] = []
        #: Containers that are still to be changed: a tuple in one of its own is made before.
        self._waiting: deque[Any] = deque()
        self._manager = _core().manager
        # Who maps a file so has others see what is written.
        shared: Any = torch.serialization.MAP_SHARED  # type: ignore[attr-defined]
        self._is_sole = torch.serialization.get_default_mmap_options() != shared

    def forget(self) -> None:
        """Hold nothing of what was read any longer."""
        self._known.clear()
        self._wholes.clear()
        self._waiting.clear()

    def of(self, value: Any) -> Any:
        """Return `value` with its tensors adopted."""
        result = self._of(value)
        while self._waiting:
            self._fill(self._waiting.popleft())
        return result

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._once(value, self._tensor)
        if isinstance(value, _NUMBERS):
            return value  # of each byte nothing is asked
        if isinstance(value, (dict, list, MutableMapping, MutableSequence)):
            return self._once(value, self._later)
        if isinstance(value, tuple):
            return self._once(value, self._tuple)
        if isinstance(value, torch.nn.Module):
            return self._manager.adopt(value)
        return value

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        parts = [self._of(part) for part in value]
        is_same = all(part is before for part, before in zip(parts, value, strict=True))
        return value if is_same else tuple_like(value, parts)

    def in_place(self, tensor: Tensor) -> None:
        """Make a tensor's own object a TensorRef, where that can be done."""
        self._take_whole(tensor)
        self._manager.ownership.try_adopt_in_place(tensor, sole=True)

    def _once(self, value: Any, make: Any) -> Any:
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = known = (value, make(value))
        return known[1]

    def _tensor(self, tensor: Tensor) -> Any:
        self._take_whole(tensor)
        return self._manager.ownership.adopt_tensor(tensor, sole=True)

    def _take_whole(self, tensor: Tensor) -> None:
        if (
            tensor.is_cpu
            and tensor.layout is torch.strided
            and load(".memory.ref").is_plain(tensor)
        ):
            storage = tensor.untyped_storage()
            if not storage.resizable():
                # Read from a file. Were the first of several views adopted alone, the others could
                # not share a block with it.
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                self._wholes.append(self._manager.ownership.adopt_tensor(whole, sole=self._is_sole))

    def _later(self, container: Any) -> Any:
        self._waiting.append(container)
        return container

    def _fill(self, container: Any) -> None:
        items = container.items() if isinstance(container, MutableMapping) else enumerate(container)
        for key, before in list(items):
            if type(before) in _LEAVES:
                continue
            after = self._of(before)
            if after is not before:
                _put(container, key, after)


#: Sequences that hold numbers only, and kinds of values that hold nothing.
_NUMBERS = (bytearray, memoryview, array, range, str, bytes)
_LEAVES = frozenset({int, float, bool, complex, str, bytes, type(None)})


def _put(container: Any, key: Any, value: Any) -> None:
    """Exchange an entry as its class does, which may keep it twice; past it where it refuses.

    A mapping that is no dictionary, and refuses, keeps the plain tensor.
    """
    with suppress(Exception):
        container[key] = value
    kinds: tuple[Any, ...] = (OrderedDict, dict, list)
    kind = next((kind for kind in kinds if isinstance(container, kind)), None)
    if kind is not None and kind.__getitem__(container, key) is not value:
        kind.__setitem__(container, key, value)


#: What adopts what is being read from a file; None: nothing is.
loading: Scopes[Adoption | None] = Scopes("torchTensorRef.loading", None)


def load_file_adopted(module: Any) -> Callable[[], None]:
    """Have a function of safetensors adopt what it gives; return what undoes it."""
    patch = Patch(module.__name__, "load_file", load_wrapper, "reads the tensors of a file")
    patch.install()
    return patch.uninstall
