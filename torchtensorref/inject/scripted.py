"""What our patches do around `torch.jit`, whose C++ reads tensors that it holds by their memory.

A TensorRef has no memory there, so it finds plain tensors over the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .hooks import is_ref, load
from .patches import MethodPatch, Patch


def traced_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write down what a program does; what it closes over is plain in it, and shares the memory.

    Such graphs are printed, to be compared, before they are given to the program.
    """
    traced = wrapped(*args, **kwargs)
    if instance is None:  # a function that has a graph, or a graph and its results
        graphs = iter([traced[0] if isinstance(traced, tuple) else traced.graph])
    else:
        graphs = _graphs_of(instance)
    for node, value in _refs_in(graphs):
        node.t_("value", value.exposed_plain("torch.jit.trace"))
    return traced


def read_plain(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write or copy a traced or scripted module as it would be with plain tensors."""
    with _plain_in(instance):
        return wrapped(*args, **kwargs)


@contextmanager
def _plain_in(module: Any) -> Iterator[None]:
    """Have plain tensors in the place of a module's TensorRefs, for as long as nothing is run."""
    ownership = load(".memory.manager").tensorsManager.ownership
    tree = sys.modules["torch"].utils._pytree
    made: dict[int, Any] = {}  # tied ones stay tied
    undo: list[Callable[[], Any]] = []

    def plain(value: Any) -> Any:
        if not is_ref(value):
            return value
        if id(value) not in made:
            made[id(value)] = ownership.peek(value).detach().requires_grad_(value.requires_grad)
        return made[id(value)]

    try:
        for part in module.modules():
            for name in _names_in(part):
                value = part._c.getattr(name)
                if any(map(is_ref, tree.tree_leaves(value))):
                    undo.append(partial(part._c.setattr, name, value))
                    part._c.setattr(name, tree.tree_map(plain, value))
        for node, value in _refs_in(_graphs_of(module._c)):
            undo.append(partial(node.t_, "value", value))
            node.t_("value", plain(value))
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _names_in(module: Any) -> list[str]:
    """Return the names of a module's own parameters, buffers and, where known, other attributes."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    kind = vars(module).get("_concrete_type")  # what was loaded or frozen has none
    return list(dict.fromkeys([*dict(own), *(kind.get_attributes() if kind else ())]))


def _graphs_of(module: Any) -> Iterator[Any]:
    """Yield the graphs of a module of C++, and of those in it."""
    for name in module._method_names():
        yield module._get_method(name).graph
    for _, child in sys.modules["torch"]._C.ModuleDict(module).items():
        yield from _graphs_of(child)


def _refs_in(graphs: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the constants in graphs that are TensorRefs, with the nodes that hold them."""
    for graph in graphs:
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                value = node.t("value")
                if is_ref(value):
                    yield node, value


#: Of the table in `torch_.py`, the rows that are about torch.jit.
OF_JIT: tuple[Patch | MethodPatch, ...] = (
    *(
        Patch("torch.jit._script", name, read_plain, "reads memory in C++")
        for name in (
            "ScriptModule.save",
            "ScriptModule.save_to_buffer",
            "RecursiveScriptModule.save",
            "RecursiveScriptModule.save_to_buffer",
            "RecursiveScriptModule.__deepcopy__",
        )
    ),
    *(
        Patch("torch._C", f"_create_{name}", traced_plain, "reads memory in C++")
        for name in (
            "function_from_trace",
            "function_from_trace_with_dict",
            "graph_by_tracing",
        )
    ),
    *(
        MethodPatch("torch", f"_C.ScriptModule.{name}", traced_plain, "reads memory in C++")
        for name in ("_create_method_from_trace", "_create_method_from_trace_with_dict")
    ),
)
