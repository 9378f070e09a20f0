"""What pickles and copies give comes under management as modules and optimizers get what they hold.

What is in no module and no optimizer stays plain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ..memory.names import names
from .factories import _core, is_plain_world
from .files import loading
from .hooks import is_disabled, is_ref, state
from .inject_to import injectTo
from .registration import module_behind


def module_state_wrapper(
    wrapped: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call `Module.__setstate__(state)`, by which pickles and copies give a module what it has.

    Now, also within `torch.load`: what a class does with its parameters next (an LSTM keeps a list
    of them, and weak references) it does with these objects.
    """
    wrapped(*args, **kwargs)
    if adopts_unpickled(sys._getframe(1)):
        names.note_module(module)
        adopt_certain(module)


def adopts_unpickled(frame: FrameType | None) -> bool:
    """Whether what a pickle or a copy gives here comes under management."""
    if not state.active or is_disabled.get() or not is_plain_world():
        return False
    return loading.get() is not None or injectTo.decisions[module_behind(frame)]


def adopt_certain(module: nn.Module) -> None:
    """Adopt a module's own parameters and buffers in place, those for which that can be done."""
    for registry in (module._parameters, module._buffers):
        adopt_all(list(registry.values()))


def adopt_all(things: Iterable[Any]) -> None:
    """Adopt the plain tensors among some things in place, those for which that can be done.

    Who else has their memory is seen by the users of the storage: an array or another tensor; but
    another process is not. What is just read from a file nobody else has.
    """
    adoption = loading.get()
    for thing in filter(is_left, things):
        if adoption is not None:
            adoption.in_place(thing)
        elif not thing.is_shared():
            _core().manager.ownership.try_adopt_in_place(thing)


def is_left(thing: Any) -> bool:
    """Whether something is a tensor that has stayed plain."""
    return type(thing) in (Tensor, nn.Parameter) and not is_ref(thing)
