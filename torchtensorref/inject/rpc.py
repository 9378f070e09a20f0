"""What our patches do around `torch.distributed.rpc`, whose C++ reads the memory of what it sends.

A TensorRef has none there, so what is sent is plain, over the same bytes: what workers call with,
what they answer, and the gradients of both. An RRef keeps the TensorRef that it was made over.
"""

from __future__ import annotations

import pkgutil
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map

from ..base.errors import UnsupportedOpError
from ..memory.ref import TensorRef
from .hooks import is_ref, load
from .patches import MethodPatch, Patch

_WHY = "another worker is sent it"
#: How torch calls the type of an RRef's value that is taken apart in Python, to be fetched.
_OF_PYTHON = "PyObject"
#: The types by which RRefs are known here that other workers know by that one.
_types_here: set[str] = set()


class Sent(Function):
    """The plain tensor that is sent for a TensorRef; the gradient comes back to that."""

    @staticmethod
    def forward(ctx: Any, ref: Any) -> Any:
        """Return what is sent."""
        return ref.exposed_plain(_WHY)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Hand the gradient on, which came from there."""
        return load(".memory.manager").tensorsManager.adopt(gradient)


def plain_to_send(value: Any) -> Any:
    """Return what is sent for a value: for a TensorRef a plain tensor, others as they are."""
    if not _is_managed(value):
        return value
    if value.requires_grad and torch.is_grad_enabled() and is_ref(value):
        return Sent.apply(value)
    return value.exposed_plain(_WHY).requires_grad_(value.requires_grad)


def _is_managed(value: Any) -> bool:
    return is_ref(value) or isinstance(value, load(".memory.sparse").SparseRef)


# -- functions of torch and of TorchScript: C++ takes their operands ------------------------------


def operands_plain(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have another worker call a function, on what TensorRefs stand for now."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch._C._distributed_rpc.PyRRef) and _is_over_refs(leaf):
            raise UnsupportedOpError(
                "A function of TorchScript on another worker cannot fetch what this RRef is over, "
                "a TensorRef. Make the RRef over a plain tensor, "
                "`RRef(tensorsManager.release(x))`, or have the worker call a function of Python."
            )
    answer = wrapped(*tree_map(plain_to_send, args), **tree_map(plain_to_send, kwargs))
    if isinstance(answer, torch._C.Future):
        answer._set_unwrap_func(_ask_for_plain_gradients)
    return answer


# -- functions of Python: their operands and results are taken apart in Python --------------------


def taken_apart(wrapped: Any, pickler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take an object apart, into a string and its tensors; these are plain."""
    # Torch knows its tensors by their class, which on the path in Python is ours.
    pickler._dispatch_table.setdefault(TensorRef, lambda ref: _reduce(pickler, ref))
    pickler._dispatch_table.setdefault(type(TensorRef), _reduce_class)
    text, tensors = wrapped(*args, **kwargs)
    return text, [plain_to_send(tensor) for tensor in tensors]


def _reduce(pickler: Any, ref: Any) -> Any:
    if isinstance(ref, torch.nn.Parameter):
        return ref.__reduce_ex__(2)
    return pickler._tensor_reducer(plain_to_send(ref))


def _reduce_class(kind: Any) -> Any:
    return pkgutil.resolve_name, ("torch:Tensor",)


class Call(NamedTuple):
    """A call of another worker's, as torch has it, and its tensors."""

    func: Any
    args: Any
    kwargs: Any
    tensors: Any


def put_together(wrapped: Any, pickler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put together what another worker has sent."""
    value, tensors = wrapped(*args, **kwargs), args[1]
    if isinstance(value, torch.distributed.rpc.internal.PythonUDF):
        return Call(*value, tensors)  # its gradients are known when it is run
    _ask_for_plain_gradients(tensors)
    return value


def call_run(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what another worker calls."""
    if isinstance(args[0], Call):
        _ask_for_plain_gradients(args[0].tensors)
    return wrapped(*args, **kwargs)


# -- RRefs ----------------------------------------------------------------------------------------


def rref_told(wrapped: Any, pickler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell another worker of an RRef: one over TensorRefs as of one over an object of Python.

    It would be fetched in C++ otherwise.
    """
    receiver, (fork,) = wrapped(*args, **kwargs)
    if fork[-1] != _OF_PYTHON and _is_over_refs(args[0]):
        _types_here.add(fork[-1])
        fork = (*fork[:-1], _OF_PYTHON)
    return receiver, (fork,)


def rref_heard(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hear of an RRef from another worker; one that is here has the type that it has here."""
    (fork,) = args
    types = [fork[-1], *(tuple(_types_here) if fork[-1] == _OF_PYTHON else ())]
    for kind in types[:-1]:
        try:
            return wrapped((*fork[:-1], kind))
        except RuntimeError:  # it has another type; nothing has changed
            continue
    return wrapped((*fork[:-1], types[-1]))


def fetched(wrapped: Any, rref: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the value of an RRef, or look at the one that is here.

    What C++ has computed here, of received tensors, is plain all the way to these.
    """
    value = wrapped(*args, **kwargs)
    _ask_for_plain_gradients(value)
    return value


def _is_over_refs(rref: Any) -> bool:
    """Whether an RRef of this worker is over TensorRefs."""
    return rref.is_owner() and any(map(_is_managed, tree_leaves(rref.local_value())))


# -- gradients of what was received ---------------------------------------------------------------


def _ask_for_plain_gradients(values: Any) -> None:
    """Have the gradients of received tensors, which are sent back, come as plain ones."""
    received = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and not is_ref(v))
    waiting = [value.grad_fn for value in received]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name().endswith("::RecvRpcBackward"):
            node.register_prehook(_plain_gradients)
        following = {after for after, _ in node.next_functions} - seen
        seen |= following
        waiting.extend(following)


def _plain_gradients(gradients: Any) -> Any:
    with torch.no_grad():
        return tuple(map(plain_to_send, gradients))


_READ = "reads memory in C++"

#: Of the table in `torch_.py`, the rows that are about torch.distributed.rpc.
OF_RPC: tuple[Patch | MethodPatch, ...] = (
    *(
        Patch("torch.distributed.rpc.api", f"_invoke_{name}", operands_plain, _READ)
        for name in ("rpc_builtin", "remote_builtin", "rpc_torchscript", "remote_torchscript")
    ),
    *(
        Patch("torch.distributed.rpc.internal", name, wrapper, _READ)
        for name, wrapper in (
            ("_InternalRPCPickler.serialize", taken_apart),
            ("_InternalRPCPickler.deserialize", put_together),
            ("_InternalRPCPickler._py_rref_reducer", rref_told),
            ("_run_function", call_run),
        )
    ),
    *(
        MethodPatch("torch", f"_C._distributed_rpc.PyRRef.{name}", wrapper, _READ)
        for name, wrapper in (
            ("_deserialize", rref_heard),
            ("local_value", fetched),
            ("to_here", fetched),
        )
    ),
)
