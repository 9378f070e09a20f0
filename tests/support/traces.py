"""The seven traces of THEORY 1.5: how programs of each kind use their blocks.

A trace is a list of (block, struct); blocks are equally large. Written anew from the table's
descriptions, so their details are not those of the prototype.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

Trace = list[tuple[int, int]]

#: Structs, in the order of appearance in a program.
FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)
#: First block numbers of the groups that a program has.
MAIN, SECOND, THIRD, FOURTH = 0, 10_000, 20_000, 30_000


def sweep(first: int, count: int, struct: int) -> Trace:
    """Use a group's blocks once, in order."""
    return [(first + number, struct) for number in range(count)]


def back(first: int, count: int, struct: int) -> Trace:
    """Use a group's blocks once, last first."""
    return sweep(first, count, struct)[::-1]


def decode(rng: random.Random) -> Trace:
    """Six prompts, each a prefill and a random number of decode steps over 64 blocks."""
    steps = sum(1 + rng.randint(20, 60) for _ in range(6))
    return sweep(MAIN, 64, FORWARD) * steps


def diffusion(rng: random.Random) -> Trace:
    """Five images: a text encoder, twenty times a UNet-like module, a decoder."""
    unet = [(SECOND + number, 10 + number % 5) for number in range(60)]
    image = sweep(MAIN, 20, FORWARD) + unet * 20 + sweep(THIRD, 12, OTHER)
    return image * 5


def training(rng: random.Random) -> Trace:
    """Eight steps of four micro-batches, then an optimizer with two moments per weight."""
    micro = sweep(MAIN, 40, FORWARD) + back(MAIN, 40, BACKWARD)
    update = [
        (group + number, OPTIMIZER) for number in range(40) for group in (MAIN, SECOND, THIRD)
    ]
    return (micro * 4 + update) * 8


def experts(rng: random.Random) -> Trace:
    """120 tokens through 16 layers: two of eight experts each, 40 % of them chosen anew."""
    chosen = [[rng.randrange(8) for _ in range(2)] for _ in range(16)]
    trace = []
    for _ in range(120):
        for layer, pair in enumerate(chosen):
            trace.append((MAIN + layer, FORWARD))
            for slot in range(2):
                if rng.random() < 0.4:
                    pair[slot] = rng.randrange(8)
                trace.append((SECOND + 8 * layer + pair[slot], OTHER))
    return trace


def preference(rng: random.Random) -> Trace:
    """DPO: policy forward, reference forward, policy backward, twenty times."""
    step = sweep(MAIN, 30, FORWARD) + sweep(SECOND, 30, FORWARD) + back(MAIN, 30, BACKWARD)
    return step * 20


def rollouts(rng: random.Random) -> Trace:
    """GRPO-like: generate for a random while, score with a reference, train, sometimes evaluate."""
    trace = []
    for _ in range(8):
        trace += sweep(MAIN, 30, OTHER) * rng.randint(8, 24)
        trace += sweep(SECOND, 30, FORWARD)
        trace += sweep(MAIN, 30, FORWARD) + back(MAIN, 30, BACKWARD)
        if rng.random() < 0.3:
            trace += sweep(THIRD, 10, OPTIMIZER)
    return trace


def at_random(rng: random.Random) -> Trace:
    """4,000 accesses to sixty blocks, each as likely as any."""
    return [(rng.randrange(60), FORWARD) for _ in range(4_000)]


#: Name -> (trace, misses over the oracle's that THEORY 1.5 reports with room for 40 and 70 %).
TRACES: dict[str, tuple[Callable[[random.Random], Trace], tuple[float, float]]] = {
    "decode": (decode, (1.00, 1.00)),
    "diffusion": (diffusion, (1.01, 1.05)),
    "training": (training, (1.08, 1.07)),
    "preference": (preference, (1.03, 1.04)),
    "rollouts": (rollouts, (1.12, 1.20)),
    "experts": (experts, (1.60, 2.01)),
    "random": (at_random, (2.06, 2.80)),
}


def blocks_of(trace: Iterable[tuple[int, int]]) -> list[int]:
    """Return the blocks of a trace, in order."""
    return [block_id for block_id, _ in trace]
