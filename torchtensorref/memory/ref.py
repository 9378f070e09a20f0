"""The bare TensorRef, so that everybody above blocks can name the class of what they are given.

It has metadata, a block and the plain views kept of it; what a program sees of it beside a tensor's
own methods is attached above (`tensor/install.py`).

In C++ a TensorRef is a tensor of torch's own class, or of whichever class the program makes of it
(`nn.Parameter`), and `isinstance(x, TensorRef)` asks the tensor. In Python it is of this class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import core


class RefType(type(torch.Tensor)):  # type: ignore[misc]
    """The class of the class TensorRef: says what is one."""


class TensorRef(torch.Tensor, metaclass=RefType):
    """A tensor that refers to a block instead of holding bytes.

    It is a `torch.Tensor`: whatever takes one takes this. Shape, dtype, strides and the device the
    program asked for are its own; the bytes belong to the block, on whichever device the manager
    has put them. Make one by making a tensor while torchTensorRef is installed, or with
    `tensorsManager.adopt(tensor)`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    #: The block, and the plain view over its replica on `_ttr_device`, once made. No defaults: the
    #: ready path reads these of every operand, and Python finds what a class has none of faster.
    _ttr_block: Any
    _ttr_plain: Any
    _ttr_device: Any
    #: The plain view over the replica at home, once made.
    _ttr_home: torch.Tensor | None = None


if core.library is None:
    # Libraries choose what they do with an array by these names; to them it is what it stands for.
    TensorRef.__module__ = torch.Tensor.__module__
    TensorRef.__name__ = torch.Tensor.__name__
    TensorRef.__qualname__ = torch.Tensor.__qualname__
else:
    RefType.__instancecheck__ = core.library.is_ref


def is_ref(thing: Any) -> bool:
    """Whether an object, whatever it is, is a TensorRef: by its class, without asking it."""
    if core.library is None:
        return type(thing) is TensorRef
    return bool(core.library.is_ref(thing))


_TORCHS_OWN = (torch.Tensor, torch.nn.Parameter)


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of torch's own classes, and no TensorRef."""
    return type(value) in _TORCHS_OWN and not isinstance(value, TensorRef)


def is_of_own_class(ref: Any) -> bool:
    """Whether a TensorRef is of a class of the program's, as in C++ it may be."""
    return core.library is not None and type(ref) not in _TORCHS_OWN


def attributes_given(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the program has given a tensor.

    Left out is what we keep about it there, and torch's mark of a parameter.
    """
    return {
        name: value
        for name, value in vars(tensor).items()
        if not name.startswith("_ttr_") and name != "_is_param"
    }


def as_parameter(ref: Any) -> Any:
    """Return a TensorRef as a parameter: in Python the same one, marked as torch marks them."""
    if core.library is None:
        ref._is_param = True
        return ref
    made = core.library.without_python(ref).requires_grad_(ref.requires_grad)
    made.__class__ = torch.nn.Parameter
    return made


class Wiring:
    """What torch has to be told of the class, done before the first TensorRef is made."""

    def __init__(self) -> None:
        self.is_done = False
        #: Tells torch; given by `tensor/install.py`, which knows what there is to tell.
        self.do: Callable[[], None]


wiring = Wiring()
