"""What is changed between the steps of a random program, and what plain torch has nothing of.

Budgets, strategies, devices, placement, middlewares, callbacks, timelines, forecasts; where single
tensors are; what looks at them from outside. Nothing of it may be seen in what a program computes.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

import torchTensorRef
from torchTensorRef import ExposedError, OutOfBudgetError, PromisedError, TensorRef, tensorsManager
from torchTensorRef.middlewares import Middleware, Pin, Place

from ..support.programs import Adversary, RandomEviction, Scatter
from . import mixed_steps
from .mixed_steps import Missing, Program

BUDGETS_NBYTES = (1024, 4096, 9000, 16_384, 40_000, 1 << 20)
STRATEGIES = ("flow", "lru", "genoa", "venice", RandomEviction, Scatter, Adversary)
#: What a forecast runs on promises, on the tensors of the program.
FORESEEN = (
    mixed_steps.elementwise,
    mixed_steps.of_two,
    mixed_steps.in_place,
    mixed_steps.view,
    mixed_steps.filled,
    mixed_steps.reduction,
    mixed_steps.product,
    mixed_steps.backward,
    mixed_steps.gradient,
    mixed_steps.other_memory,
    mixed_steps.by_lists,
    mixed_steps.network_function,
    mixed_steps.random_numbers,
    mixed_steps.conjugate,
    mixed_steps.joined,
)
#: So many things from outside are held at once.
HELD_COUNT = 3


class Sends(Middleware):
    """Sends some operators to the host, others to the accelerator."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def before(self, op: Any) -> None:
        """Choose a device for one of three."""
        if self._chance.random() < 0.3:
            op.device = self._chance.choice(["cpu", *names_in_use()])


class Repeats(Middleware):
    """Gives the operator its own arguments, and the program its own result."""

    def before(self, op: Any) -> None:
        """Give them again."""
        op.args, op.kwargs = tuple(op.args), dict(op.kwargs)

    def after(self, op: Any, result: Any) -> Any:
        """Return what came."""
        return result


class Looks(Middleware):
    """Runs operators of its own on what it sees."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def after(self, op: Any, result: Any) -> None:
        """Look at a number of what was made, once in ten times."""
        if isinstance(result, torch.Tensor) and result.numel() and self._chance.random() < 0.1:
            with suppress(RuntimeError):  # a sparse one, or a promise
                float(result.detach().reshape(-1)[0].abs())


def names_in_use() -> list[str]:
    """Name the accelerators in use."""
    return [device.name for device in tensorsManager.residency.books.accelerators]


class Changes:
    """Changes what can be set and seen, at random.

    Parameters
    ----------
    seed : int
        Of the program whose steps they come between.
    devices : sequence of str or Device
        Those that may be in use.
    """

    def __init__(self, seed: int, devices: Any) -> None:
        self.chance = random.Random(seed * 7 + 1)
        self._devices = list(devices)
        self._placement = tensorsManager.placement
        self._held: list[Any] = []
        self._callbacks: list[tuple[str, Any]] = []
        self._scopes = ExitStack()
        self.done: list[str] = []

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()
        self._scopes.close()
        for event, callback in self._callbacks:
            tensorsManager.off(event, callback)
        tensorsManager.middlewares = []
        tensorsManager.placement = self._placement
        tensorsManager.device = self._devices[:1]

    def make(self, p: Program) -> None:
        """Change one thing."""
        change = self.chance.choice(CHANGES)
        self.done.append(change.__name__)
        # The program's own dice are not touched: with plain torch nobody throws them here.
        state, seeded = p.random.getstate(), torch.get_rng_state()
        try:
            # What does not fit, is held outside or has no value yet is refused, and says so.
            with suppress(OutOfBudgetError, ExposedError, PromisedError, Missing):
                change(self, p)
        finally:
            p.random.setstate(state)
            torch.set_rng_state(seeded)

    def _some(self, p: Program) -> Any:
        refs = [x for x in p.pool if isinstance(x, TensorRef)]
        if not refs:
            raise Missing
        return self.chance.choice(refs)

    def _hold(self, thing: Any) -> None:
        self._held = [*self._held[1 - HELD_COUNT :], thing]

    # -- what can be set ----------------------------------------------------------------------

    def budget(self, p: Program) -> None:
        tensorsManager.budget = self.chance.choice(BUDGETS_NBYTES)

    def strategy(self, p: Program) -> None:
        tensorsManager.strategy = self.chance.choice(STRATEGIES)

    def placement(self, p: Program) -> None:
        tensorsManager.placement = self.chance.choice(("accelerator", "hybrid"))

    def device(self, p: Program) -> None:
        count = self.chance.choice((1, 1, len(self._devices)))
        tensorsManager.device = self.chance.sample(self._devices, count)

    def middleware(self, p: Program) -> None:
        if len(tensorsManager.middlewares) > 1:
            tensorsManager.middlewares.pop()
            return
        made: Callable[[], Middleware] = self.chance.choice(
            (
                lambda: Sends(self.chance),
                Repeats,
                lambda: Looks(self.chance),
                lambda: Pin("*"),
                lambda: Pin("*weight"),
                lambda: Place("aten.mul", "cpu"),
            )
        )
        tensorsManager.middlewares.append(made())

    def callback(self, p: Program) -> None:
        if self._callbacks:
            tensorsManager.off(*self._callbacks.pop())
            return
        event, pool = self.chance.choice(("fetch", "evict", "write_back", "op", "drop")), p.pool

        def tell(_: Any) -> None:
            if pool and self.chance.random() < 0.1:
                with suppress(RuntimeError):
                    (pool[-1].detach() * 2).sum()

        tensorsManager.on(event, tell)
        self._callbacks.append((event, tell))

    def timeline(self, p: Program) -> None:
        self._scopes.close()
        if self.chance.random() < 0.5:
            return
        folder = self._scopes.enter_context(tempfile.TemporaryDirectory())
        self._scopes.enter_context(tensorsManager.trace(str(Path(folder) / "run.json")))

    # -- where tensors are --------------------------------------------------------------------

    def all_home(self, p: Program) -> None:
        tensorsManager.bring_all_home()

    def fetched(self, p: Program) -> None:
        self._some(p).toGPU()

    def brought_home(self, p: Program) -> None:
        self._some(p).toCPU()

    # -- what looks from outside --------------------------------------------------------------

    def target(self, p: Program) -> None:
        _ = self._some(p).target  # held, it would refuse an array at home, as documented

    def released(self, p: Program) -> None:
        self._hold(tensorsManager.release(self._some(p).detach()))

    def storage(self, p: Program) -> None:
        self._hold(self._some(p).untyped_storage())

    def address(self, p: Program) -> None:
        self._some(p).data_ptr()

    def adopted(self, p: Program) -> None:
        x = self._some(p).detach()
        self._hold(tensorsManager.adopt(tensorsManager.release(x)))

    def let_go(self, p: Program) -> None:
        self._held.clear()
        if self.chance.random() < 0.3:
            gc.collect()

    # -- what is asked ------------------------------------------------------------------------

    def looked_at(self, p: Program) -> None:
        x = self._some(p)
        tensorsManager.report()
        tensorsManager.stats()
        tensorsManager.story(x)
        tensorsManager.name_of(x)
        tensorsManager.describe(x)

    def checked(self, p: Program) -> None:
        tensorsManager.check()

    def forgotten(self, p: Program) -> None:
        tensorsManager.reset_stats()

    def foreseen(self, p: Program) -> None:
        steps = [self.chance.choice(FORESEEN) for _ in range(3)]
        pool = [x for x in p.pool if isinstance(x, TensorRef)]
        models = [model for model, _ in p.models]

        def program() -> Iterator[Any]:
            other = Program(self.chance.getrandbits(16))
            other.pool = list(pool)
            assert models is not None  # named here, so that a forecast finds them
            for step in steps:
                with suppress(RuntimeError, IndexError, ValueError, TypeError, Missing):
                    step(other)
                yield

        torchTensorRef.forecast(program, budget=self.chance.choice(BUDGETS_NBYTES), values="zeros")


#: Each as often as it is there.
CHANGES: tuple[Callable[[Changes, Program], None], ...] = (
    *(Changes.budget, Changes.strategy) * 3,
    *(Changes.device, Changes.placement, Changes.middleware, Changes.all_home) * 2,
    *(Changes.fetched, Changes.brought_home, Changes.released, Changes.foreseen) * 2,
    *(Changes.callback, Changes.timeline, Changes.target, Changes.storage, Changes.address),
    *(Changes.adopted, Changes.let_go, Changes.looked_at, Changes.checked, Changes.forgotten),
)
