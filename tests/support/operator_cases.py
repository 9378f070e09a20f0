"""Every way to call one operator of torch's database, on plain tensors and on ours, compared."""

from __future__ import annotations

import functools
import itertools
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torchTensorRef import tensorsManager
from torchTensorRef.tensor.tensor_ref import TensorRef

from .aliasing import alias_differences
from .differential import copied, differences, managed

# For every sample, torch looks through the stack for a `unittest.TestCase` that it could note the
# sample in. There is none here, and looking reads the source of each frame.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
)

#: Nobody has written the values of what these make: only the metadata can be compared.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

#: Calls with which plain torch's own kernels read memory that is not theirs, or fail an assertion
#: of torch's own about `requires_grad`, which does not hold below autograd. And those whose results
#: are no inference tensors in inference mode, or that count versions there of sparse operands.
BROKEN_IN_TORCH = frozenset(
    {
        ("_chunk_cat", "zero-dim"),
        ("as_strided_scatter", "expanded"),
        ("native_group_norm", "expanded"),
        ("masked.median", "expanded"),
        ("nn.functional.multilabel_margin_loss", "zero-size"),
        ("unsafe_chunk", "inference"),
        ("unsafe_split", "inference"),
        ("sparse.mm.reduce", "inference"),
        ("sparse.sampled_addmm", "inference"),
    }
)

#: Operators with a kernel whose last bits are anybody's: LAPACK's `gelsy` is given pivots that
#: nobody has written, and orders its columns by them. Plain torch differs from itself there.
UNSTEADY_IN_TORCH = frozenset({"linalg.lstsq", "linalg.lstsq.grad_oriented"})
#: How close those must be, relatively and absolutely.
CLOSE = {torch.float32: 1e-3, torch.complex64: 1e-3, torch.float64: 1e-9}

#: Samples of each operator and dtype that are also tried with ready operands.
READY_SAMPLES = 10

Call = Callable[..., Any]


@dataclass
class Case:
    """One call: what is called, with which arguments, and what has to be compared."""

    variant: str
    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Whether plain torch promises gradients here.
    has_backward: bool = False
    #: Whether the values are anybody's: not those of memory that nobody has written.
    sees_values: bool = True
    #: The part of the result whose gradient is defined (eigenvectors have any sign).
    differentiable: Callable[[Any], Any] = lambda result: result
    #: Whether the values are the same in every bit each time plain torch computes them.
    is_steady: bool = True
    #: Whether the operands are on the accelerator already, so that nothing has to be decided.
    is_ready: bool = False


@dataclass
class Outcome:
    """Counts over many cases, and a text for each that failed."""

    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, variant: str, dtype: torch.dtype, found: list[str] | None) -> None:
        """Count a case: what was found different, or None where plain torch refuses the call."""
        if found is None and variant != "error":
            self.refused[variant] += 1
        elif not found:
            self.passed[variant] += 1
        else:
            self.failures.append((variant, str(dtype)[6:], "; ".join(found)[:400]))

    def add(self, other: Outcome) -> None:
        """Add the counts of others."""
        self.passed += other.passed
        self.refused += other.refused
        self.failures += other.failures


def name_of(op: Any) -> str:
    """The operator's name in the database, with the name of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@functools.cache
def operators() -> dict[str, Any]:
    """Every operator of torch's database that the CPU has, by name."""
    return {name_of(op): op for op in op_db}


# -- cases --------------------------------------------------------------------------------------


def cases_of(op: Any, dtype: torch.dtype, *, samples: int | None = None) -> Iterator[Case]:
    """Every case of one operator and dtype; of at most so many sample inputs."""
    if not op.supports_dtype(dtype, "cpu"):
        return
    seed(name_of(op), str(dtype))
    has_backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    drawn = op.sample_inputs("cpu", dtype, requires_grad=has_backward)
    for number, sample in enumerate(itertools.islice(drawn, samples)):
        # Without a driver the kernel on the cpu takes `gelsy`.
        driver = sample.kwargs.get("driver") or "gelsy"
        is_steady = name_of(op) not in UNSTEADY_IN_TORCH or driver != "gelsy"
        for case in _cases_of_sample(op, sample, number, has_backward):
            case.is_steady = is_steady
            yield case


def _cases_of_sample(op: Any, sample: Any, number: int, has_backward: bool) -> Iterator[Case]:
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    facts = (has_backward, name_of(op) not in UNINITIALISED, sample.output_process_fn_grad)
    yield Case("call", op.get_op(), args, kwargs, *facts)
    if number < READY_SAMPLES:
        yield Case("ready", op.get_op(), args, kwargs, *facts, is_ready=True)
        if has_backward:
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            call = Case("without gradients", op.get_op(), *detached, sees_values=facts[1])
            yield replace(call, is_ready=number % 2 == 0)
        if (name_of(op), "inference") not in BROKEN_IN_TORCH:
            call = _in_inference_mode(op.get_op())
            case = Case("inference", call, args, kwargs, sees_values=facts[1])
            yield replace(case, is_ready=number % 2 == 0)
    yield from _written_variants(op, sample, number, *facts)
    if number < 2 and op.get_method() is not None:
        yield Case("method", op.get_method(), args, kwargs, *facts)
    for variant, change in LAYOUTS:
        if (name_of(op), variant) in BROKEN_IN_TORCH:
            continue
        if variant == "noncontiguous" or number < 3:
            changed = tree_map_only(torch.Tensor, change, (args, kwargs))
            # Some of torch's own kernels divide by a size in the gradient, and end the process.
            back = has_backward and variant != "zero-size"
            yield Case(variant, op.get_op(), *changed, back, *facts[1:])


def _written_variants(
    op: Any, sample: Any, number: int, has_backward: bool, sees: bool, differentiable: Call
) -> Iterator[Case]:
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    inplace = op.get_inplace()
    if inplace is not None and not sample.broadcasts_input:
        call = _on_a_copy(inplace)
        first = lambda results: differentiable(results[0])  # noqa: E731
        facts = (has_backward, sees, first)
        yield Case("in-place", call, args, kwargs, *facts)
        if number < READY_SAMPLES:
            yield Case("in-place ready", call, args, kwargs, *facts, is_ready=True)
    if op.supports_out:
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        for kind, like in OUTS:
            call = _into_out(op.get_op(), like)
            yield Case(f"out {kind}", call, *detached, sees_values=sees)


def _in_inference_mode(function: Call) -> Call:
    """Call where composite operators come whole; we take those apart that autograd would."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return call


def _on_a_copy(inplace: Call) -> Call:
    """Call an in-place variant so that leaves which want gradients may be written."""

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        own = first.clone() if isinstance(first, torch.Tensor) and first.requires_grad else first
        return inplace(own, *args, **kwargs), own

    return call


def _into_out(function: Call, like: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Call with `out=` of the shape, dtype and layout that the result has, changed by `like`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        expected = function(*args, **kwargs)
        out = tree_map_only(torch.Tensor, like, expected)
        if isinstance(out, (tuple, list)) and not isinstance(out, (torch.Size,)):
            out = type(expected)(out) if type(expected) in (tuple, list) else tuple(out)
        return function(*args, **kwargs, out=out), out

    return call


def _noncontiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.dim() == 0 or tensor.is_quantized:
        return tensor
    return torch.testing._internal.common_utils.noncontiguous_like(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """The first row again and again: stride zero."""
    if tensor.layout is not torch.strided or tensor.dim() == 0 or tensor.size(0) < 2:
        return tensor
    return tensor[:1].detach().expand(tensor.size()).requires_grad_(tensor.requires_grad)


def _zero_size(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.dim() == 0:
        return tensor
    return tensor[:0].detach().clone().requires_grad_(tensor.requires_grad)


def _zero_dim(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    return tensor.flatten()[0].detach().clone().requires_grad_(tensor.requires_grad)


#: Other layouts of the same arguments. Plain torch says which calls make sense with them.
LAYOUTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("noncontiguous", _noncontiguous),
    ("expanded", _expanded),
    ("zero-size", _zero_size),
    ("zero-dim", _zero_dim),
)

#: What is handed to `out=`: right, to be resized, strided otherwise, of a dtype it may refuse.
OUTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("right", lambda t: torch.zeros_like(t.resolve_conj()).detach()),
    ("empty", lambda t: t.new_empty(0)),
    (
        "strided",
        lambda t: t.new_zeros((*t.size(), 2)).select(-1, 0) if t.dim() else torch.zeros_like(t),
    ),
    ("other dtype", lambda t: torch.zeros_like(t, dtype=torch.int8).detach()),
)


def error_cases(op: Any) -> Iterator[Case]:
    """The calls that the database says must fail."""
    if op.error_inputs_func is None:
        return
    seed(name_of(op), "errors")
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        yield Case("error", op.get_op(), (sample.input, *sample.args), sample.kwargs)


# -- running one case ---------------------------------------------------------------------------


def seed(*names: str) -> None:
    """Seed torch by names, the same in every process.

    `torch.manual_seed` tells all devices, with a stack trace for each: a quarter of the time.
    """
    torch.default_generator.manual_seed(zlib.crc32("/".join(names).encode()))


def compare(case: Case) -> list[str] | None:
    """Run a case on plain tensors and on ours.

    Returns
    -------
    list of str or None
        Every difference in words; None where plain torch refuses the call and so do we, with an
        exception of the same type.
    """
    plain, refusal = _attempt(case, _plain)
    ours, failure = _attempt(case, _ready if case.is_ready else _ours)
    if refusal is not None or failure is not None:
        # What C++ calls a length error becomes another type on its way through Python.
        if (
            type(refusal) is type(failure)
            or _brief(refusal).partition("(")[2] == _brief(failure).partition("(")[2]
        ):
            return None
        return [f"{_brief(refusal)} became {_brief(failure)}{_way_to(failure)}"]
    with torch.inference_mode(case.variant == "inference"):
        return _differences_of_runs(plain, ours, case)


def _plain(x: Any) -> Any:
    """A copy with a version counter that begins at zero, as that of a TensorRef does."""
    if not isinstance(x, torch.Tensor) or x.device.type == "meta":
        return x
    return copied(x).data.requires_grad_(x.requires_grad)


def _ours(x: Any) -> Any:
    """The same as a TensorRef, where it can be one."""
    return managed(x) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x


def _ready(x: Any) -> Any:
    """The same as an operator has just made it, on the accelerator and nowhere else."""
    ours = _ours(x)
    if not isinstance(ours, TensorRef) or ours.is_conj() or ours.is_neg():
        return ours
    made = ours.detach().clone()
    if made.stride() != x.stride() or made.storage_offset() != x.storage_offset():
        return ours  # a copy has no gaps, and nothing twice
    return made.requires_grad_(x.requires_grad)


def _attempt(case: Case, bring: Callable[[Any], Any]) -> tuple[Any, Exception | None]:
    """Arguments, result and gradients of a call whose tensors `bring` makes; or why it failed."""
    args, kwargs = tree_map(bring, (case.args, case.kwargs))
    torch.default_generator.manual_seed(0)
    try:
        result = case.call(*args, **kwargs)
        outputs = case.differentiable(result) if case.has_backward else None
        grads = _gradients((args, kwargs), outputs, bring)
    except Exception as error:
        return None, error
    return ((args, kwargs), result, grads), None


def _gradients(inputs: Any, outputs: Any, bring: Callable[[Any], Any]) -> Any:
    leaves = [x for x in _tensors(inputs) if x.requires_grad]
    heads = [x for x in _tensors(outputs) if x.requires_grad and x.layout is torch.strided]
    if not leaves or not heads:
        return None
    torch.default_generator.manual_seed(1)
    cotangents = [bring(torch.randn(x.size(), dtype=x.dtype)) for x in heads]
    return torch.autograd.grad(heads, leaves, cotangents, allow_unused=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _differences_of_runs(plain: Any, ours: Any, case: Case) -> list[str]:
    found = alias_differences(plain[:2], ours[:2])
    for what, a, b in zip(("argument", "result", "gradient"), plain, ours, strict=True):
        texts = differences(a, b)
        if not case.sees_values:
            texts = [text for text in texts if "values" not in text]
        if not case.is_steady:
            texts = [text for text in texts if "values" not in text] + _far_apart(a, b)
        if what == "gradient":
            # Autograd copies a leaf's gradient into the leaf's own layout.
            texts = [text for text in texts if "stride" not in text]
        found += [f"{what}, {text}" for text in texts]
    # How often composite operators write a fresh result is their own business.
    found += _unequal("_version", plain[0], ours[0])
    return found + _unequal("is_leaf", plain[:2], ours[:2])


def _far_apart(plain: Any, ours: Any) -> list[str]:
    """Where the values of two runs differ by more than rounding."""
    found = []
    for number, (a, b) in enumerate(zip(_tensors(plain), _tensors(ours), strict=False)):
        if a.dtype in CLOSE and a.size() == b.size():
            there = tensorsManager.release(b.detach()) if isinstance(b, TensorRef) else b.detach()
            close = CLOSE[a.dtype]
            if not torch.allclose(there, a.detach(), close, close, equal_nan=True):
                found.append(f"result {number}: values far apart")
    return found


def _unequal(fact: str, plain: Any, ours: Any) -> list[str]:
    values = [
        [getattr(t, fact) for t in _tensors(run) if not t.is_inference()] for run in (plain, ours)
    ]
    return [] if values[0] == values[1] else [f"{fact} {values[0]} became {values[1]}"]


def _brief(error: Exception | None) -> str:
    if error is None:
        return "success"
    lines = str(error).splitlines()
    return f"{type(error).__name__}({lines[0][:160] if lines else ''})"


def _way_to(error: Exception | None) -> str:
    """Return the innermost calls that led to an error, for what does not happen every time."""
    frames = traceback.extract_tb(error.__traceback__)[-6:] if error is not None else []
    calls = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return f" by {', '.join(calls)}" if calls else ""


def run_operator(op: Any, dtype: torch.dtype, *, samples: int | None = None) -> Outcome:
    """Compare every case of an operator and dtype; its errors with the first dtype."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype is DTYPES[0]:
            for case in error_cases(op):
                outcome.note(case.variant, dtype, compare(case))
        for case in _all_cases(op, dtype, samples, outcome):
            outcome.note(case.variant, dtype, compare(case))
    return outcome


def turn_of(name: str) -> int:
    """A number by which an operator takes its turn, the same in every process."""
    return zlib.crc32(name.encode())


def _all_cases(
    op: Any, dtype: torch.dtype, samples: int | None, outcome: Outcome
) -> Iterator[Case]:
    """The cases of an operator and dtype; where torch cannot make its own samples, those it can."""
    cases = cases_of(op, dtype, samples=samples)
    while True:
        try:
            case = next(cases)
        except StopIteration:
            return
        except Exception:
            outcome.refused["no sample"] += 1
            return
        yield case
