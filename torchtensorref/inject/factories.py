"""What our patches do around torch's factories: the tensor that comes out is a TensorRef.

The hot part of injection. A factory that is called from torch itself, or from an excluded module,
costs one look into a dictionary more than without us.
"""

from __future__ import annotations

import functools
import logging
from sys import _getframe
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from ..base.activation import making, when_drawn, when_made
from ..base.errors import ConfigError
from ..base.options import settings
from ..devices.out_of_memory import is_out_of_memory
from ..interception.tracebacks import hides
from ..tensor.device_names import asked_of, canonical, is_foreign, note_asked
from .hooks import disabled, is_disabled, is_ref, load, state
from .inject_to import check_known, injectTo

if TYPE_CHECKING:
    from ..devices.base import Device
    from ..memory.bookkeeping import Books

__tracebackhide__ = hides

_log = logging.getLogger("torchTensorRef")

_decisions = injectTo.decisions
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_is_disabled = is_disabled.get


def takes_part(module_name: Any) -> bool:
    """Whether what is made now, by code of that module, comes under management."""
    return state.active and _decisions[module_name] and not _is_disabled()


def is_plain_world() -> bool:
    """Whether tensors are being made for real: nothing traces, transforms or imitates them."""
    return (
        not _dispatch_modes()
        and (not _function_modes() or _only_a_default_device())
        and _functorch_level() is None
        and _tracing() is None
    )


def _only_a_default_device() -> bool:
    return all(
        type(_function_mode_at(place)) is DeviceContext for place in range(_function_modes())
    )


# -- devices that this torch cannot name ----------------------------------------------------------


def _default_device() -> Any:
    """The device of the innermost `with torch.device(...)`, else of `torch.set_default_device`."""
    for place in reversed(range(_function_modes())):
        mode = _function_mode_at(place)
        if type(mode) is DeviceContext:
            return mode.device
    return None


# -- factories ------------------------------------------------------------------------------------


def own_memory_factory(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a factory whose result owns its memory, and wrap the result."""
    if state.active and not _is_disabled():
        if _decisions[_getframe(1).f_globals.get("__name__", "")]:
            make = making.get()
            promise = NotImplemented if make is None else _promise(make, wrapped, args, kwargs)
            if promise is not NotImplemented:
                return promise
            _say_if_it_draws(wrapped, kwargs)
            return _make(wrapped, args, kwargs)
        kwargs = with_known_device(kwargs)
    _say_if_it_draws(wrapped, kwargs)
    return _told_of(wrapped(*args, **kwargs), kwargs)


def _say_if_it_draws(wrapped: Any, kwargs: dict[str, Any]) -> None:
    if when_drawn and load(".operators.random_numbers").draws_random(wrapped.__name__):
        for tell in when_drawn:
            tell(kwargs.get("generator") or torch.default_generator)


def _told_of(made: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a factory has made, once those know who want to."""
    if not when_made or kwargs.get("out") is not None or not is_plain_world():
        return made
    if type(made) is Tensor and not is_ref(made) and made.layout is torch.strided:
        for tell in when_made:
            tell(made)
    return made


def _promise(make: Any, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_plain_world() or (_function_modes() and _default_device().type == "meta"):
        return NotImplemented
    return make(wrapped, args, with_known_device(kwargs), _for_real)


def _for_real(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory that was to make a promise, for its bytes."""
    return _make(wrapped, args, kwargs)


def own_values_factory(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `torch.tensor`, and wrap the result."""
    if takes_part(_getframe(1).f_globals.get("__name__")):
        return _make(wrapped, args, kwargs)
    if state.active and not _is_disabled():
        kwargs = with_known_device(kwargs)
    return _told_of(wrapped(*args, **kwargs), kwargs)


def shared_memory_factory(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a factory whose result may share memory with its argument, and wrap the result."""
    asked = kwargs.get("device")
    if asked is None and wrapped.__name__ in _TOLD_BY_DEFAULT:
        asked = _asked_device(kwargs)
    known = with_known_device(kwargs) if asked is not None else kwargs
    is_ours = takes_part(_getframe(1).f_globals.get("__name__"))
    if not is_ours and (not state.active or _is_disabled()):
        return wrapped(*args, **kwargs)
    given = args[0] if args else kwargs.get("obj")
    with torch._C.DisableTorchFunction():  # a mode is to see the program's call alone
        is_moved = wrapped.__name__ == "asarray" and _is_moved(given, asked)
        # Autograd is to note the copy only if it would note one of what is given.
        as_given = {"requires_grad": getattr(given, "requires_grad", False)} if is_moved else {}
    made = _taken_there(wrapped, args, {**known, **as_given}, asked, is_ours)
    if not is_moved:
        return made
    # What the program says of gradients is said of the copy.
    said = {name: known[name] for name in ("device", "requires_grad") if name in known}
    with torch._C.DisableTorchFunction():
        return wrapped(made, **said)


def _is_moved(given: Any, asked: Any) -> bool:
    """Whether something is to be where torch cannot bring it, or comes from there."""
    if asked is None or not is_ref(given):
        return is_foreign(asked)
    return is_foreign(asked) or bool(asked_of(given)) or str(given.device) != str(asked)


def _taken_there(
    wrapped: Any, args: tuple[Any, ...], known: dict[str, Any], asked: Any, is_ours: bool
) -> Any:
    if is_ours:
        made = _call_and_wrap(wrapped, args, known, _adopted)
        with torch._C.DisableTorchFunction():
            return made.to(asked) if asked is not None and is_ref(made) else made
    made = wrapped(*args, **known)
    with torch._C.DisableTorchFunction():
        return made.clone() if is_foreign(asked) else made


#: Factories of that kind that go to the default device.
_TOLD_BY_DEFAULT = frozenset({"as_tensor", "asarray"})


def with_known_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Say "cpu" where a call, or the default device, names an accelerator torch cannot name.

    Page-locked memory is the runtime's business; torch refuses it where it finds no accelerator.
    """
    if not kwargs and not _function_modes():
        return kwargs
    if is_foreign(_asked_device(kwargs)):
        kwargs = {**kwargs, "device": "cpu"}
    if kwargs.get("pin_memory") and not torch.accelerator.is_available():
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


def _asked_device(kwargs: dict[str, Any]) -> Any:
    asked = kwargs.get("device")
    return _default_device() if asked is None and _function_modes() else asked


def _make(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory whose result owns its memory, and wrap that, with a note where it is to be."""
    known = with_known_device(kwargs)
    made = _call_and_wrap(wrapped, args, known, _fresh)
    if known is not kwargs and is_ref(made) and kwargs.get("out") is None:
        # `.to` of the same device gives the tensor itself, as it does where torch can name it.
        asked = _asked_device(kwargs)
        if is_foreign(asked):
            note_asked(made, canonical(asked))
    return made


def _call_and_wrap(wrapped: Any, args: tuple[Any, ...], known: dict[str, Any], wrap: Any) -> Any:
    plain = _with_room(wrapped, args, known)
    if type(plain) is not Tensor or is_ref(plain) or not is_plain_world():
        return plain
    if args and isinstance(args[0], torch.UntypedStorage):
        # safetensors makes tensors of a mapped file so, in whatever thread: they are adopted where
        # they are put, or by `load_wrapper`.
        return plain
    if known and (known.get("out") is not None or known.get("names") is not None):
        return plain
    return wrap(plain)


def _with_room(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory; where an accelerator has no room for what it makes, evict and call again."""
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError as error:
        residency = _core().manager.residency
        device = _accelerator_of(kwargs, residency.books)
        if not is_out_of_memory(error) or device.is_host or not device.kernels_allocate:
            raise
        residency.evictor.evict_some(device, residency.books.ledgers[device].resident_nbytes)
        device.give_up_caches()
    return wrapped(*args, **kwargs)


def _accelerator_of(kwargs: dict[str, Any], books: Books) -> Device:
    """The accelerator that an argument names, else the main one."""
    asked = _asked_device(kwargs)
    name = "" if asked is None else canonical(asked)
    return next((device for device in books.accelerators if device.name == name), books.main)


_CPU = torch.device("cpu")


def _fresh(plain: Tensor) -> Any:
    """Make the TensorRef over memory that nobody else has seen, on the device where it lies."""
    if plain.layout is not torch.strided:
        return _adopted(plain)
    _told_of(plain, {})
    core = _core()
    residency = core.manager.residency
    if plain.is_cpu:
        device, label = residency.books.host, _CPU
    else:
        label = plain.device
        device = next((d for d in residency.books.accelerators if d.torch_device == label), None)
        if device is None:
            return plain
    requires_grad = plain.requires_grad
    if requires_grad:
        plain = plain.detach()
    try:
        residency.repair()
        block = residency.born(plain, device)
        ref = core.make_ref(plain, block, device, label)
    except BaseException:
        core.manager.doubt()
        raise
    return ref.requires_grad_() if requires_grad else ref


class _Core:
    """The runtime as the factories need it; loaded by the first tensor."""

    def __init__(self) -> None:
        load(".tensor.install")
        self.TensorRef = load(".memory.ref").TensorRef
        self.manager = load(".memory.manager").tensorsManager
        self.make_ref = load(".memory.plain_views").make_ref
        say_what_is_simulated(self.manager)
        say_what_is_not_here()


def say_what_is_simulated(manager: Any) -> None:
    """Tell somebody who chose no device, on a machine without one, what the program runs on."""
    chosen = settings.device is not None or manager._device_setting is not None
    if not chosen and load(".devices.registry").default_name() == "sim":
        _log.warning(
            "torchTensorRef: torch finds no accelerator here, so a simulated one is used. "
            "Choose it (tensorsManager.device = 'sim', or TTR_DEVICE=sim) to silence this."
        )


def say_what_is_not_here() -> None:
    """Tell of a slip in `TTR_INJECT_TO` or `TTR_EXCLUDE`: now the program's modules are found."""
    try:
        check_known([*settings.inject_to, *settings.exclude])
    except ConfigError as error:
        _log.warning("torchTensorRef: TTR_INJECT_TO or TTR_EXCLUDE: %s", error)


_core = functools.cache(_Core)


def _adopted(plain: Tensor) -> Any:
    """Make the TensorRef over memory that others may hold, too."""
    if plain.device.type == "meta":
        return plain
    return _core().manager.ownership.adopt_tensor(plain)


def left_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function inside which everything that is made stays plain."""
    with disabled():
        return wrapped(*args, **kwargs)
