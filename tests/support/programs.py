"""Small programs to run twice, on plain tensors and on managed ones, and strategies that misbehave.

A program is a function of `bring`: what it makes and wants managed it hands to `bring`, which is
`tensorsManager.adopt` or does nothing. It returns what is to be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from torchTensorRef import tensorsManager
from torchTensorRef.compiled.calls import CompiledCall
from torchTensorRef.strategies.venice import Venice
from torchTensorRef.strategy import (
    BlockSnapshot,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
)

from .differential import differences, plain_leaves

#: Why an optimizer's state is not all TensorRefs.
COUNTS_OF_STEPS = "torch makes an optimizer's counts of steps, which stay plain"


Bring = Callable[[Any], Any]
Program = Callable[[Bring], Any]


def called_natively(module: Any) -> Any:
    """Have a module called as if torch had compiled it, to what it is."""
    run = module._call_impl
    module._compiled_call_impl = CompiledCall(run, run, lambda function: function)
    return module


def unchanged(x: Any) -> Any:
    """Leave a program's tensors plain."""
    return x


def plain_result(program: Program) -> Any:
    """What plain torch makes of a program; the seed is the same for every run."""
    torch.manual_seed(0)
    return program(unchanged)


def managed_result(program: Program, manager: Any) -> Any:
    """What we make of it; the books are checked afterwards."""
    torch.manual_seed(0)
    result = program(manager.adopt)
    manager.check()
    return result


def accelerator_work(manager: Any) -> int:
    """How much the accelerators have computed: zero where they ran no operator."""
    books = manager.residency.books
    if books.main.has_virtual_clock:
        return sum(device.clocks().compute_ns for device in books.accelerators)
    stats = manager.stats()
    return stats["op_count"] - stats["host_op_count"] - stats["host_fallback_count"]


def assert_same(
    plain: Any, ours: Any, *, plain_because: str = "", on_host_because: str = ""
) -> None:
    """Equal to the bit in everything that can be seen, and not for want of doing anything.

    Parameters
    ----------
    plain, ours : Any
        What plain torch gives, and what we give.
    plain_because : str
        Why some of our results may be plain tensors; they are to be TensorRefs otherwise.
    on_host_because : str
        Why the accelerator may have run no operator.
    """
    found = differences(
        *(tree_map_only(torch.Tensor, torch.Tensor.detach, x) for x in (plain, ours))
    )
    assert not found, "; ".join(found[:10])
    if not plain_because:
        assert not plain_leaves(ours), f"plain results: {plain_leaves(ours)}"
    if not on_host_because:
        assert accelerator_work(tensorsManager), "the accelerator ran no operator"


def assert_right(
    program: Program, manager: Any, *, plain_because: str = "", on_host_because: str = ""
) -> None:
    """A program's results are those of plain torch; see `assert_same`."""
    plain, before = plain_result(program), accelerator_work(manager)
    ours = managed_result(program, manager)
    worked = accelerator_work(manager) > before
    assert worked or on_host_because, "the accelerator ran no operator of the program"
    assert_same(plain, ours, plain_because=plain_because, on_host_because=on_host_because)


# -- strategies that misbehave ---------------------------------------------------------------------


class RandomEviction(Strategy):
    """At each operator give back, write back and fetch ahead a random part of what there is."""

    name = "random"
    watches_accesses = True

    def __init__(self, seed: int = 0, share: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._seen: list[int] = []

    def _some(self, blocks: Iterable[BlockSnapshot]) -> list[int]:
        return [block.block_id for block in blocks if self._random.random() < self._share]

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        chosen = self._some(candidates)
        self._random.shuffle(chosen)
        return chosen

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        return self._some(used)

    def on_access(self, access: Any) -> None:
        self._seen = [*self._seen[-20:], access.block_id]

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        return self._some(block for block in resident if block.is_dirty)

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        victims = tuple(self._some(resident))
        if not self._seen or self._random.random() > self._share:
            return []
        return [Prefetch(self._random.choice(self._seen), victims)]

    def expects(self, device: DeviceSnapshot) -> Iterable[int]:
        count = self._random.randrange(6)
        return [self._random.choice(self._seen or [0]) for _ in range(count)]


class Scatter(RandomEviction):
    """Run each operator that lacks an operand on any accelerator, or in its stead at home."""

    name = "scatter"
    spreads = True
    mixes_devices = True

    def place(self, op: OpSnapshot) -> str:
        if op.accelerators:
            return self._random.choice(op.accelerators).name
        return self._random.choice(op.offers).device if op.is_movable else op.default_device


class InTurn(Venice):
    """Venice, whose accelerators get weights in turn, however small a program is."""

    name = "in turn"

    def _next(self, nbytes: int, accelerators: Sequence[DeviceSnapshot]) -> str:
        return accelerators[len(self._home) % len(accelerators)].name


class Adversary(Strategy):
    """Answer with nonsense: unknown numbers, repeats, too few, all at once, what is not there."""

    name = "adversary"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._gone: list[int] = [0]

    def _nonsense(self, blocks: Sequence[BlockSnapshot]) -> list[int]:
        numbers = [block.block_id for block in blocks]
        return self._random.choice(
            [
                [],
                numbers,
                numbers[:1] * 7,
                numbers[::-1] * 2,
                [-1, 0, 10**18, *self._gone],
                [*self._gone, *numbers],
            ]
        )

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        return iter(self._nonsense(candidates))

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        return self._nonsense(used)

    def on_death(self, block_id: int) -> None:
        self._gone = [*self._gone[-5:], block_id]

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        return self._nonsense(resident)

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        numbers = self._nonsense(resident)
        return [Prefetch(number, tuple(self._nonsense(resident))) for number in numbers]

    def expects(self, device: DeviceSnapshot) -> Iterable[int]:
        return [*self._gone, -1, 10**18]


# -- programs --------------------------------------------------------------------------------------


def scattered(bring: Bring) -> Any:
    """Views, in-place writes, aliases, results of several operators, blocks that die."""
    xs = [bring(torch.rand(16, 16)) for _ in range(6)]
    for round_ in range(3):
        for i, x in enumerate(xs):
            y = (x @ xs[(i + 1) % 6]).sin()
            x.t()[1:9].mul_(0.5).add_(y[:8])
            values, indices = y.sort(dim=1)
            xs[i] = x + values.flip(0) - indices.to(torch.float32) * 1e-3
        xs[round_].view(-1)[::3] = xs[round_ + 1].view(-1)[1::3][:1]
    total = torch.stack(xs).sum(0)
    return [*xs, total, total.max().item()]


def mlp(bring: Bring) -> Any:
    """A perceptron, forward and backward."""
    model = bring(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10)))
    loss = nn.functional.cross_entropy(
        model(bring(torch.rand(8, 32))), bring(torch.randint(10, (8,)))
    )
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def trained(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Iterable[nn.Parameter]], Any],
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
) -> Program:
    """Make a program that trains and returns losses, parameters, gradients, optimizer state."""

    def program(bring: Bring) -> Any:
        model = bring(make_model())
        optimizer = make_optimizer(model.parameters())
        losses = []
        for _ in range(steps):
            x, y = (bring(tensor) for tensor in make_batch())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [losses, *state_of(model, optimizer)]

    return program


def state_of(model: nn.Module, optimizer: Any) -> list[Any]:
    """All that a training step changes, in a fixed order."""
    states = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]
    return [
        [p.detach() for p in model.parameters()],
        [p.grad for p in model.parameters()],
        list(model.buffers()),
        [[state[name] for name in sorted(state)] for state in states],
    ]


def linears(manager: Any, count: int = 8, width: int = 64) -> nn.Module:
    """Make a managed row of layers, `count` times `width` squared floats; see `sweep`."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
    return manager.adopt(model)  # type: ignore[no-any-return]


def sweep(model: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    """Send something through a row of layers so many times, without gradients."""
    with torch.no_grad():
        for _ in range(count):
            for layer in model.layers:
                x = torch.tanh(layer(x))
    return x
