"""Operators larger than the budget, at sizes that several threads share, with MKL as users have it.

`python -m tests.stress.blocked [--minutes 5] [--seed 0] [--threads 1,2,4]` from the root. The tests
run with one thread, small tensors and an MKL that minds no alignment: what a kernel does with more
is seen here. Random operators on random sizes, each at a part of what it needs, compared with plain
torch to the bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import torchTensorRef
from torchTensorRef import tensorsManager

from ..support.differential import differences

Case = Callable[[torch.Tensor, int], Any]

#: Numbers from which on kernels give work to several threads, and what a case may have.
LEAST_NUMEL, MOST_NUMEL = 20_000, 600_000
SIDES = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 257, 512, 715)
#: Of what the operand has.
SHARES = (0.3, 0.6, 0.9, 1.3)


def _matrices(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.reshape(-1, x.size(-2), x.size(-1)) if x.dim() > 1 else x.reshape(1, 1, -1)
    return x, x[:, :5].transpose(1, 2)


#: Of a tensor and one of its dimensions.
CASES: dict[str, Case] = {
    "sum": lambda x, d: x.sum(d),
    "sum of all": lambda x, d: x.sum(),
    "var": lambda x, d: x.var(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 3, dim=d),
    "prod": lambda x, d: x.prod(d),
    "amax": lambda x, d: x.amax(d),
    "max": lambda x, d: x.max(d),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "sort": lambda x, d: x.sort(d),
    "layer_norm": lambda x, d: F.layer_norm(x, x.shape[-1:]),
    "exp": lambda x, d: x.exp(),
    "gelu": lambda x, d: F.gelu(x),
    "tanh_": lambda x, d: x.clone().tanh_(),
    "pow": lambda x, d: x**1.7,
    "divided": lambda x, d: x / (x + 1),
    "turned": lambda x, d: x.transpose(0, -1).contiguous(),
    "turned, exp": lambda x, d: x.transpose(0, -1).exp(),
    "turned, sum": lambda x, d: x.transpose(0, -1).sum(d),
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "half": lambda x, d: x.half().sum(d),
    "bfloat16": lambda x, d: x.bfloat16().exp(),
    "double": lambda x, d: x.double().log().sum(d),
    "index_select": lambda x, d: x.index_select(d, torch.arange(0, x.size(d), 2)),
    "linear": lambda x, d: F.linear(x, torch.full((7, x.size(-1)), 0.3), torch.ones(7)),
    "mm": lambda x, d: x.reshape(-1, x.size(-1)) @ x.reshape(-1, x.size(-1))[:20].t(),
    "bmm": lambda x, d: torch.bmm(*_matrices(x)),
    "baddbmm": lambda x, d: torch.baddbmm(torch.ones(1), *_matrices(x)),
    "bmm, copied": lambda x, d: torch.bmm(_matrices(x)[0], _matrices(x)[1].contiguous()),
    "mse_loss": lambda x, d: F.mse_loss(x, x * 2),
}


def draw(chance: random.Random) -> torch.Tensor:
    """Draw a tensor of a size that threads share; some are not in rows."""
    while True:
        sizes = [chance.choice(SIDES) for _ in range(chance.randrange(1, 5))]
        place, wanted = chance.randrange(len(sizes)), chance.choice((30_000, 100_000, 300_000))
        sizes[place] = max(1, wanted * sizes[place] // math.prod(sizes))
        if LEAST_NUMEL < math.prod(sizes) < MOST_NUMEL:
            x = torch.rand(sizes)
            return x.transpose(0, -1) if chance.random() < 0.2 else x


def differing(chance: random.Random) -> str:
    """Run one operator, on its own and beside plain torch; say what differs, in words."""
    name = chance.choice(list(CASES))
    case = CASES[name]
    with torchTensorRef.disabled():
        x = draw(chance)
        dim = chance.randrange(x.dim())
        plain = case(x, dim)
    tensorsManager.budget = int(x.nbytes * chance.choice(SHARES)) + 4096
    found = case(tensorsManager.adopt(x.clone(memory_format=torch.preserve_format)), dim)
    if not differences(tree_leaves(plain), tree_leaves(found)):
        return ""
    with torchTensorRef.disabled():
        again = case(x.clone(memory_format=torch.preserve_format), dim)
        if differences(tree_leaves(plain), tree_leaves(again)):
            return ""  # plain torch does not agree with itself
    return f"{name} of {tuple(x.size())} with strides {x.stride()}, {dim=}, {tensorsManager.budget}"


def run(count: int, seed: int, threads: int, until: float = math.inf) -> tuple[int, list[str]]:
    """Run so many cases, or until it is time; how many there were, and what differed."""
    chance, found, done = random.Random(seed), list[str](), 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        while done < count and time.perf_counter() < until:
            done += 1
            if words := differing(chance):
                found.append(f"with {threads} threads: {words}")
    finally:
        torch.set_num_threads(before)
    return done, found


def main() -> int:
    """Run for the time asked for, in turns of some cases for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", default="1,2,4")
    options = parser.parse_args()
    tensorsManager.device, tensorsManager.strategy = "sim", "lru"
    end, seed = time.perf_counter() + options.minutes * 60, options.seed
    counts, found = Counter[str](), list[str]()
    while time.perf_counter() < end:
        for threads in options.threads.split(","):
            done, words = run(200, seed, int(threads), end)
            counts[threads] += done
            found += words
            seed += 1
        sys.stderr.write(f"\r{sum(counts.values())} cases, {len(found)} differ")
    sys.stderr.write("\n")
    sys.stdout.writelines(f"{words}\n" for words in found)
    blocked = tensorsManager.stats()["blocked_op_count"]
    result = {"cases": counts, "in_blocks": blocked, "differ": len(found)}
    result["MKL_CBWR"] = os.environ.get("MKL_CBWR", "")
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
