"""Random programs of many kinds of steps, with plain torch and with us, compared to the bit.

`python -m tests.stress.mixed [--minutes 5] [--seed 0] [--only 17] [--strategies flow,lru]
[--device late] [--promised] [--changes] [--training]` from the root; of devices those that `soak`
has, or `sim:0,sim:1`. Operators, views, writes, gradients of every kind, modules and their
optimizers, arrays, pickles and threads on the same few tensors, under budgets of a few of them
(`mixed_steps.py`); or models in training (`mixed_training.py`). After each step what it gave is
compared, and every few steps all that is there: values, sizes, strides, gradients. A step that
raises has to raise in both.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

import torchTensorRef
from torchTensorRef import TensorRef, tensorsManager

from ..support.differential import bits
from . import mixed_steps, mixed_training
from .mixed_changes import Changes
from .mixed_steps import Program
from .soak import devices, prepare

STEP_COUNT, LOOKED_AT_EVERY = 60, 8
BUDGETS_NBYTES = (4096, 9000, 16_384, 40_000, 1 << 20)


def facts(value: Any) -> Any:
    """What can be seen of a value, as something that can be compared and printed."""
    if isinstance(value, torch.Tensor):
        return _facts_of_tensor(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), _digest(value)]
    if isinstance(value, (list, tuple)):
        return [facts(one) for one in value]
    if isinstance(value, dict):
        return {str(key): facts(one) for key, one in value.items()}
    return repr(value)


def _facts_of_tensor(x: torch.Tensor) -> Any:
    if isinstance(x, TensorRef) and x.proxyInfo.promised:
        x.fulfil()
    if x.layout is not torch.strided:
        return [str(x.layout), facts(x.detach().to_dense())]
    seen: list[Any] = [str(x.dtype), list(x.size()), x.requires_grad, x.is_leaf]
    # Those of dimensions of one element mean nothing, and autograd adds in place or not.
    seen.append([step if n > 1 else 1 for n, step in zip(x.size(), x.stride(), strict=True)])
    seen.append(_digest(bits(x).clone().numpy()))
    if x.is_leaf and x.grad is not None:
        seen.append(facts(x.grad))
    return seen


def _digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


def fulfil(program: Program) -> None:
    """Compute all promises that a program has."""
    for x in list(program.pool):
        _facts_or_error(x)
    for model, optimizer in program.models:
        facts([model.state_dict(), *model.parameters(), *optimizer.state.values()])
    for one in program.trained:
        facts([one.state(), list(one.optimizer.state.values()), list(one.model.buffers())])
        facts([module.last for module in one.model.modules() if hasattr(module, "last")])


def run(
    seed: int, *, kind: Any = mixed_steps, promised: bool = False, changes: Changes | None = None
) -> list[Any]:
    """Run a program; return what is seen after each step: its name and the facts, or the error.

    Parameters
    ----------
    kind : module
        Has the steps that it is made of.
    """
    program, seen = Program(seed), list[Any]()
    for number in range(STEP_COUNT):
        is_first = number < len(kind.FIRST_STEPS)
        step = kind.FIRST_STEPS[number] if is_first else program.one_of(kind.STEPS)
        state = program.random.getstate()
        try:
            if promised and (seed + number) % 3:
                with torchTensorRef.promising(values="compute"):
                    out = step(program)
            else:
                if promised:
                    fulfil(program)  # what this one asks for a value of may depend on anything
                out = step(program)
            seen.append([step.__name__, facts(out)])
        except Exception as error:
            seen.append([step.__name__, _error(error)])
        # What a step draws depends on where it fails, and what comes after must not.
        program.random.setstate(state)
        program.random.random()
        if changes is not None:
            changes.make(program)
        if number % LOOKED_AT_EVERY == LOOKED_AT_EVERY - 1:
            seen.append(["pool", [_facts_or_error(x) for x in program.pool]])
    return seen


def _facts_or_error(x: torch.Tensor) -> Any:
    try:
        return facts(x)
    except RuntimeError as error:  # a view that gradients must not go through
        return _error(error)


def _error(error: Exception) -> list[str]:
    return ["raised", str(error).partition("\n")[0]]


def difference(plain: list[Any], ours: list[Any]) -> str:
    """Say what differs first, "" if nothing does; errors are all alike."""
    for number, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        if _without_words(expected) != _without_words(found):
            return f"{number} {expected[0]}\n  plain {expected[1]}\n  ours  {found[1]}"
    return ""


def _without_words(seen: Any) -> Any:
    if isinstance(seen, list):
        return seen[:1] if seen[:1] == ["raised"] else [_without_words(one) for one in seen]
    return seen


def compared(
    seed: int,
    strategy: str,
    *,
    kind: Any = mixed_steps,
    promised: bool = False,
    changed: Sequence[Any] = (),
) -> str:
    """Run a program with plain torch, and with us under a strategy; say what differs.

    Parameters
    ----------
    changed : sequence of str or Device
        If there are any, all that can be set and seen is changed between the steps: these are the
        devices that may be in use.
    """
    with torchTensorRef.disabled():
        plain = run(seed, kind=kind)
    tensorsManager.strategy = strategy
    tensorsManager.budget = BUDGETS_NBYTES[seed % len(BUDGETS_NBYTES)]
    with Changes(seed, changed) if changed else nullcontext() as changes:
        ours = run(seed, kind=kind, promised=promised, changes=changes)
    gc.collect()
    tensorsManager.check()
    return difference(plain, ours)


def main() -> int:
    """Run programs until the time is over; say which differ, and print RESULT with the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.mixed", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (%(default)s)")
    parser.add_argument("--only", type=int, help="the seed of one program")
    parser.add_argument("--strategies", default="flow,lru,genoa", help="(%(default)s)")
    parser.add_argument("--device", default="sim", help="sim, adapter, late, several (%(default)s)")
    parser.add_argument("--promised", action="store_true", help="two of three steps on promises")
    parser.add_argument("--training", action="store_true", help="models and optimizers")
    parser.add_argument("--changes", action="store_true", help="what can be set, between steps")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    prepare(chosen.seed, "sim" if "," in chosen.device else chosen.device)
    if "," in chosen.device:
        tensorsManager.device = chosen.device
    strategies, until = chosen.strategies.split(","), time.monotonic() + 60 * chosen.minutes
    seeds = itertools.count(chosen.seed) if chosen.only is None else iter([chosen.only])
    different: list[int] = []
    count = 0
    for seed in seeds:
        if time.monotonic() > until:
            break
        count += 1
        strategy, changed = strategies[seed % len(strategies)], devices if chosen.changes else ()
        kind = mixed_training if chosen.training else mixed_steps
        text = compared(seed, strategy, kind=kind, promised=chosen.promised, changed=changed)
        if text:
            different.append(seed)
            print(f"seed {seed}: step {text}", flush=True)  # noqa: T201
    print("RESULT " + json.dumps({"programs": count, "different": different}))  # noqa: T201
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
