"""What our patches do around `torch.compile`: what it gives may be called with TensorRefs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_map_only

from ..base.interrupts import lets_program_run
from . import control_flow, hooks
from .built_before import unwatched
from .patches import LatePatch, Patch


def keep_hook_from_compile(eval_frame: Any) -> Callable[[], None]:
    """Have compiled modules called as if nobody looked at module calls."""
    original = eval_frame.OptimizedModule.__call__

    @lets_program_run
    def unwatched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unwatched():
            return original(self, *args, **kwargs)

    eval_frame.OptimizedModule.__call__ = functools.wraps(original)(unwatched_call)

    def undo() -> None:
        eval_frame.OptimizedModule.__call__ = original

    return undo


def call_with_refs(eval_frame: Any) -> Callable[[], None]:
    """Have every function that is compiled look whether it is called with TensorRefs."""
    context = eval_frame._TorchDynamoContext
    original = context.__call__

    def compiled_alike(self: Any, function: Any) -> Any:
        compiled = original(self, function)
        compiles = isinstance(self, eval_frame.OptimizeContext)
        if not compiles or self.export or type(compiled) is not FunctionType:
            return compiled
        control = control_flow.in_python(function)
        if control is not None:
            return control_flow.around(compiled, control)
        return _around(compiled, functools.partial(original, self))

    context.__call__ = functools.wraps(original)(compiled_alike)

    def undo() -> None:
        context.__call__ = original

    return undo


def tell_of_data(output_graph: Any) -> Callable[[], None]:
    """Have what is compiled and takes `.data` say of which tensors, as Python does."""
    graph = output_graph.OutputGraph
    original = graph.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [part for part in module.modules() if isinstance(part, GraphModule)]
        takes_data = any(node.target is _get_data for part in parts for node in part.graph.nodes)
        compiled = original(self, module, *args, **kwargs)
        if not takes_data:
            return compiled

        @lets_program_run
        def call(*inputs: Any) -> Any:
            if _has_been_used():
                ownership = hooks.load(".memory.manager").tensorsManager.ownership
                ownership.note_data(*(one for one in inputs if isinstance(one, torch.Tensor)))
            return compiled(*inputs)

        return call

    graph.call_user_compiler = call_user_compiler

    def undo() -> None:
        graph.call_user_compiler = original

    return undo


@lets_program_run
def own_gradient_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an `autograd.Function` inside what is compiled, where the backend leaves it as it is.

    What it saves is in a closure then, where no hook sees it: it is given copies, and the next call
    is intercepted. One that writes what it is given gets that.
    """
    if not (torch.is_grad_enabled() and _has_been_used()):
        return wrapped(*args, **kwargs)
    entry = hooks.load(".memory.manager").tensorsManager.ownership.native_entry()
    is_plain = hooks.load(".memory.ref").is_plain
    if entry is None or not all(is_plain(one) for one in args if isinstance(one, torch.Tensor)):
        return wrapped(*args, **kwargs)
    entry.mistrust("a gradient of its own keeps what it saves where nobody sees it")
    if kwargs.get("dirty_idx"):
        return wrapped(*args, **kwargs)
    copied = functools.partial(tree_map_only, torch.Tensor, torch.clone)
    return copied(wrapped(*copied(args), **kwargs))


def _has_been_used() -> bool:
    """Whether there has ever been a TensorRef."""
    return f"{hooks.PACKAGE}.memory.ref" in sys.modules


@contextmanager
def unregistered() -> Iterator[None]:
    """Call no hook of ours when modules are put together: the compiler would stumble over it.

    A part of a list of layers is a list made anew. Modules that another thread makes meanwhile keep
    plain parameters, until they are adopted.
    """
    taken = [
        (registry, number, registry.pop(number))
        for registry in _REGISTRIES
        for number, hook in list(registry.items())
        if str(getattr(hook, "__module__", "")).startswith(hooks.PACKAGE)
    ]
    try:
        yield
    finally:
        for registry, number, hook in taken:
            registry[number] = hook


#: What the compiler notes `.data` as.
_get_data = getattr(torch._C._autograd, "_get_data_attr", None)

_REGISTRIES: tuple[dict[int, Any], ...] = (
    module_hooks._global_module_registration_hooks,
    module_hooks._global_parameter_registration_hooks,
    module_hooks._global_buffer_registration_hooks,
)


def _around(compiled: Any, compile_alike: Callable[[Any], Any]) -> Any:
    """Return a function that passes for the compiled one, and is called with TensorRefs, too."""
    kept: list[Any] = []

    @lets_program_run
    def plain(*args: Any, **kwargs: Any) -> Any:
        with unwatched(), unregistered():
            return compiled(*args, **kwargs)

    @functools.wraps(compiled)
    @lets_program_run
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_been_used():
            return plain(*args, **kwargs)
        if not kept:
            made = hooks.load(".compiled.calls").CompiledCall
            kept.append(made(plain, compiled._torchdynamo_orig_callable, compile_alike))
        return kept[0](*args, **kwargs)

    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def let_take_refs(module: Any) -> Callable[[], None]:
    """Have what traces operators of plain tensors take TensorRefs, which in C++ are as plain."""
    core = hooks.load(".memory.core")
    before = module.HANDLED_TYPES
    if core.library is not None:
        module.HANDLED_TYPES = (*before, hooks.load(".memory.ref").TensorRef)

    def undo() -> None:
        module.HANDLED_TYPES = before

    return undo


#: What is replaced of the compiler.
OF_COMPILER = (
    LatePatch(
        "torch._dynamo.eval_frame",
        "OptimizedModule",
        keep_hook_from_compile,
        "torch.compile would warn of the hook by which modules made before us are found",
    ),
    LatePatch(
        "torch._dynamo.eval_frame",
        "_TorchDynamoContext",
        call_with_refs,
        "what is compiled runs on plain tensors: the compiler knows no TensorRef",
    ),
    LatePatch(
        "torch._dynamo.output_graph",
        "OutputGraph",
        tell_of_data,
        "what is compiled writes by `.data` where no version counts and Python does not come by",
    ),
    Patch(
        "torch._functorch.autograd_function",
        "AutogradFunctionApply.__call__",
        own_gradient_wrapper,
        "what is compiled keeps what a gradient needs where no hook sees it",
    ),
)
