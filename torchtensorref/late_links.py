"""Views that are linked to their base only when somebody can tell: late.

Torch links a view to its base: both count their versions together, and the view knows its base.
That takes longer than the view itself, and where no gradient is noted hardly any program looks at
it. A view that a TensorRef's own method makes there (`view_methods.py`) is therefore a tensor on
its own, which remembers what it is to be linked to, and carries one more dispatch key. Each
operator that meets it comes by here first, above autograd. Where no gradient is noted and the
results are fresh, or are what it has written, it runs at once, and a write is counted for the base.
Before anything else the view is linked: torch's own view takes its place in the same Python object,
as it would have been at its birth. So it is before one of its attributes is read that tells of the
link.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

import torch
from torch._ops import OpOverload

from .fast_path import SLOW, attach_plan
from .manager import tensorsManager
from .onlookers import somebody_looks
from .views import KEYS, alias_of

#: A dispatch key above all others that torch keeps for wrappers in its own tests, so that no
#: operator has a kernel there. Only views that are not linked yet carry it.
LATE_KEY_NAME = "TESTING_ONLY_GenericWrapper"
LATE_KEY = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(LATE_KEY_NAME))
LATE_KEYS = KEYS | LATE_KEY

_Base: Any = torch._C.TensorBase
_version_of = _Base._version.__get__
_needs = _Base.requires_grad.__get__
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter
_is_grad_enabled = torch.is_grad_enabled
_make_wrapper = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_lock = RLock()


def _renew_lock() -> None:
    global _lock
    _lock = RLock()  # a thread that held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

#: Nobody but torch's own count of versions is asked: no mode, no transform, not we.
_TorchAlone: Any = torch._C._ForceDispatchKeyGuard
_NOTED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.BackendSelect
)
_DISPATCHED = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
    | LATE_KEY
)


def late_view(
    ref_type: Any, of: Any, out: torch.Tensor, block: Any, device: Any, is_inference: bool
) -> Any:
    """Make the TensorRef of a view, not linked; `out` is it on plain tensors, of the same dtype.

    Torch itself does not link the views of inference tensors.
    """
    ref = _make_wrapper(
        ref_type, out.size(), out.stride(), out.storage_offset() or None, None, out.dtype,
        _strided, None, False, False, None, False, False, KEYS if is_inference else LATE_KEYS,
    )  # fmt: skip
    ref._b = block
    ref._t = out
    ref._d = device
    if not is_inference:
        root = of._root
        if root is None:
            root = of
        ref._root = root
        ref._root_version = _version_of(root)
    return ref


def link(ref: Any) -> None:
    """Have torch link a view, as it would have been at its birth; nothing where it is linked.

    The view takes the place of the tensor inside the Python object, as `torch.utils.swap_tensors`
    does it. Who holds the tensor itself, in C++, keeps one that is linked on its own when needed.
    """
    with _lock:
        root = ref._root
        if root is None:
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            _TorchAlone(_NOTED, _DISPATCHED),
        ):
            now, then = _version_of(root), ref._root_version
            # A view notes the version it is made at, by which torch knows, of a base with a
            # gradient, whether it was written since. Not otherwise: others may be counting.
            is_behind = now != then and _needs(root)
            if is_behind:
                _set_versions((root,), (then,))
            try:
                linked = _linked_view(ref, root)
            finally:
                if is_behind:
                    _set_versions((root,), (now,))
        attributes = dict(ref.__dict__)
        torch._C._swap_tensor_impl(ref, linked)
        linked.__dict__.update(attributes)
        ref._root = None


def _linked_view(ref: Any, root: Any) -> Any:
    if root._b is ref._b and root.dtype is ref.dtype:
        try:
            view = _Base.as_strided(root, ref.size(), ref.stride(), ref.storage_offset())
            return _Base.as_subclass(view, type(ref))
        except RuntimeError as error:
            if "out of bounds" not in str(error):
                raise
    # What it is a view of has become less or something else since (`resize_`, `data`, `set_`).
    linked = _Base.as_subclass(root, type(ref))
    _Base.data.__set__(linked, alias_of(ref))
    return linked


def link_all(ref_type: Any, values: Any) -> None:
    """Link whatever is a late view among arguments, also in lists."""
    for value in values:
        kind = type(value)
        if kind is ref_type:
            if value._root is not None:
                link(value)
        elif kind is list or kind is tuple:
            link_all(ref_type, value)


def count_write(written: torch.Tensor) -> None:
    """Count, in the version of a tensor, that it was written behind torch's back.

    A view that is not linked yet has its version from its base.
    """
    root = getattr(written, "_root", None)
    torch.autograd.graph.increment_version(written if root is None else root)


def _kernel_of(full: str) -> Callable[..., Any]:
    """Make what an operator does first, given a late view."""
    plan: Any = None
    #: While it runs, the key leads nowhere; but what others have written in Python may make views.
    guarded = full.startswith("aten::")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if plan is None:
            plan = attach_plan(_overload(full))
        ref_type = tensorsManager.ref_type
        if not (
            somebody_looks()
            or (plan.writes and any(place in plan.list_positions for place in plan.writes))
            or (_is_grad_enabled() and (_wants(args) or _wants(kwargs.values())))
        ):
            # Nobody learns of the view if results are fresh, or are what it has written.
            result = SLOW
            if plan.way is not None and (plan.passing is not None or not plan.may_alias):
                result = plan.way(ref_type, plan, args, kwargs)
                if result is SLOW and plan.passing is None and guarded:
                    result = ref_type.__torch_dispatch__(plan.op, (), args, kwargs)
            if result is not SLOW:
                for name in plan.write_names:
                    written = plan.argument(name, args, kwargs)
                    if type(written) is ref_type:
                        count_write(written)
                return result
        link_all(ref_type, args)
        link_all(ref_type, kwargs.values())
        if not guarded:
            return plan.op(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(LATE_KEY):
            return plan.op(*args, **kwargs)

    return kernel


def _wants(values: Any) -> bool:
    """Whether one of some arguments, or what it is a view of, needs a gradient."""
    for value in values:
        if isinstance(value, torch.Tensor):
            root = getattr(value, "_root", None)
            if _needs(value if root is None else root):
                return True
        elif type(value) in (list, tuple) and _wants(value):
            return True
    return False


def _overload(full: str) -> Any:
    library, _, name = full.partition("::")
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), overload or "default")


def welcome(op: OpOverload, args: tuple[Any, ...]) -> None:
    """Have an operator that torch did not know at the start link late views first, henceforth.

    In this call it was given them as they are: what it writes is counted here.
    """
    if op.name() in _watched:
        return
    _watch(op.name())
    for position in attach_plan(op).writes:
        if position < len(args) and getattr(args[position], "_root", None) is not None:
            count_write(args[position])
    link_all(tensorsManager.ref_type, args)


_libraries: dict[str, Any] = {}
_watched: set[str] = set()


def _watch(full: str, look: Callable[..., Any] | None = None) -> None:
    """Register what an operator does first, given a late view."""
    library, _, name = full.partition("::")
    if library not in _libraries:
        _libraries[library] = torch.library.Library(library, "IMPL", LATE_KEY_NAME)
    # Not `Library.impl`, which looks at each with care: there are three thousand.
    kernel = _kernel_of(full)
    _libraries[library].m.impl(name, LATE_KEY_NAME, kernel if look is None else look(kernel))
    _watched.add(full)


def install(looks: Mapping[str, Callable[..., Any]]) -> None:
    """Register with torch what every operator does first, given a late view.

    `looks` has, by operator, what makes of that a way that makes another late view.
    """
    if _libraries:
        return
    everything = _libraries["_"] = torch.library.Library("_", "IMPL", LATE_KEY_NAME)
    everything.fallback(torch.library.fallthrough_kernel)
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            _watch(full, looks.get(full))


def show_links(ref_type: Any) -> None:
    """Have the attributes of a TensorRef that tell of a link find it linked."""
    for name in ("_version", "_base", "grad_fn", "is_leaf"):
        setattr(ref_type, name, property(_linked_first(getattr(_Base, name).__get__)))
    for name in ("_is_view", "requires_grad_"):
        method = getattr(_Base, name)
        setattr(ref_type, name, functools.wraps(method)(_linked_first(method)))
    needs, grad = _Base.requires_grad, _Base.grad
    ref_type.requires_grad = property(_linked_first(needs.__get__), _linked_first(needs.__set__))

    def set_grad(self: Any, value: Any) -> None:
        link_all(ref_type, (self, value))
        grad.__set__(self, value)

    ref_type.grad = property(_linked_first(grad.__get__), set_grad, grad.__delete__)


def _linked_first(ask: Callable[..., Any]) -> Callable[..., Any]:
    def of_linked(self: Any, *args: Any) -> Any:
        if self._root is not None:
            link(self)
        return ask(self, *args)

    return of_linked
