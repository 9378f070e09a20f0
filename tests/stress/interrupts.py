"""Real SIGINTs at random moments: no number is wrong afterwards, no session broken, none swallowed.

`python -m tests.stress.interrupts [--count 2000] [--seed 0]` from the root. Another
process sends them, while forward passes, steps of training and `generate` run under every strategy
and tight budgets, with freed bytes poisoned. After each one the same program runs again and is
compared with plain torch to the bit, and the books are checked.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import torchTensorRef
from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from ..support.differential import differences
from ..support.programs import RandomEviction

#: A signal that the program has not heard of after so long was swallowed, in seconds.
PATIENCE_S = 3.0

STRATEGIES: tuple[Callable[[], Any], ...] = (
    lambda: "genoa",
    lambda: "lru",
    lambda: "flow",
    lambda: RandomEviction(1),
)


# -- programs -------------------------------------------------------------------------------------


def blocks(count: int = 6, width: int = 128) -> nn.Module:
    """Make the model of the issue: blocks of Linear, GELU, Linear, LayerNorm."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
                nn.LayerNorm(width),
            )
            for _ in range(count)
        )
    )


class Forward:
    """Forward passes of one model, whose weights stay."""

    nbytes = 700 << 10

    def __init__(self) -> None:
        self.model = blocks()
        self.x = torch.arange(128.0 * 8).view(8, 128).sin()

    def run(self) -> Any:
        """Return what the model makes of its input."""
        with torch.no_grad():
            return self.model(self.x)


class Training:
    """Steps of training, from where the last ones ended."""

    nbytes = 500 << 10

    def __init__(self) -> None:
        self.model = blocks(2, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x = torch.arange(64.0 * 8).view(8, 64).sin()

    def run(self) -> Any:
        """Train two steps; return the losses and the weights."""
        losses = []
        for _ in range(2):
            self.optimizer.zero_grad()
            loss = self.model(self.x).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return [losses, [p.detach() for p in self.model.parameters()]]


class Generation:
    """Tokens of a small Llama, made from a configuration."""

    nbytes = 160 << 10

    def __init__(self) -> None:
        import transformers

        torch.manual_seed(4)
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=120,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.tokens = torch.arange(1, 8)[None]

    def run(self) -> Any:
        """Write six tokens."""
        return self.model.generate(self.tokens, max_new_tokens=6, do_sample=False)


PROGRAMS: tuple[Callable[[], Any], ...] = (Forward, Training, Generation)


def state_of(program: Any) -> Any:
    """Return copies of the weights and of what the optimizer keeps, looked at without an effect."""
    kept = [program.model.state_dict()]
    if isinstance(program, Training):
        kept.append(program.optimizer.state_dict())
    return torch.utils._pytree.tree_map(
        lambda x: plain_copy(x) if isinstance(x, torch.Tensor) else x, kept
    )


def plain_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the same values."""
    with torchTensorRef.disabled():
        return torch.tensor(x.tolist(), dtype=x.dtype)


# -- signals --------------------------------------------------------------------------------------

_SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
"""


class Sender:
    """Another process, which sends a SIGINT some time after it was asked to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SENDER], stdin=subprocess.PIPE, text=True
        )

    def send_in(self, delay_s: float) -> None:
        """Have a signal sent."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_s}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def interrupted(program: Any, sender: Sender, delay_s: float) -> str:
    """Run a program until a signal comes; return where it was: within, afterwards, or nowhere."""
    where = "within"
    try:
        sender.send_in(delay_s)
        program.run()
        where = "afterwards"
        time.sleep(delay_s + PATIENCE_S)
        where = "nowhere"
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # `no_grad` is Python, and may be left without its end
    return where


# -- the whole ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What has come of it."""

    where: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    #: What Python printed instead of raising it.
    unraised: list[str] = field(default_factory=list)


def prepare(make: Callable[[], Any], strategy: Any) -> tuple[Any, Any]:
    """Make a program twice: plain, and under a tight budget."""
    with torchTensorRef.disabled():
        plain = make()
    spec = DeviceSpec("interrupts", capacity_nbytes=plain.nbytes, decision_nbytes=4 << 10)
    tensorsManager.device = SimDevice(spec, poison=True, name="sim:interrupts")
    tensorsManager.budget = plain.nbytes
    tensorsManager.strategy = strategy
    return plain, make()


def trouble_of(plain: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """Run a program again after an interrupt; yield what is wrong, and of which kind."""
    if isinstance(ours, Training):  # it was interrupted between two operators: from there on
        weights, optimizer = state_of(ours)
        plain.model.load_state_dict(weights)
        plain.optimizer.load_state_dict(optimizer)
    with torchTensorRef.disabled():
        expected = plain.run()
    try:
        found = differences(expected, ours.run())
        tensorsManager.check()
    except Exception as error:
        yield "broken", f"{type(error).__name__}: {error}"[:300]
        return
    if found:
        yield "wrong", "; ".join(found[:2])
    residency = tensorsManager.residency
    holds = residency.holds
    if holds.pins_by_thread or holds.announced or holds.issuing or holds.native_blocks:
        yield "broken", "operands are still held although no operator runs"
    if residency.books.lock._is_owned() or residency.feed.lock._is_owned():
        yield "broken", "a lock is still taken: other threads would wait for ever"
    if residency.books.main.peak_nbytes > plain.nbytes:
        yield "broken", f"{residency.books.main.peak_nbytes} bytes were resident"


def session(
    make: Callable[[], Any], strategy: Any, count: int, chance: random.Random, tally: Tally
) -> None:
    """Interrupt one program under one strategy so many times."""
    plain, ours = prepare(make, strategy)
    name = f"{type(ours).__name__} under {tensorsManager.strategy.name}"
    ours.run()
    began = time.perf_counter()
    ours.run()
    usual_s = time.perf_counter() - began
    sender = Sender()
    for number in range(count):
        where = interrupted(ours, sender, chance.uniform(0, usual_s))
        tally.where[where] += 1
        tally.programs[name] += 1
        for kind, text in trouble_of(plain, ours):
            getattr(tally, kind).append(f"{name}, interrupt {number}: {text}")
            if kind == "broken":
                sender.end()
                return
    sender.end()


def run(count: int, seed: int) -> Tally:
    """Interrupt every program under every strategy, `count` times together."""
    chance, tally = random.Random(seed), Tally()
    torch.set_num_threads(1)
    before, sys.unraisablehook = (
        sys.unraisablehook,
        lambda args: tally.unraised.append(f"{args.err_msg}: {args.exc_value!r} in {args.object}"),
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    share = -(-count // (len(PROGRAMS) * len(STRATEGIES)))
    try:
        for make in PROGRAMS:
            for strategy in STRATEGIES:
                session(make, strategy(), share, chance, tally)
    finally:
        sys.unraisablehook = before
    return tally


def main() -> int:
    """Interrupt so often, and say what has come of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    tally = run(options.count, options.seed)
    for line in (*tally.wrong, *tally.broken, *tally.unraised):
        sys.stdout.write(line + "\n")
    swallowed = tally.where["nowhere"] + len(tally.unraised)
    sys.stdout.write(
        f"{sum(tally.where.values())} interrupts, {tally.where['within']} of them within a "
        f"program, in {time.perf_counter() - began:.0f} s: {len(tally.wrong)} wrong, "
        f"{len(tally.broken)} sessions broken, {swallowed} swallowed.\n"
    )
    return 1 if tally.wrong or tally.broken or swallowed else 0


if __name__ == "__main__":
    sys.exit(main())
