"""What a program sees of a TensorRef: where its bytes are, and how to bring them elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interception.entry import dispatch
from ..memory.manager import tensorsManager
from ..memory.plain_views import alias_of, replace_metadata
from ..memory.ref import TensorRef
from . import methods
from .device_names import names_any_accelerator
from .protocols import Protocols


class ProxyInfo(NamedTuple):
    """What `ref.proxyInfo` tells: a snapshot, taken without moving anything."""

    #: Name of the device where operators find the bytes now: "cpu", "sim:0", "cuda:0".
    device: str
    #: Bytes of the block, which all aliases share.
    nbytes: int
    #: Short stable name of the block, as in stories.
    block: str
    #: Operators that have used the block, as far as they had to ask.
    uses: int
    #: Number of the last operator that used it; 0 for none.
    last_use: int

    def __str__(self) -> str:
        return f"{self.block} {self.nbytes} bytes on {self.device}, used {self.uses} times"


class Surface(Protocols, TensorRef):  # type: ignore[misc]
    """What a program sees of a TensorRef: attached to the class itself, never made.

    For type checkers it is what `torchTensorRef.TensorRef` names.
    """

    def __new__(cls, data: Any, requires_grad: bool | None = None, **noted: Any) -> Any:
        """Return the TensorRef that shares the memory of `data`, a tensor.

        Libraries make a parameter anew as `type(p)(data, requires_grad, **p.__dict__)`, on the meta
        device too (accelerate's `init_empty_weights`): what a parameter notes makes another one.
        """
        if not isinstance(data, Tensor):
            raise TypeError(f"TensorRef refers to a tensor; got {type(data).__name__}")
        made = tensorsManager.adopt(data)
        if noted.get("_is_param"):
            return torch.nn.Parameter(made, requires_grad=requires_grad is not False)
        return made if requires_grad is None else made.detach().requires_grad_(requires_grad)

    def __init__(self, data: Any, requires_grad: bool | None = None, **noted: Any) -> None:
        """Nothing more: `__new__` has made it."""

    @property
    def proxyInfo(self) -> ProxyInfo:
        """Where the bytes are and how they have been used; looking moves nothing."""
        block = self._ttr_block
        device = tensorsManager.ownership.where(block)
        return ProxyInfo(device.name, block.nbytes, block.name, block.use_count, block.last_use)

    @property
    def target(self) -> Tensor:
        """The plain torch.Tensor where it is now; it stays there as long as you hold it."""
        return tensorsManager.ownership.target(self)

    def toGPU(self, device: Any = None) -> Surface:
        """Fetch the bytes to the accelerator now; return the same object.

        Parameters
        ----------
        device : str, torch.device or Device, optional
            Which of several accelerators in use, by name; the first if not given, or if this torch
            cannot name it ("cuda" on a build without).

        Raises
        ------
        OutOfBudgetError
            The block does not fit the budget; it is where it was.
        ConfigError
            That device is not in use.
        """
        if names_any_accelerator(device):
            device = None
        tensorsManager.ownership.to_accelerator(self, device)
        return self

    def toCPU(self) -> Surface:
        """Bring the bytes home now and give the accelerator's back; return the same object."""
        tensorsManager.ownership.to_host(self)
        return self

    @property
    def data(self) -> Any:
        """The same bytes without the autograd history; assigning makes this ref another's."""
        with torch.no_grad():
            return alias_of(self)

    @data.setter
    def data(self, other: Any) -> None:
        if type(other) is not TensorRef:
            other = tensorsManager.adopt(other)
        if type(other) is not TensorRef:
            raise TypeError(f"data must be a tensor that can be managed, not {type(other)}")
        replace_metadata(self, other)


def _attach(source: type) -> None:
    """Give TensorRef the attributes that a class defines in its body."""
    for name, value in vars(source).items():
        if name not in _OF_EVERY_CLASS:
            setattr(TensorRef, name, value)


_OF_EVERY_CLASS = frozenset(vars(type("Empty", (), {"__slots__": ()}))) | {
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
}

TensorRef.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]
_attach(Protocols)
_attach(Surface)
methods.attach()
