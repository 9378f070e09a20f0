"""What a program sees of a TensorRef: where its bytes are, and how to bring them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interception import cpp_path
from ..interception.entry import dispatch
from ..interception.tracebacks import hides
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.plain_views import alias_of, replace_metadata
from ..memory.ref import TensorRef
from . import sparse as sparse
from .attributes import attach_to_class, attach_to_tensors
from .device_names import name_of_index, names_any_accelerator
from .protocols import Protocols

__tracebackhide__ = hides


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
    #: Whether it has no bytes yet: made inside `torchTensorRef.promising()`.
    promised: bool = False

    def __str__(self) -> str:
        return f"{self.block} {self.nbytes} bytes on {self.device}, used {self.uses} times"


class Surface(Protocols, TensorRef):  # type: ignore[misc, metaclass]
    """What a program sees of a TensorRef: attached to the class itself, never made.

    For type checkers it is what `torchTensorRef.TensorRef` names.
    """

    def __new__(cls, *values: Any, requires_grad: bool | None = None, **options: Any) -> Any:
        """Do what the class of a plain tensor, or of a parameter, does when it is called.

        Returns
        -------
        TensorRef or torch.nn.Parameter
            `type(p)(data, requires_grad=...)`, by which libraries make a parameter anew, gives a
            parameter, on whatever device; `type(x)(data)` the TensorRef that shares the memory of a
            tensor; `type(x)(2, 3)` and `type(x)([1.0, 2.0])` what `torch.Tensor` makes of that.

        Raises
        ------
        TypeError, RuntimeError
            As torch raises them for what it cannot make a tensor of.
        """
        options = {name: value for name, value in options.items() if not _is_ours(name)}
        is_tensor = bool(values) and isinstance(values[0], Tensor)
        if requires_grad is not None or (is_tensor and (len(values) > 1 or options)):
            parameter: Any = torch.nn.Parameter  # it says what else it takes, and refuses the rest
            if requires_grad is not None:
                options["requires_grad"] = requires_grad
            data = (tensorsManager.adopt(values[0]), *values[1:]) if is_tensor else values
            return parameter(*data, **options)
        if is_tensor:
            return tensorsManager.adopt(values[0])
        return tensorsManager.adopt(Tensor(*values, **options))

    def __init__(self, *values: Any, **options: Any) -> None:
        """Nothing more: `__new__` has made it."""

    @property
    def proxyInfo(self) -> ProxyInfo:
        """Where the bytes are and how they have been used; looking moves nothing."""
        block = self._ttr_block
        device = tensorsManager.ownership.where(block)
        return ProxyInfo(
            device.name,
            block.nbytes,
            block.name,
            block.use_count,
            block.last_use,
            block.promise is not None,
        )

    @property
    def target(self) -> Tensor:
        """The plain torch.Tensor where it is now; it stays there as long as you hold it."""
        return tensorsManager.ownership.target(self)

    def toGPU(self, device: Any = None) -> Surface:
        """Fetch the bytes to the accelerator now; return the same object.

        Parameters
        ----------
        device : str, int, torch.device or Device, optional
            Which of several accelerators in use, by name or index; the first if not given, or if
            this torch cannot name it ("cuda" on a build without).

        Raises
        ------
        OutOfBudgetError
            The block does not fit the budget; it is where it was.
        ConfigError
            That device is not in use.
        """
        if names_any_accelerator(device):
            device = None
        elif isinstance(device, int):
            in_use = tensorsManager.residency.books.accelerators
            device = name_of_index(device, [one.name for one in in_use])
        tensorsManager.ownership.to_accelerator(self, device)
        return self

    def fulfil(self) -> Surface:
        """Compute what was only promised, and all it depends on, in order; return the same object.

        Raises
        ------
        PromisedError
            It depends on what has no values: a forecast's tensors. What was computed on the way
            stays computed.
        """
        if self._ttr_block.promise is not None:
            tensorsManager.promises.fulfil(self._ttr_block)
        return self

    def toCPU(self) -> Surface:
        """Bring the bytes home now and give the accelerator's back; return the same object."""
        tensorsManager.ownership.to_host(self)
        return self

    @property
    def data(self) -> Any:
        """The same bytes without the autograd history; assigning makes this ref another's."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False):  # that of a normal tensor is normal, as a view is
                return self.data
        with torch.no_grad():
            return alias_of(self)

    @data.setter
    def data(self, other: Any) -> None:
        if not isinstance(other, Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(other).__name__}")
        if other.layout is not torch.strided:  # as another class it may be refused otherwise
            raise RuntimeError(_OTHER_KIND)
        ref = (
            other
            if isinstance(other, TensorRef)
            else tensorsManager.adopt(other.detach().as_subclass(Tensor))
        )
        if not isinstance(ref, TensorRef):
            raise RuntimeError(_OTHER_KIND)
        replace_metadata(self, ref)

    @data.deleter
    def data(self) -> None:
        raise RuntimeError("Deleting tensor data is not allowed. Delete tensor instead!")


#: What torch says of data of another kind: on the meta device, sparse.
_OTHER_KIND = (
    "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible "
    "tensor type."
)


def _is_ours(name: str) -> bool:
    """Whether a parameter's own notes, which libraries hand on, have it from us or from torch."""
    return name.startswith("_ttr_") or name == "_is_param"


if core.library is None:
    attach_to_class(Protocols, Surface)
    TensorRef.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]
else:
    cpp_path.set_up()


def attach() -> Callable[[], None]:
    """Give torch's class what TensorRefs need there; return what takes it away again."""
    return attach_to_tensors(Protocols, Surface)
