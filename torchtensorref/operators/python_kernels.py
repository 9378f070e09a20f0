"""Operators whose kernels a program has written in Python (`torch.library`).

Such a kernel may make an array of what it is given, or return a tensor over an array. Either way
torch takes the storage for one that can never be resized, and so never be emptied: it is given
other storage objects over the operands' memory, and what it returns is copied where it has to be.

And it may write what its schema does not mark, which in plain torch nobody notices. So one that
marks nothing is taken to write each of its operands the first time, which is looked at.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter, tree_map

from .substitutes import Substitute

#: Without the patches that serve TensorRefs.
storage_of = torch._C.TensorBase.untyped_storage
_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
#: By the type of a device: the dispatch key of its kernels.
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
#: Those of kernels that run before one of these, or instead of it (also where none is named).
_ABOVE = {
    *("Autograd", *(f"Autograd{key}" for key in _BACKENDS.values())),
    *("AutogradFunctionality", "ADInplaceOrView", "BackendSelect", "CompositeImplicitAutograd", ""),
}


def has_kernel_in_python(op: OpOverload) -> bool:
    """Whether the host runs an operator by what has been given to `torch.library`."""
    if op.namespace in ("aten", "prims"):
        return False
    return _has_any(op, _KEYS)


def is_replaced(op: OpOverload) -> bool:
    """Whether a program has given an operator of torch's own another kernel, in Python."""
    return _has_any(op, {*_KEYS, *_BACKENDS.values(), ""})


def is_replaced_above(op: OpOverload, *, as_one: bool) -> bool:
    """Whether it has one that torch calls before that of a device: autograd's, mostly.

    A composite operator that runs `as_one` has, if any has: it may be made of that.
    """
    if not as_one:
        return _has_any(op, _ABOVE)
    kernels = [kernel.split("/") for kernel in list(torch.library._impls)]
    return any(space == "aten" and key in _ABOVE for space, _, key in kernels)


def _has_any(op: OpOverload, keys: Collection[str]) -> bool:
    name = op.name().replace("::", "/")
    return any(f"{name}/{key}" in torch.library._impls for key in keys)


def is_recorded_inside(op: OpOverload) -> bool:
    """Whether a device has a kernel that autograd looks into."""
    return any(recorded_inside(op, device_type) is not None for device_type in _BACKENDS)


def recorded_inside(op: OpOverload, device_type: str) -> Any:
    """Return the key by which a device has a kernel that autograd looks into; None of any other.

    Where there is no formula for an operator, autograd records what a kernel in Python is made of.
    One that is for an accelerator alone is taken to be given addresses there.
    """
    key = _BACKENDS.get(device_type)
    if key is None or not has_kernel_in_python(op) or has_kernel(op, "Autograd", f"Autograd{key}"):
        return None
    own = key if has_kernel(op, key) else "CompositeExplicitAutograd"
    name = op.name().replace("::", "/")
    if f"{name}/{own}" not in torch.library._impls or own not in _KEYS:
        return None
    return getattr(torch._C.DispatchKey, own)


def is_for_accelerators(op: OpOverload) -> bool:
    """Whether an accelerator has a kernel of its own for an operator."""
    return has_kernel(op, *(key for key in _BACKENDS.values() if key != "CPU"))


def has_kernel(op: OpOverload, *keys: str) -> bool:
    """Whether an operator has a kernel for one of some dispatch keys."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def is_doubted(op: OpOverload) -> bool:
    """Whether an operator's schema may leave out what it writes.

    `torch.library.custom_op` asks what is written; who writes a schema need not say.
    """
    return (
        has_kernel_in_python(op)
        and op.name() not in OPDEFS
        and not any(argument.is_write for argument in op._schema.arguments)
    )


class Doubted(Substitute):
    """An operator that is taken to write some of its operands, until it has been seen with them.

    Parameters
    ----------
    op : OpOverload
        The operator.
    run : callable
        What runs it on plain tensors.
    unseen : collection of str
        The arguments that are looked at where a call has them.
    learn : callable
        Is told the names of those that a call had, and of those among them that it has written.
    """

    def __init__(
        self,
        op: OpOverload,
        run: Callable[..., Any],
        unseen: Collection[str],
        learn: Callable[[set[str], set[str]], None],
    ) -> None:
        self.op = op
        self._run = run
        self._unseen = unseen
        self._learn = learn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and look what has become of the bytes of each operand that is new."""
        names = [argument.name for argument in self.op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sums = {name: _sums_of(given[name]) for name in self._unseen if name in given}
        before = {name: found for name, found in sums.items() if found}
        out = self._run(*args, **kwargs)
        if before:
            written = {name for name, found in before.items() if _sums_of(given[name]) != found}
            self._learn(set(before), written)
        return out


def _sums_of(value: Any) -> list[int]:
    """A checksum of the bytes of each tensor among a value that has any."""
    tensors = [x for x in tree_iter(value) if isinstance(x, Tensor) and x.numel()]
    plain = [x for x in tensors if x.layout is torch.strided and not x.is_quantized]
    return [zlib.crc32(_bytes_of(x)) for x in plain if not (x.is_meta or x.is_nested)]


def _bytes_of(plain: Tensor) -> Any:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        # A copy: a storage under an array could never be resized.
        values = plain.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        return values.view(-1).view(torch.uint8).numpy()


class OverTwins(Substitute):
    """An operator on plain tensors, whose kernel never gets hold of their storages."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on twins; what it hands back of them is over the operands again."""
        #: By the address of a storage object: its other one.
        twins: dict[int, torch.UntypedStorage] = {}
        operands: dict[int, torch.UntypedStorage] = {}

        def twin(value: Any) -> Any:
            if not isinstance(value, Tensor) or not _can_be_an_array(value):
                return value
            storage = storage_of(value)
            if not storage.resizable():
                return value
            if storage._cdata not in twins:
                twins[storage._cdata] = other = _twin_of(storage)
                operands[other._cdata] = storage
            return _over(value, twins[storage._cdata])

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or not _can_be_an_array(value):
                return value
            storage = storage_of(value)
            if storage._cdata in operands:
                return _over(value, operands[storage._cdata])
            return value if storage.resizable() else value.clone()

        return tree_map(own, self.op(*tree_map(twin, args), **tree_map(twin, kwargs)))


def _can_be_an_array(tensor: Tensor) -> bool:
    """Whether it is bytes of the host's; a TensorRef, as a factory in a kernel makes it, is not."""
    is_bytes = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    return is_bytes and not tensor.is_quantized and not hasattr(tensor, "_ttr_block")


def _twin_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Another storage object over the same memory."""
    with torch._C.DisableTorchFunction():
        whole = torch._C._VariableFunctions.empty((0,), dtype=torch.uint8)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        return storage_of(torch.from_dlpack(whole))  # type: ignore[attr-defined]


def _over(like: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """The same view of another storage object over the same memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        view: Tensor = torch._C._VariableFunctions.empty((0,), dtype=like.dtype)
        view.set_(storage, like.storage_offset(), like.size(), like.stride())
        view = view.conj() if like.is_conj() else view
        return view._neg_view() if like.is_neg() else view
