"""Which operators of torch's database run on the host although there is an accelerator, and why.

    python -m tests.device.audit [--device cuda] [--only add,mul] [--samples 3] [--seconds 500]

Every operator is called on TensorRefs with a few sample inputs, and on plain tensors that lie on
the accelerator. The results must be equal where both are deterministic; what the runtime ran on the
host is written to `benchmarks/results/host_fallbacks_<device>.md`. Work left when the time is over
is named, never dropped in silence.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SAMPLES = 3

#: Called as functions of torch's that know of cuda alone, and refuse what says it is on the host.
OF_CUDA = "jiterator"

#: Their values are whatever was there, or drawn anew, by the host's generator where it is ours.
NO_VALUES = (
    "cauchy",
    "empty",
    "exponential",
    "geometric",
    "new_empty",
    "resize",
    "rand",
    "rrelu",
    "uniform",
    "normal",
    "bernoulli",
    "multinomial",
    "dropout",
)


@dataclass
class Findings:
    """What an audit has found, by operator."""

    called: int = 0
    fallbacks: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def calls_of(op: Any, dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Sample arguments on the host, the same in every run."""
    if not op.supports_dtype(dtype, "cpu"):
        return
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype):
        yield (sample.input, *sample.args), sample.kwargs


def moved(value: Any, there: Any) -> Any:
    return tree_map_only(torch.Tensor, there, value)


def audit(
    manager: Any, device: Any, ops: Any = op_db, *, samples: int = SAMPLES, seconds: float = 1e9
) -> Findings:
    """Call operators with us and with plain torch; the manager runs on the device."""
    findings = Findings()
    ends = time.monotonic() + seconds
    has_values = device.torch_device.type != "meta"
    for op in ops:
        if op.name.startswith(OF_CUDA):
            continue
        if time.monotonic() > ends:
            findings.left.append(name_of(op))
            continue
        for dtype in DTYPES:
            for args, kwargs in itertools.islice(calls_of(op, dtype), samples):
                findings.called += 1
                manager.reset_stats()
                found = compare(manager, device, op, args, kwargs, has_values)
                if found:
                    findings.failures.append((f"{name_of(op)} {str(dtype)[6:]}", found))
                reasons = manager.stats()["host_fallback_reasons"]
                mine = findings.fallbacks.setdefault(name_of(op), {})
                for reason, count in reasons.items():
                    mine[reason] = mine.get(reason, 0) + count
    findings.fallbacks = {name: found for name, found in findings.fallbacks.items() if found}
    return findings


def compare(
    manager: Any, device: Any, op: Any, args: Any, kwargs: Any, has_values: bool
) -> str | None:
    """What is different from plain torch in one call, in words; None for nothing."""
    expected = plain_result(device, op, args, kwargs, has_values)
    if expected is None:
        return None  # plain torch refuses the call
    mine_args, mine_kwargs = moved((args, kwargs), lambda t: manager.adopt(t.clone()))
    try:
        with torch.no_grad():
            result = op(*mine_args, **mine_kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if not has_values or any(part in op.name for part in NO_VALUES):
        return None
    tensors = [part for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
    if len(tensors) != len(expected):
        return f"{len(expected)} results became {len(tensors)}"
    for number, (a, part) in enumerate(zip(expected, tensors, strict=True)):
        b = manager.release(part).cpu()
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return f"result {number}: {a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
        if a.layout is torch.strided and not torch.allclose(
            a, b, rtol=1e-3, atol=1e-3, equal_nan=True
        ):
            return f"result {number} differs from plain torch's"
    return None


def plain_result(
    device: Any, op: Any, args: Any, kwargs: Any, has_values: bool
) -> list[torch.Tensor] | None:
    """What plain torch makes of a call on the device; on the host where it has no kernel there."""
    places = [device.torch_device, torch.device("cpu")] if has_values else [torch.device("cpu")]
    for place in places:
        try:
            there_args, there_kwargs = moved(
                (args, kwargs), lambda t, place=place: t.clone().to(place)
            )
            with torch.no_grad():
                result = op(*there_args, **there_kwargs)
        except Exception:
            continue
        return [t.cpu() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return None


def _copied_to(place: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().to(place)


def page_of(device_name: str, findings: Findings) -> str:
    """The table, as a page."""
    lines = [
        f"# Host fallbacks on {device_name}",
        "",
        f"{findings.called} calls of torch's operator database with torch {torch.__version__}; "
        "made by `python -m tests.device.audit`. Operators that are not here ran on the "
        "accelerator, or on the host because they draw random numbers without a label.",
        "",
        "| operator | calls | why on the host |",
        "|---|---|---|",
    ]
    for name, reasons in sorted(findings.fallbacks.items()):
        for reason, count in sorted(reasons.items()):
            lines.append(f"| {name} | {count} | {reason.replace('|', '/')} |")
    lines += ["", f"## Not equal to plain torch: {len(findings.failures)}", ""]
    lines += [f"* {name}: {text}" for name, text in findings.failures] or ["None."]
    if findings.left:
        lines += ["", "## Not reached in the time given", "", ", ".join(findings.left)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="by default what torch finds")
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calls of each, by dtype")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager
    from torchTensorRef.devices import registry

    name = chosen.device or registry.default_name()
    names = set(filter(None, chosen.only.split(",")))
    ops = [op for op in op_db if not names or op.name in names or name_of(op) in names]
    with torchTensorRef.disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorsManager.device = name
        device = tensorsManager.residency.books.main
        findings = audit(
            tensorsManager, device, ops, samples=chosen.samples, seconds=chosen.seconds
        )
    chosen.results.mkdir(parents=True, exist_ok=True)
    path = chosen.results / f"host_fallbacks_{device.kind}.md"
    path.write_text(page_of(device.name, findings))
    print(  # noqa: T201 (a program)
        f"{findings.called} calls, {len(findings.fallbacks)} operators fell back, "
        f"{len(findings.failures)} failures, {len(findings.left)} not reached: {path}"
    )
    return bool(findings.failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
