"""The patches of torch: what hands tensors to a program, and where modules take parameters."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..base.at_once import items_at_once
from ..memory.names import names
from . import hooks
from .built_before import watch_modules
from .classes import materialize_wrapper, parameter_wrapper, subclass_wrapper
from .compiler import OF_COMPILER, let_take_refs
from .data_parallel import reducer_wrapper
from .devices import (
    accelerator_wrapper,
    generator_wrapper,
    keep_at_home,
    likeness_wrapper,
    on_known_device,
    on_readable_name,
    storage_wrapper,
    then_note,
    to_wrapper,
    type_wrapper,
)
from .factories import (
    left_plain,
    own_memory_factory,
    own_values_factory,
    shared_memory_factory,
)
from .files import load_file_adopted, load_wrapper
from .generators import OF_GENERATORS
from .graphs import OF_GRAPHS
from .inject_to import injectTo
from .kernels import OF_KERNELS
from .optimizers import groups_wrapper, state_wrapper
from .patches import HookPatch, LatePatch, MethodPatch, Patch
from .readers import export_plain, legacy_instance, on_plain
from .registration import on_registration
from .rpc import OF_RPC
from .scripted import OF_JIT
from .shapes import OF_SHAPES
from .signals import HandlersPatch, get_handler, set_handler
from .unpickled import module_state_wrapper

#: Factories whose result owns fresh memory.
OWN_MEMORY = (
    "arange",
    "bartlett_window",
    "blackman_window",
    "complex",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "fft.fftfreq",
    "fft.rfftfreq",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "polar",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)

#: Factories whose result may share memory with what they are given.
SHARED_MEMORY = (
    "as_tensor",
    "asarray",
    "from_dlpack",
    "from_file",
    "from_numpy",
    "frombuffer",
    "utils.dlpack.from_dlpack",
)


#: Methods of every tensor that make another one, and may be told where.
LIKENESSES = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)

#: Factories whose result is sparse, or stays plain.
OTHER_LAYOUTS = (
    "empty_quantized",
    "nested.as_nested_tensor",
    "nested.nested_tensor",
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
)

#: What has `set_stream`, which torch's own contexts go through, too.
WITH_STREAMS = ("accelerator", "cuda", "xpu")
OTHER_STREAM = "operators go to another stream, for which copies have to wait"

#: Why the rows of `devices.py` are there.
UNNAMEABLE = "may name an accelerator that this torch cannot name"


#: Who goes by lists of tensors, grouped by a function that torch gives them.
BY_LISTS = ("torch.nn.utils.clip_grad", "torch.optim.optimizer", "torch.optim.swa_utils")

#: Functions that read the memory of a tensor without an operator.
READERS = (
    ("torch", "to_dlpack"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch", "set_rng_state"),
    ("torch.random", "set_rng_state"),
)


def keep_dynamo_out(trace_rules: Any) -> Callable[[], None]:
    """Have torch.compile run the files of the runtime, and of wrapt, instead of tracing them."""
    found = [importlib.util.find_spec(name) for name in (hooks.PACKAGE, "wrapt")]
    folders = [os.path.dirname(spec.origin or "") for spec in found if spec is not None]
    # It goes by how paths begin.
    skipped = [folder + os.sep for folder in folders]
    trace_rules.SKIP_DIRS.extend(skipped)
    trace_rules._recompile_re()

    def undo() -> None:
        for path in skipped:
            trace_rules.SKIP_DIRS.remove(path)
        trace_rules._recompile_re()

    return undo


_FILE = "reads the tensors of a file"
_HALFWAY = "a handler that raises would leave our doings half done"

PATCHES: tuple[Patch | MethodPatch | HookPatch | LatePatch | HandlersPatch, ...] = (
    *(Patch("torch", name, own_memory_factory, "makes a tensor") for name in OWN_MEMORY),
    *(Patch("torch", name, shared_memory_factory, "makes a tensor") for name in SHARED_MEMORY),
    Patch("torch", "tensor", own_values_factory, "makes a tensor"),
    Patch("torch", "load", load_wrapper, _FILE),
    LatePatch("safetensors.torch", "load_file", load_file_adopted, _FILE),
    *(Patch(module, name, on_plain, "reads memory in C++") for module, name in READERS),
    *OF_GENERATORS,
    *OF_JIT,
    *OF_SHAPES,
    *OF_KERNELS,
    *OF_COMPILER,
    *OF_RPC,
    *(Patch(f"torch.{kind}", "set_stream", then_note, OTHER_STREAM) for kind in WITH_STREAMS),
    MethodPatch("torch", "_C.Stream.__enter__", then_note, OTHER_STREAM),
    MethodPatch("torch", "_C.Stream.__exit__", then_note, OTHER_STREAM),
    *OF_GRAPHS,
    MethodPatch(
        "torch",
        "FloatTensor.__class__.__instancecheck__",
        legacy_instance,
        "compares keys of dispatch, of which a TensorRef has more than a tensor",
    ),
    *(Patch("torch", name, on_known_device, UNNAMEABLE) for name in OTHER_LAYOUTS),
    *(
        MethodPatch("torch", f"_C.TensorBase.{name}", likeness_wrapper, UNNAMEABLE)
        for name in LIKENESSES
    ),
    MethodPatch("torch", "_C.TensorBase.to", to_wrapper, UNNAMEABLE),
    MethodPatch("torch", "_C.TensorBase.cuda", accelerator_wrapper, UNNAMEABLE),
    MethodPatch("torch", "_C.TensorBase.xpu", accelerator_wrapper, UNNAMEABLE),
    MethodPatch("torch", "_C.TensorBase.type", type_wrapper, UNNAMEABLE),
    Patch("torch", "Generator", generator_wrapper, UNNAMEABLE),
    Patch("torch._C._nn", "_parse_to", on_readable_name, UNNAMEABLE),
    Patch("torch", "set_default_device", on_readable_name, UNNAMEABLE),
    Patch("torch.storage", "_StorageBase.to", storage_wrapper, UNNAMEABLE),
    LatePatch("torch.serialization", "_package_registry", keep_at_home, UNNAMEABLE),
    Patch(
        "torch.utils.data._utils.worker",
        "_worker_loop",
        left_plain,
        "a spawned worker of a DataLoader needs no accelerator, as a forked one has none",
    ),
    HookPatch(
        "torch.nn.modules.module",
        "register_module_parameter_registration_hook",
        on_registration,
        "a parameter of a module, however it was made, is a TensorRef from then on",
    ),
    HookPatch(
        "torch.nn.modules.module",
        "register_module_buffer_registration_hook",
        on_registration,
        "so is a buffer",
    ),
    HookPatch(
        "torch.nn.modules.module",
        "register_module_module_registration_hook",
        names.note_modules,
        "reports call a tensor what the program does: by the modules it is in",
    ),
    MethodPatch(
        "torch",
        "_C.TensorBase._make_subclass",
        subclass_wrapper,
        "a tensor of another class over the same memory: a TensorRef has none",
    ),
    MethodPatch(
        "torch.nn.parameter",
        "Parameter.__new__",
        parameter_wrapper,
        "a library's own class of parameters would be lost on a TensorRef",
    ),
    Patch(
        "torch.distributed",
        "Reducer",
        reducer_wrapper,
        "asks gradients in C++ for their memory, of which a TensorRef has none",
    ),
    *(
        Patch(
            module,
            "_group_tensors_by_device_and_dtype",
            groups_wrapper,
            "lists that do not fit would pass the link once for each operator",
        )
        for module in BY_LISTS
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer._patch_step_function",
        state_wrapper,
        "reports call an optimizer's state by the parameter that it is for, and not a weight",
    ),
    Patch(
        "torch.nn.parameter",
        "UninitializedTensorMixin.materialize",
        materialize_wrapper,
        "what torch fills in late is not registered again",
    ),
    Patch(
        "torch.nn.modules.module",
        "Module.__setstate__",
        module_state_wrapper,
        "what a pickle gives a module is not registered",
    ),
    LatePatch(
        "torch.nn.modules.module",
        "register_module_forward_pre_hook",
        watch_modules,
        "a model that was built before has plain parameters, which each operator would fetch anew",
    ),
    LatePatch(
        "torch.onnx._internal.torchscript_exporter.utils",
        "_get_named_param_dict",
        export_plain,
        "reads memory in C++",
    ),
    LatePatch(
        "torch._dynamo.trace_rules",
        "SKIP_DIRS",
        keep_dynamo_out,
        "torch.compile would trace the runtime itself, and fail or compile to its limit",
    ),
    *(
        LatePatch(
            module,
            "HANDLED_TYPES",
            let_take_refs,
            "in C++ nobody but these would answer to an operator on TensorRefs",
        )
        for module in (
            "torch.fx.experimental.proxy_tensor",
            "torch._functorch._aot_autograd.runtime_wrappers",
        )
    ),
    Patch("signal", "signal", set_handler, _HALFWAY),
    Patch("signal", "getsignal", get_handler, "the program sees the handlers that it has set"),
    HandlersPatch("signal", "Handlers", _HALFWAY),
)

#: What we have changed in modules: (module, name) to what stood there.
_rebound: dict[tuple[str, str], Any] = {}


def apply() -> None:
    """Install every patch; one that does not match this torch is skipped and noted."""
    for patch in PATCHES:
        patch.install()
    _tell_jit()
    for prefix in injectTo:
        rebind(prefix)


def undo() -> None:
    """Remove every patch and give modules the names back that they had taken."""
    for (module_name, name), before in _rebound.items():
        module = sys.modules.get(module_name)
        if module is not None and name in vars(module):
            setattr(module, name, before)
    _rebound.clear()
    for patch in PATCHES:
        patch.uninstall()
    _tell_jit()


def rebind(prefix: str) -> None:
    """Give the loaded modules under a prefix the names that the rules say they should have."""
    patched = {id(p.original): p for p in PATCHES if isinstance(p, Patch) and p.installed}
    patched |= {id(p.patched): p for p in tuple(patched.values())}
    for module_name, module in _modules_under(prefix):
        rule = injectTo.rule(module_name)
        for name, value in items_at_once(vars(module)):
            patch = patched.get(id(value))
            if patch is None or (patch.original is not value and patch.patched is not value):
                continue
            before = _rebound.pop((module_name, name), value)
            wanted = before if rule is None else patch.patched if rule else patch.original
            if wanted is not value:
                setattr(module, name, wanted)
            if wanted is not before:
                _rebound[module_name, name] = before


def _modules_under(prefix: str) -> list[tuple[str, ModuleType]]:
    return [
        (name, module)
        for name, module in items_at_once(sys.modules)
        if (name == prefix or name.startswith(f"{prefix}."))
        and isinstance(module, ModuleType)
        # There the table is the only one to change anything.
        and name.partition(".")[0] != "torch"
    ]


def taken_names() -> list[str]:
    """The names that modules took from torch before us and still hold, in full."""
    originals = {id(p.original): p for p in PATCHES if isinstance(p, Patch) and p.installed}
    return sorted(
        f"{module_name}.{name}"
        for module_name, module in items_at_once(sys.modules)
        if isinstance(module, ModuleType) and injectTo.decisions[module_name]
        for name, value in items_at_once(vars(module))
        if id(value) in originals and originals[id(value)].original is value
    )


def _tell_jit() -> None:
    """Keep torch.jit's table of functions, which goes by `id`, where it has been made."""
    table = getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None)
    if table is None:
        return
    for patch in PATCHES:
        if isinstance(patch, Patch) and patch.original is not None:
            operator = table.get(id(patch.original)) or table.get(id(patch.patched))
            if operator is not None:
                table[id(patch.original)] = operator
                if patch.patched is not None:
                    table[id(patch.patched)] = operator
