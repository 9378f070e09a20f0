"""TensorRef: a real torch.Tensor whose bytes are wherever they pay."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import overrides as above_autograd
from ..interception import handlers, higher_order
from ..interception.entry import dispatch
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEY_NAME, alias_of, replace_metadata
from ..regions.regions import Regions
from . import methods
from .protocols import Faces, reduce_for_process


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


class TensorRef(Faces, Tensor):  # type: ignore[misc]
    """A tensor that refers to a block instead of holding bytes.

    It is a `torch.Tensor`: whatever takes one takes this. Shape, dtype, strides and the device the
    program asked for are its own; the bytes belong to the block, on whichever device the manager
    has put them. Make one by making a tensor while torchTensorRef is installed, or with
    `tensorsManager.adopt(tensor)`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    #: The block, and the plain view over its replica on the device `_d`, once made. No defaults:
    #: the fast path reads these of every operand.
    _b: Any
    _t: Tensor | None
    _d: Any
    #: Plain view over the replica at home, once made.
    _h: Tensor | None = None

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

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
        block = self._b
        device = tensorsManager.where(block)
        return ProxyInfo(device.name, block.nbytes, block.name, block.use_count, block.last_use)

    @property
    def target(self) -> Tensor:
        """The plain torch.Tensor where it is now; it stays there as long as you hold it."""
        return tensorsManager.target(self)

    def toGPU(self) -> TensorRef:
        """Fetch the bytes to the accelerator now; return the same object.

        Raises
        ------
        OutOfBudgetError
            The block does not fit the budget; it is where it was.
        """
        tensorsManager.to_accelerator(self)
        return self

    def toCPU(self) -> TensorRef:
        """Bring the bytes home now and give the accelerator's back; return the same object."""
        tensorsManager.to_host(self)
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


tensorsManager.ref_type = TensorRef
tensorsManager.native = Regions(tensorsManager)
handlers.install(TensorRef)
ForkingPickler.register(TensorRef, reduce_for_process)
above_autograd.install()
higher_order.install(TensorRef, (KEY_NAME,))
methods.install(TensorRef)
