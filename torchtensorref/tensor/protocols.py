"""The protocols that a TensorRef keeps beside operators: arrays, printing, pickles, labels.

What torch gives a tensor in Python or C++, and what a wrapper has to give itself.
"""

from __future__ import annotations

import copy
import html
import sys
from typing import Any

import torch
from torch import Tensor
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _get_obj_state
from torch.multiprocessing.reductions import reduce_tensor

from ..autograd.of_class import OfClass
from ..base.units import format_nbytes
from ..interception.guards import may_bypass
from ..interception.tracebacks import hides
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef, as_parameter, attributes_given, is_of_own_class
from .device_names import asked_of, note_asked, says_host, take_out
from .printing import text_of

__tracebackhide__ = hides

#: Torch's own, where ours do a part only.
_register_hook = Tensor.register_hook
_deepcopy, _cpu = Tensor.__deepcopy__, Tensor.cpu


#: Who asks for addresses only to compare them (which tensors are tied?) or to read at once what
#: is there (safetensors), and keeps none. A pointer given to anybody else holds the bytes at home.
READ_AT_ONCE = frozenset(
    {"torch", "safetensors", "transformers", "accelerate", "huggingface_hub", "diffusers", "peft"}
)


class Protocols:
    """Methods of a TensorRef that hand out, print or serialise its bytes, or change its label."""

    __slots__ = ()

    # -- looking --------------------------------------------------------------------------------

    def _peek(self) -> Tensor:
        """A plain look at the current values; moves nothing, and may not be written or kept."""
        return tensorsManager.ownership.peek(self, edge=0)

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        """Print as a torch.Tensor prints."""
        return text_of(self, tensor_contents)

    def _repr_html_(self: Any) -> str:
        """Show the values in a notebook, and below them where they are."""
        block = self._ttr_block
        name, place = tensorsManager.names.of_operand(block), tensorsManager.ownership.where(block)
        where = f"{block.name} {name}".rstrip() + f", {format_nbytes(block.nbytes)} on {place.name}"
        return f"<pre>{html.escape(repr(self))}</pre><small>{html.escape(where)}</small>"

    def __format__(self: Any, spec: str) -> str:
        """Format as a tensor: a number where it has no dimension."""
        if self.dim() == 0 and self.device.type != "meta":
            return format(self.item(), spec)
        return object.__format__(self, spec)

    # -- gradients --------------------------------------------------------------------------------

    def register_hook(self: Any, hook: Any) -> Any:
        """Call a function with the gradient, as torch does; inside a region that is learned, tell.

        Natively it would be given a plain tensor.
        """
        recorder = tensorsManager.residency.recorder
        if recorder is not None:
            recorder.mistrust("it hooks a gradient")
        return _register_hook(self, hook)

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Any, expected_type: type | None = None
    ) -> Any:
        """Be the gradient that a compiled graph was given when it was a plain tensor's."""
        return self if expected_type in (None, Tensor) else None

    # -- giving bytes away ----------------------------------------------------------------------

    def exposed_plain(self: Any, why: str) -> Tensor:
        """Return a plain host tensor over the same bytes, which stay at home while it lives."""
        return tensorsManager.ownership.exposed_plain(self, why)

    def numpy(self: Any, *, force: bool = False) -> Any:
        """Return an array that shares the memory, as torch does and under its conditions."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg()._numpy_shared()
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return self._numpy_shared()

    def _numpy_shared(self: Any) -> Any:
        return self.exposed_plain("numpy").numpy()

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        """Give numpy the values: its own copy if it asks for one, else the shared memory.

        Raises
        ------
        TypeError
            It wants no copy (`copy=False`): torch's takes no such argument, so that numpy refuses.
        """
        if copy is False:
            raise TypeError("Tensor.__array__() got an unexpected keyword argument 'copy'")
        if self.requires_grad and torch.is_grad_enabled():
            return self.numpy()  # raises
        plain = self._peek().clone() if copy else self.exposed_plain("__array__")
        array = plain.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def apply_(self: Any, function: Any) -> Any:
        """Exchange each element, at home, for what a function makes of it."""
        _exposed(self).apply_(function)
        return self

    def map_(self: Any, other: Any, function: Any) -> Any:
        """Exchange each element, at home, for what a function makes of it and another's."""
        _exposed(self).map_(_exposed(other), function)
        return self

    def map2_(self: Any, x: Any, y: Any, function: Any) -> Any:
        """Exchange each element for what a function makes of it and two others'."""
        _exposed(self).map2_(_exposed(x), _exposed(y), function)
        return self

    def data_ptr(self: Any) -> int:
        """Return the address of the first element, at home; the bytes stay there from now on.

        Libraries that only compare addresses, or read the bytes at once (`READ_AT_ONCE`), get the
        address without that: nothing is held for them.
        """
        if _asker() in READ_AT_ONCE:
            # Copies that still share their bytes must not look like one tensor.
            tensorsManager.residency.sharing.unshare(self._ttr_block)
            return tensorsManager.ownership.plain_at_home(self).data_ptr()  # type: ignore[no-any-return]
        return tensorsManager.ownership.exposed_plain(self, "data_ptr", forever=True).data_ptr()

    def as_subclass(self: Any, cls: Any) -> Any:
        """Return a tensor of another class over the same bytes, which stay at home meanwhile."""
        if self.requires_grad and torch.is_grad_enabled():
            return OfClass.apply(self, cls)
        return self.exposed_plain("as_subclass").as_subclass(cls)

    def untyped_storage(self: Any) -> torch.UntypedStorage:
        """Return the storage of the bytes at home, held there while somebody uses it."""
        return tensorsManager.ownership.expose(self, "untyped_storage")

    def storage(self: Any) -> Any:
        """Return the typed storage; see `untyped_storage`."""
        torch.storage._warn_typed_storage_removal(stacklevel=2 if core.library is None else 3)
        return self._typed_storage()

    def _typed_storage(self: Any) -> Any:
        return torch.TypedStorage(
            wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True
        )

    def __dlpack__(self: Any, **options: Any) -> Any:
        """Export through DLPack, as torch does for the plain tensor at home."""
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.exposed_plain("DLPack").__dlpack__(**options)

    def __dlpack_device__(self: Any) -> Any:
        """Say where DLPack finds the bytes: at home."""
        return (torch.utils.dlpack.DLDeviceType.kDLCPU, 0)

    def share_memory_(self: Any) -> Any:
        """Move the bytes at home into shared memory, where they stay."""
        tensorsManager.ownership.share_memory(self)
        return self

    def is_shared(self: Any) -> bool:
        """Whether the bytes at home are in shared memory."""
        return tensorsManager.ownership.is_shared_memory(self)

    def is_pinned(self: Any, device: Any = None) -> bool:
        """Whether the bytes are page-locked: not as far as the program can tell."""
        return False

    def pin_memory(self: Any, device: Any = None) -> Any:
        """Return a copy, as torch does; its bytes are shared until one of the two is written.

        To page-lock them is the runtime's business.
        """
        return torch.ops.aten._pin_memory.default(self)

    # -- others like it -------------------------------------------------------------------------

    def new_tensor(self: Any, data: Any, **options: Any) -> Any:
        """Return a tensor of these values, with this one's dtype and label unless told others."""
        return _adopted(empty_like(self).new_tensor(data, **options))

    def new(self: Any, *args: Any, **options: Any) -> Any:
        """Return a tensor of a size or of values, with this one's dtype and label."""
        return _adopted(empty_like(self).new(*args, **options))

    # -- serialising ----------------------------------------------------------------------------

    def __reduce_ex__(self: Any, proto: Any) -> Any:
        """Serialise as the plain tensor it stands for, so that it loads without us."""
        plain = tensorsManager.ownership.plain_to_serialise(self)
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        elif self.requires_grad:  # a transform of functorch refuses to hear of it
            plain.requires_grad_()
        if is_of_own_class(self):
            make, args = plain._reduce_ex_internal(proto)
            return _rebuild_from_type_v2, (make, type(self), args, _get_obj_state(self))
        plain.__dict__.update(attributes_given(self))
        return plain.__reduce_ex__(proto)

    def __copy__(self: Any) -> Any:
        """Return another TensorRef on the same bytes, with the same attributes."""
        if not isinstance(self, TensorRef):
            return _copy_of_plain(self)
        with torch._C.DisableTorchFunctionSubclass():  # its class is given to it below
            twin = self.data  # which counts its versions by itself
            if self.requires_grad:
                twin.requires_grad_()
        if isinstance(self, torch.nn.Parameter):
            twin = as_parameter(twin)
        elif is_of_own_class(self):
            return _rebuild_from_type_v2(lambda: twin, type(self), (), _get_obj_state(self))
        twin.__dict__.update(attributes_given(self))
        return twin

    def __deepcopy__(self: Any, memo: Any) -> Any:
        """Return a copy whose bytes are shared until one of the two is written."""
        if not self.is_leaf or is_of_own_class(self):
            # The first raises torch's own explanation. A class may have to say what is copied.
            return _deepcopy(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, torch.nn.Parameter):
            # A parameter is cloned: of all that shares its memory only itself comes along, and as
            # with torch neither its gradient nor what is noted on it.
            twin = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = twin = torch.nn.Parameter(twin, self.requires_grad)
            return twin
        # Views that shared memory go on sharing it in the copy: the memo maps blocks too.
        block = memo.get(id(self._ttr_block)) or _copied_with_storage(self, memo)
        twin = tensorsManager.ownership.copy_of(self, block)
        memo[id(self._ttr_block)] = twin._ttr_block
        with torch.no_grad():
            twin = twin.resolve_conj().resolve_neg()  # as torch, whose copy has memory of its own
        memo[id(self)] = twin
        if self.requires_grad:
            twin.requires_grad_()
        for name, value in attributes_given(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    # -- labels ---------------------------------------------------------------------------------

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert dtype, layout or label as torch does; a label moves no bytes.

        Between the host and a device that torch cannot name it gives bytes of its own.
        """
        if len(args) == 1 and not kwargs and may_bypass(autocast=False) and args[0] is self.dtype:
            return self  # as torch, which takes longer to find that out
        device, rest = take_out(args, kwargs)
        if device:
            return self._on_foreign(device, **rest)
        made = _to(self, *args, **kwargs)
        is_left = made is self and says_host(args, kwargs) and asked_of(self)
        return self._own_copy() if is_left else made

    def _on_foreign(
        self: Any,
        device: str,
        dtype: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        """Return what `.to` gives: bytes of the program's own, once one of the two is written."""
        twin: Any = _to(self, "cpu", dtype or self.dtype, memory_format=memory_format)
        if twin is self:
            if not copy and asked_of(self) == device:
                return self
            return self._own_copy(device)
        note_asked(twin, device)
        return twin

    def _own_copy(self: Any, device: str | None = None) -> Any:
        is_seen = not may_bypass(autocast=False) or (self.requires_grad and torch.is_grad_enabled())
        is_whole = self.is_contiguous() and self.nbytes == self._ttr_block.nbytes
        twin = (
            self.clone()
            if is_seen or not is_whole
            else tensorsManager.ownership.copy_of(self, None)
        )
        note_asked(twin, device)
        return twin

    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        """Ask for the accelerator: changes the label where this torch can carry it."""
        return self.to(_of_kind("cuda", device), non_blocking=non_blocking, **options)

    def xpu(self: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        """Ask for an accelerator of Intel's; see `cuda`."""
        return self.to(_of_kind("xpu", device), non_blocking=non_blocking, **options)

    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask for the host: changes the label and moves no bytes; see `to`."""
        made: Any = _cpu(self, *args, **kwargs)
        return self._own_copy() if made is self and asked_of(self) else made


def _copied_with_storage(ref: Any, memo: Any) -> Any:
    """Copy a block as torch does, where the program has its storage, which may be copied too."""
    exposure = ref._ttr_block.exposure
    if exposure is None or not exposure.device.is_host or not exposure.held:
        return None
    copied = torch.empty(0, dtype=torch.uint8, device="cpu")
    copied.set_(copy.deepcopy(ref.untyped_storage(), memo))
    block = tensorsManager.adopt(copied)._ttr_block
    block.is_persistent = ref._ttr_block.is_persistent
    return block


def _asker() -> str:
    """Name the library that calls a method of ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0]


#: Torch's own, also where injection has put ours in its place.
_to = getattr(Tensor.to, "__wrapped__", Tensor.to)


def _of_kind(kind: str, device: Any) -> Any:
    named = torch.device(kind, device) if isinstance(device, int) else device
    return kind if device is None else named


def _copy_of_plain(tensor: Any) -> Any:
    """Do what `copy.copy` does where a class has no `__copy__`; it asks the class."""
    make, args, *rest = tensor.__reduce_ex__(4)
    twin = make(*args)
    if rest and rest[0] is not None:
        twin.__setstate__(rest[0])
    return twin


def empty_like(ref: Any) -> Tensor:
    """Make a plain tensor to call what torch answers in C++ from a tensor's own memory."""
    return torch._C._VariableFunctions.empty((0,), dtype=ref.dtype, device=ref.device)


def _exposed(value: Any) -> Any:
    """Return what torch refuses where it has a gradient: a plain tensor over the same bytes."""
    if isinstance(value, TensorRef):
        plain = tensorsManager.ownership.exposed_plain(value, "a function for each element")
        return plain.requires_grad_(value.requires_grad)
    return value


def _adopted(plain: Tensor) -> Any:
    return tensorsManager.ownership.adopt_tensor(plain, sole=True)


def reduce_for_process(ref: Any) -> Any:
    """Send a TensorRef to another process as torch sends a tensor: its memory becomes shared."""
    if not isinstance(ref, TensorRef):
        return reduce_tensor(ref)
    if ref.requires_grad and not ref.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd "
            "does not support crossing process boundaries. If you just want to transfer the data, "
            "call detach() on the tensor before serializing (e.g., putting it on the queue)."
        )
    tensorsManager.ownership.share_memory(ref)
    # Over the very storage at home, whose file the other process maps; a twin would be copied.
    plain = tensorsManager.ownership.plain_at_home(ref).detach()
    if isinstance(ref, torch.nn.Parameter):
        plain = torch.nn.Parameter(plain, requires_grad=ref.requires_grad)
    return reduce_tensor(plain.requires_grad_(ref.requires_grad))
