"""What several accelerators reach together: virtual time of a decoder under `venice`.

`python -m benchmarks.several_accelerators [--rows two-all,two-half] [--write-baseline]`. A
Llama-shaped decoder of 32 layers, 55 MB, batch 1 with a key-value cache, on simulated accelerators
(4 GB/s memory, 0.5 GB/s link; latencies a fifth of a card's, as is the time to copy all weights
beside that of a model of 14 GB). Virtual time, the same on every machine, of the later half of the
tokens; the tokens are compared with plain torch's.

* ``two-all``, ``four-all``: budgets that hold the weights together, 1.25 times. Over the time of
  one accelerator that holds all.
* ``two-half``, ``four-half``: budgets that hold half of the weights together. Over the floor: what
  is missing, over all links together, or the time of one that holds all if that is longer.
* ``two-all-peer``, ``two-half-peer``: as those, with a link between the two that is twice as fast
  as the host's: what crosses does not pass the host.
* ``two-half-host``, ``four-half-host``: as those, beside a host that computes, reading 1 GB/s.
  Over the time without its computing; on four the links need no longer than compute.
* ``unequal``: a budget of 12.5 % and one of 37.5 % of the weights (8 GB and 24 GB for 64), the
  larger one behind half the link. Over the time of the best static split, which is looked for in
  steps of 1/16; and the share of the larger one over its share in that split.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from torchTensorRef import tensorsManager
from torchTensorRef.devices.registry import reset
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.strategies import venice

from .baseline import EXACT, WIDTH, Figure, Keeper
from .programs import DecoderLayer

KEEPER = Keeper("several_accelerators", "python -m benchmarks.several_accelerators", EXACT)
TOKENS = 24
#: Beside a host that computes: whether it does is tried in the first of them.
TOKENS_WITH_HOST = 36
#: What the budgets hold of the weights, by accelerator; and links in GB/s.
ROWS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "two-all": ((0.625, 0.625), (0.5, 0.5)),
    "four-all": ((0.3125,) * 4, (0.5,) * 4),
    "two-half": ((0.25, 0.25), (0.5, 0.5)),
    "four-half": ((0.125,) * 4, (0.5,) * 4),
    "two-all-peer": ((0.625, 0.625), (0.5, 0.5)),
    "two-half-peer": ((0.25, 0.25), (0.5, 0.5)),
    "two-half-host": ((0.25, 0.25), (0.5, 0.5)),
    "four-half-host": ((0.125,) * 4, (0.5,) * 4),
    "unequal": ((0.125, 0.375), (0.5, 0.25)),
}
#: Most that a figure may be (issue 19).
BOUNDS = {"of_one": 1.05, "over_floor": 1.10, "of_best": 1.10, "of_without": 1.01}
SPLITS = 16
#: Between accelerators, where they have a link.
PEER_BYTES_PER_S = 1e9
#: Of the host's kernels, where it computes.
HOST_BYTES_PER_S = 1e9


class Llama(nn.Module):
    """Thirty-two layers and a head."""

    def __init__(self, layers: int = 32, hidden: int = 192, inner: int = 576) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(hidden, inner, 4) for _ in range(layers))
        self.table = nn.Embedding(512, hidden)
        self.head = nn.Linear(hidden, 512, bias=False)

    def forward(self, ids: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        x = self.table(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x[:, -1])


def made() -> Llama:
    torch.manual_seed(0)
    return Llama().eval()


def decode(model: Llama, now_ns: Any, count: int) -> tuple[list[int], list[int]]:
    """Return so many tokens, and the time of each."""
    caches: list[list[torch.Tensor]] = [[] for _ in model.layers]
    ids, tokens, times = torch.zeros(1, 1, dtype=torch.long), [], [now_ns()]
    with torch.no_grad():
        for _ in range(count):
            token = int(model(ids, caches).argmax())
            ids = torch.full((1, 1), token)
            tokens.append(token)
            times.append(now_ns())
    return tokens, [b - a for a, b in itertools.pairwise(times)]


def accelerators(
    links: Sequence[float], peer: float | None = None, host: float | None = None
) -> list[SimDevice]:
    """Simulated accelerators in one machine, equal but for their links to the host (GB/s)."""
    specs = [
        DeviceSpec(
            f"bench{number}",
            capacity_nbytes=1 << 30,
            memory_bytes_per_s=4e9,
            h2d_bytes_per_s=link * 1e9,
            d2h_bytes_per_s=link * 1e9,
            pageable_bytes_per_s=link * 1e9,
            copy_latency_ns=2000,
            launch_ns=1000,
            dispatch_ns=400,
            host_memory_bytes_per_s=20e9,
            host_kernel_bytes_per_s=host,
            urgent_nbytes=1 << 14,
            peer_bytes_per_s=peer,
        )
        for number, link in enumerate(links)
    ]
    machine = Machine.of(specs[0])
    return [
        SimDevice(spec, number, machine=machine, name=f"sim:bench{number}")
        for number, spec in enumerate(specs)
    ]


def step_ns(
    budgets: Sequence[int],
    links: Sequence[float],
    strategy: Any,
    count: int | None = None,
    **machine: float | None,
) -> tuple[float, list[int]]:
    """Return what a token takes in the later half, and the tokens."""
    reset()
    devices = accelerators(links, **machine)
    tensorsManager.budget = None  # it was that of other devices
    tensorsManager.device = devices
    tensorsManager.strategy = strategy
    tensorsManager.budget = {d.name: n for d, n in zip(devices, budgets, strict=True)}
    model = tensorsManager.adopt(made())
    tokens, times = decode(model, devices[0].now_ns, count or TOKENS)
    tensorsManager.check()
    del model
    later = times[len(times) // 2 :]
    return sum(later) / len(later), tokens


class Split(venice.Venice):
    """Venice, whose first share is given."""

    def __init__(self, first_share: float) -> None:
        super().__init__()
        self.first_share = first_share

    def shares(self, accelerators: Any, total_nbytes: int) -> list[float]:
        """Return the given split, the largest accelerator's share first."""
        return [self.first_share * total_nbytes, (1 - self.first_share) * total_nbytes]


def measured(rows: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure rows; AssertionError if a token differs from plain torch's."""
    plain = made()
    nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    expected, _ = decode(plain, lambda: 0, max(TOKENS, TOKENS_WITH_HOST))
    found: dict[str, dict[str, float]] = {}
    one_ns, tokens = step_ns([2 * nbytes], [0.5], "flow")
    assert tokens == expected[:TOKENS]
    for row in rows:
        shares, links = ROWS[row]
        budgets = [int(share * nbytes) for share in shares]
        strategy = venice.Venice()
        peer = PEER_BYTES_PER_S if row.endswith("-peer") else None
        host = HOST_BYTES_PER_S if row.endswith("-host") else None
        count = TOKENS_WITH_HOST if host else TOKENS
        time_ns, tokens = step_ns(budgets, links, strategy, count, peer=peer, host=host)
        assert tokens == expected[:count], row
        result = {"ms": round(time_ns / 1e6, 3)}
        if host:
            without_ns, _ = step_ns(budgets, links, venice.Venice(), count)
            result["of_without"] = round(time_ns / without_ns, 4)
        elif "-all" in row:
            result["of_one"] = round(time_ns / one_ns, 4)
        else:
            missing = nbytes * (1 - sum(shares))
            floor_ns = max(one_ns, missing / sum(links))
            result["over_floor"] = round(time_ns / floor_ns, 4)
        if row == "unequal":
            dealt = strategy.dealt_nbytes
            share = dealt["sim:bench1"] / sum(dealt.values())
            splits = {
                k / SPLITS: step_ns(budgets, links, Split(k / SPLITS))[0] for k in range(6, 15)
            }
            best = min(splits, key=splits.__getitem__)
            result["of_best"] = round(time_ns / splits[best], 4)
            result["share_of_best"] = round(share / best, 4)
        found[row] = result
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="(%(default)s)")
    chosen = KEEPER.parse(parser, None, defaults=["rows"])
    found = measured(chosen.rows.split(","))
    grid = Table(title="decode on several accelerators, virtual time")
    columns = ("ms", "of_one", "of_without", "over_floor", "of_best", "share_of_best")
    for heading in ("row", *columns):
        grid.add_column(heading)
    for row, result in found.items():
        grid.add_row(row, *(str(result.get(column, "-")) for column in columns))
    Console(width=WIDTH).print(grid)
    figures = {
        f"{row}/{name}": Figure(value, "ms" if name == "ms" else "x", BOUNDS.get(name))
        for row, result in found.items()
        for name, value in result.items()
    }
    return KEEPER.conclude(figures, found, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
