"""Between a TensorRef and the plain tensors it stands for: views over replicas, and back."""

from __future__ import annotations

from typing import Any

import torch

from ..base import forking
from ..base.activation import moving
from ..devices.base import Device
from ..devices.storages import bytes_of, over_same_memory
from . import core
from .block import Block
from .ref import TensorRef, wiring

#: A dispatch key above autograd that torch itself leaves alone. Every TensorRef carries it, so that
#: `autograd/overrides.py` can treat a few operators there; elsewhere it falls through inside torch.
KEY_NAME = "DeferredInit"
KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY_NAME))


class Labelled:
    """Whether a TensorRef has ever been labelled other than cpu (a default device, cuda).

    Until then torch's own maker of wrappers makes them, with the fewest arguments. In C++ never.
    """

    def __init__(self) -> None:
        self.otherwise = core.library is not None


labelled = Labelled()


#: Where a tensor is used on two accelerators at once, a view is kept together with its device.
#: One can be entered again: what is let go of inside may have a finalizer.
_keeping = forking.RLock()

_make_wrapper = torch.Tensor._make_wrapper_subclass
# Not `torch.empty`: injection replaces that name, and only a plain tensor will do here.
_empty = torch._C._VariableFunctions.empty


def make_ref(plain: torch.Tensor, block: Block, device: Device, label: torch.device) -> Any:
    """Make the TensorRef that stands for a plain tensor over a replica of `block`.

    Torch's lazy conjugate and negative bits are on both, so that its own fallbacks see them on the
    TensorRef and resolve them there, and kernels that handle them see them on the plain tensor.
    """
    if not wiring.is_done:
        wiring.do()
    if core.library is not None:
        return _make_in_cpp(plain, block, device, label)
    ref: Any = _make_wrapper(
        TensorRef,
        plain.size(),
        strides=plain.stride(),
        storage_offset=plain.storage_offset(),
        dtype=plain.dtype,
        device=label,
        _extra_dispatch_keys=KEYS,
    )
    if label.type != "cpu":
        labelled.otherwise = True
    ref._ttr_block = block
    if not keeps_views(block, device):
        ref._ttr_plain = ref._ttr_device = None
    else:
        if device.is_host:
            ref._ttr_home = plain
        ref._ttr_plain = plain
        ref._ttr_device = device
    if plain.is_conj() or plain.is_neg():
        _set_lazy_bits(ref, plain)
    return ref


def bare_ref(
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int | torch.SymInt,
    dtype: torch.dtype,
    label: torch.device,
    block: Block | None,
) -> Any:
    """Make a TensorRef with such metadata over a block of which no plain tensor is at hand."""
    assert block is not None
    if core.library is not None:
        like = _empty((0,), dtype=dtype)
        return core.library.bare_ref(like, size, stride, offset, block, label)
    ref: Any = _make_wrapper(
        TensorRef,
        size,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        device=label,
        _extra_dispatch_keys=KEYS,
    )
    ref._ttr_block = block
    ref._ttr_plain = ref._ttr_device = None
    return ref


def ref_like(plain: torch.Tensor, offset: int | torch.SymInt, block: Block) -> Any:
    """Make a TensorRef with a plain tensor's metadata over a block, elsewhere in its storage.

    The plain tensor itself is not kept: a view over a replica is made when an operator needs one.
    """
    if not wiring.is_done:
        wiring.do()
    size, stride, label = plain.size(), plain.stride(), plain.device
    if core.library is not None:
        return core.library.bare_ref(plain, size, stride, offset, block, label)
    ref = bare_ref(size, stride, offset, plain.dtype, label, block)
    if plain.is_conj() or plain.is_neg():
        _set_lazy_bits(ref, plain)
    return ref


def _make_in_cpp(plain: torch.Tensor, block: Block, device: Device, label: torch.device) -> Any:
    """Make it as a tensor of C++'s, which autograd takes for a plain one."""
    ref = core.library.make_ref(plain, block, device, label)
    if not keeps_views(block, device):
        ref._ttr_plain = None
    elif device.is_host and not (plain.is_conj() or plain.is_neg()):
        ref._ttr_home = plain  # of others it would have old sizes, see `plain_on`
    return ref


def _set_lazy_bits(ref: Any, like: torch.Tensor) -> None:
    torch._C._set_conj(ref, like.is_conj())
    torch._C._set_neg(ref, like.is_neg())
    # Never on the ready path, which hands plain results on without a look at such bits.
    ref._ttr_device = None


def alias_of(ref: Any, block: Block | None = None) -> Any:
    """Make another TensorRef with the same metadata, over the same or another block."""
    if core.library is not None:
        return core.library.alias_of(ref, block)
    twin = _make_wrapper(
        type(ref),
        ref.size(),
        strides=ref.stride(),
        storage_offset=ref.storage_offset(),
        dtype=ref.dtype,
        device=ref.device,
        _extra_dispatch_keys=KEYS,
    )
    if block is None or block is ref._ttr_block:
        _point_at_the_same(twin, ref)
    else:
        twin._ttr_block = block
        twin._ttr_plain = twin._ttr_device = None
    if ref.is_conj() or ref.is_neg():
        _set_lazy_bits(twin, ref)
    return twin


def keeps_views(block: Block, device: Device) -> bool:
    """Whether a view over a replica may be kept for the next time.

    A block that shares its replicas may leave them, and a device that cannot empty a storage gives
    a replica another one: a view that was kept would stay behind. One that has left those of its
    own, as a promise does, may have such views already.
    """
    is_first = block.sharers is None or block.owner is block
    return is_first and not block.left and not device.exchanges_storages


def replace_metadata(ref: Any, other: Any) -> None:
    """Make a TensorRef stand for what another one stands for, keeping its identity and autograd."""
    note_moved = moving.get()
    if note_moved is not None:
        note_moved(ref)
    with torch.no_grad():
        torch._C.TensorBase.data.__set__(ref, other)  # type: ignore[attr-defined]
    if core.library is None:
        _point_at_the_same(ref, other)


def exchange(ref: Any, other: Any) -> None:
    """Give a TensorRef what another one is, its part in autograd as well, and the reverse."""
    torch._C._swap_tensor_impl(ref, other)
    if core.library is None:
        _point_at_the_same(ref, other)


def follow(ref: Any, other: Any) -> None:
    """Make a TensorRef that an operator has changed stand for what another one stands for.

    In inference mode what is made is of that mode, and a tensor that was changed stays what it was.
    """
    with torch.inference_mode(ref.is_inference()):
        replace_metadata(ref, alias_of(other))


def _point_at_the_same(ref: Any, other: Any) -> None:
    ref._ttr_block = other._ttr_block
    ref._ttr_plain, ref._ttr_device = other._ttr_plain, other._ttr_device
    ref._ttr_home = other._ttr_home


def plain_on(ref: Any, device: Device) -> torch.Tensor:
    """Return the plain view that a TensorRef stands for, over the replica on `device`.

    The replica must have its bytes there. The view is kept for the next time, unless the block
    shares its replicas and may leave them.
    """
    block: Block = ref._ttr_block
    keeps = keeps_views(block, device)
    if keeps:
        if device.is_host:
            # A block at home can change its storage object (`resize_` of borrowed memory).
            home = block.replicas[device].base.untyped_storage()
            if ref._ttr_home is not None and ref._ttr_home.untyped_storage()._cdata == home._cdata:
                return ref._ttr_home  # type: ignore[no-any-return]
        else:
            with _keeping:
                if ref._ttr_device is device:
                    return ref._ttr_plain  # type: ignore[no-any-return]
    view = view_of(ref, block.replicas[device].base)
    # Torch gives what is still to be conjugated, and is an `out=`, other sizes without telling us.
    if keeps and not (view.is_conj() or view.is_neg()):
        if device.is_host:
            ref._ttr_home = view
        else:
            with _keeping:
                ref._ttr_device = None  # nobody takes the one with the other's device
                ref._ttr_plain = view
                ref._ttr_device = device
    return view


def for_writing(ref: Any, device: Device) -> torch.Tensor:
    """Make a plain view that a kernel may write, and resize unless it is held outside.

    One of its own, which may be given other sizes (`t_`, `out=`): aliases share the one that is
    kept. An array or a storage that the program holds is over memory that a kernel which grows its
    `out=` would free. One of the twins over it, ours and the one that was handed out, refuses
    that, with torch's own error. So does one of what is held on another device: the bytes there
    would not grow along.
    """
    block: Block = ref._ttr_block
    exposure, base = block.exposure, block.replicas[device].base
    if exposure is not None and exposure.device is device and exposure.held:
        assert exposure.storage is not None
        if base.untyped_storage().resizable() and not exposure.storage.resizable():
            return view_over(ref, exposure.storage)
    elif exposure is not None and exposure.device is not device and exposure.alive:
        return view_of(ref, over_same_memory(bytes_of(base)))
    return view_of(ref, base)


def view_of(ref: Any, base: torch.Tensor) -> torch.Tensor:
    """Make the plain view with a TensorRef's metadata over the storage of `base`."""
    return view_over(ref, base.untyped_storage())


def view_over(ref: Any, storage: torch.UntypedStorage) -> torch.Tensor:
    """Make the plain view with a TensorRef's metadata over a storage."""
    return view_with(ref, storage, ref.storage_offset())


def view_with(
    like: torch.Tensor, storage: torch.UntypedStorage, offset: int | torch.SymInt
) -> torch.Tensor:
    """Make a plain view with the metadata of `like` over a storage, `offset` elements in.

    It outlives the inference mode in which it may be made: it is of that only where `like` is.
    """
    if torch.is_inference_mode_enabled() and not like.is_inference():
        with torch.inference_mode(False):
            return view_with(like, storage, offset)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        view: torch.Tensor = _empty((0,), dtype=like.dtype, device=storage.device)
        view.set_(storage, offset, like.size(), like.stride())
        view = view.conj() if like.is_conj() else view
        return view._neg_view() if like.is_neg() else view
