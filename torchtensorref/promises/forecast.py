"""Forecast: what a program would do on a device, under a budget, by a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.option_parsers import path_to_write
from ..base.text import Text, fitted
from ..base.units import format_nbytes, format_ns
from ..devices.registry import spec_of
from ..devices.sim.spec import DeviceSpec
from ..memory.advice import HELPS_THE_HOST, bound_of, waits_for_management
from ..memory.budget import read_budget
from ..strategy.choice import make_strategy
from .files import read, write
from .kinds import kinds_of, most_alive
from .record import BlockRecord, OpRecord, Record
from .recording import budget_on, record_of
from .replayer import Replayer, StepCost
from .teaching import teach

__all__ = ["Forecast", "forecast"]

#: What bounds a part of many small operators: the device is issued them one by one.
CALLS = "the host's calls"
#: What bounds a part that waits for management.
HOSTS_TIME = "the host's own time"


class Forecast:
    """What a recorded program would do; replayed when it is asked.

    Parameters
    ----------
    record : Record
        The program.
    spec : DeviceSpec
        The device.
    budget : int, str or None
        The most bytes the device may hold; None for all it has but 10 percent.
    strategy : str, class or None
        Who decides what is there; None for the default.

    Attributes
    ----------
    steps : list of StepCost
        What each part of the program costs, in order.
    """

    def __init__(
        self, record: Record, spec: DeviceSpec | str, budget: Any = None, strategy: Any = None
    ) -> None:
        check(budget, strategy)
        self.record, self.spec = record, spec_of(spec)
        self._budget, self._strategy = budget, strategy

    @functools.cached_property
    def _replayer(self) -> Replayer:
        return Replayer(self.record, self.spec, self._budget, self._strategy)

    @functools.cached_property
    def steps(self) -> list[StepCost]:
        """What each part of the program costs, in order; ConfigError if it runs no operator."""
        found = [step for step in self._replayer.steps() if step.op_count]
        if not found:
            raise ConfigError("The program runs no operator: nothing is to be foretold.")
        return found

    @property
    def budget_nbytes(self) -> int:
        """The most bytes the device may hold."""
        return self._replayer.residency.books.ledgers[self._replayer.device].limit_nbytes

    @property
    def strategy(self) -> str:
        """The name of who decides."""
        return self._replayer.residency.feed.strategy.name

    @property
    def time_ns(self) -> int:
        """Virtual time of all of it."""
        return sum(step.time_ns for step in self.steps)

    @property
    def steady(self) -> StepCost:
        """The last part: of a program that repeats, what goes on like this."""
        return self.steps[-1]

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that the device holds at once."""
        return max(step.peak_nbytes for step in self.steps)

    def on(self, budget: Any = None, strategy: Any = None, spec: DeviceSpec | None = None) -> Any:
        """Return the forecast of the same program elsewhere."""
        return Forecast(
            self.record,
            spec or self.spec,
            self._budget if budget is None else budget,
            strategy or self._strategy,
        )

    def accesses(self) -> Iterator[tuple[str, BlockRecord]]:
        """Yield (operator, block) in the order in which the program uses its blocks."""
        for op in self.record.each():
            for number in op.reads:
                yield op.name, self.record.blocks[number]

    # -- budgets --------------------------------------------------------------------------------

    @functools.cached_property
    def least_nbytes(self) -> int:
        """The smallest budget under which the accelerator runs every operator that it may."""
        ops = (op for op in self.record.each() if not op.on_host)
        return max(map(self._need_nbytes, ops), default=0)

    def _need_nbytes(self, op: OpRecord) -> int:
        blocks = self.record.blocks
        if op.reads_part:
            parts = (*op.reads[1:], *op.births, *op.births)  # the rows as they come, and as result
            return sum(blocks[number].nbytes for number in parts)
        alone = {number for number, _, _ in op.parts}
        held = sum(blocks[n].nbytes for n in (*op.reads, *op.births) if n not in alone)
        return held + sum(nbytes for _, _, nbytes in op.parts) + op.peak_nbytes

    @functools.cached_property
    def enough_nbytes(self) -> int:
        """The budget after which more does not help: all that is alive at once fits."""
        return sum(self.at_most_alive.values())

    @functools.cached_property
    def at_most_alive(self) -> dict[str, int]:
        """Bytes alive by kind, at the operator when they are most."""
        return most_alive(self.record, self._kinds)

    @functools.cached_property
    def _kinds(self) -> dict[int, str]:
        return kinds_of(self.record)

    def budgets(self, count: int) -> list[int]:
        """Return so many budgets, two or more, from the least to what is more than enough."""
        if not isinstance(count, int) or count < 2:
            raise ConfigError(f"{count!r} budgets: write a whole number from 2 on.")
        low, high = self.least_nbytes, self.enough_nbytes * 1.05
        return [int(low + (high - low) * i / (count - 1)) for i in range(count)]

    # -- the floor ------------------------------------------------------------------------------

    def floor_ns(self, step: StepCost) -> tuple[int, str]:
        """Return the least time that a part can take on this device, and what bounds it.

        The device computes, and what does not fit crosses the link once (THEORY, 3.1).
        """
        ranges = dict(self.record.step_ranges())
        ops = [self.record.ops[index] for index in ranges[step.name]]
        kinds = self._kinds
        whole = ((n, op) for op in ops for n in op.reads if not op.reads_part)
        alone = {number for op in ops for number, _, _ in op.parts}
        used = {n for n, op in whole if kinds[n] == "weights" and n not in alone}
        weights_nbytes = sum(self.record.blocks[number].nbytes for number in used)
        missing_nbytes = max(0, weights_nbytes - self.budget_nbytes)
        link_ns = int(missing_nbytes / self.spec.h2d_bytes_per_s * 1e9)
        issue_ns = step.op_count * self.spec.dispatch_ns
        bounds = {"the link": link_ns, "compute": step.compute_ns, CALLS: issue_ns}
        bound = max(bounds, key=bounds.__getitem__)
        return bounds[bound], bound

    def times_floor(self, step: StepCost) -> float | None:
        """Return how many times the floor a part takes; None where it takes less than its calls.

        Then operators ran at home, where virtual time counts no calls: it says nothing.
        """
        floor_ns, bound = self.floor_ns(step)
        if step.time_ns < floor_ns and bound == CALLS:
            return None
        return step.time_ns / max(floor_ns, 1)

    def bound_by(self, step: StepCost) -> str:
        """Return what bounds a part under this strategy: of the floor, or the host's own time."""
        stats = {**step._asdict(), "prefetched_nbytes": 0}  # `fetched_nbytes` has them
        bound = bound_of(stats, self.spec.h2d_bytes_per_s, self.spec.d2h_bytes_per_s)
        if bound.by == "host" and waits_for_management(stats):
            return HOSTS_TIME
        return self.floor_ns(step)[1]

    # -- told -----------------------------------------------------------------------------------

    def report(self) -> str:
        """Say what is to be expected, as text that fits a screen."""
        step = self.steady
        alive = ", ".join(f"{kind} {format_nbytes(n)}" for kind, n in self.at_most_alive.items())
        lines = [
            f"{self.strategy} on {self.spec.name}, budget {format_nbytes(self.budget_nbytes)}: "
            f"{len(self.record.ops)} operators, {format_ns(self.time_ns)}",
            f"  needs      {alive}; {format_nbytes(self.least_nbytes)} is the least budget, "
            f"{format_nbytes(self.enough_nbytes)} is enough",
            f"  peak       {format_nbytes(self.peak_nbytes)}",
            f"  floor      {step.name}: {self._against_floor(step)}",
        ]
        if self.budget_nbytes < self.least_nbytes and step.fallback_count:
            said = f"{step.fallback_count} of {step.op_count} operators run on the host"
            lines.append(f"  advice     below the least budget: {said}, which the floor leaves out")
        if self.spec.host_costs.processor:
            lines.append(
                f"  host       {format_ns(step.host_ns)} of its own time for management "
                f"({self.spec.host_costs.processor}); the device stands idle "
                f"{format_ns(step.host_stall_ns)} for it"
            )
        if self.bound_by(step) == HOSTS_TIME:
            larger = "; a larger budget" * bool(step.fetched_nbytes)
            said = f"  advice     {HOSTS_TIME} bounds this run. What would help: "
            lines.append(said + HELPS_THE_HOST + larger)
        rows = self.steps if len(self.steps) <= 8 else [*self.steps[:3], *self.steps[-3:]]
        lines.append(f"  {'part':24} {'time':>10} {'stalls':>10} {'fetched':>12} {'on host':>8}")
        lines += [
            f"  {s.name[:24]:24} {format_ns(s.time_ns):>10} {format_ns(s.stall_ns):>10} "
            f"{format_nbytes(s.fetched_nbytes):>12} {s.host_op_count + s.fallback_count:>8}"
            for s in rows
        ]
        return Text("\n".join(fitted(lines)))

    def _against_floor(self, step: StepCost) -> str:
        times, (floor_ns, bound) = self.times_floor(step), self.floor_ns(step)
        least = f"{format_ns(floor_ns)}, which {bound} takes"
        return f"{times:.2f} times {least}" if times else f"less than {least}: it runs at home"

    def to_json(self) -> dict[str, Any]:
        """Return what is to be expected as plain data."""
        floor_ns, _ = self.floor_ns(self.steady)
        return {
            "device": self.spec.name,
            "strategy": self.strategy,
            "budget_nbytes": self.budget_nbytes,
            "peak_nbytes": self.peak_nbytes,
            "at_most_alive_nbytes": self.at_most_alive,
            "least_nbytes": self.least_nbytes,
            "enough_nbytes": self.enough_nbytes,
            "time_ns": self.time_ns,
            "floor_ns": floor_ns,
            "bound_by": self.bound_by(self.steady),
            "steps": [step._asdict() for step in self.steps],
        }

    def curve(self, budgets: Iterable[Any]) -> list[tuple[int, StepCost]]:
        """Return (budget in bytes, last part) for several budgets."""
        found = []
        for budget in budgets:
            other = self.on(budget=budget)
            found.append((other.budget_nbytes, other.steady))
        return found

    def plot(self, path: str | Path, count: int = 8) -> None:
        """Draw the time of the last part against the budget, into a PNG; needs matplotlib."""
        from .picture import draw_curves

        path = path_to_write(path, "plot(path)")
        title = f"{self.steady.name} by budget, {self.strategy}"
        draw_curves(title, [(self.spec.name, self.curve(self.budgets(count)))], Path(path))

    # -- the first real pass --------------------------------------------------------------------

    def teach(self, module: Any = None) -> None:
        """Let the strategy in use know it before the program's first real call.

        Parameters
        ----------
        module : torch.nn.Module, optional
            The real model, where this was made of another one of the same structure (on the meta
            device): parameters and buffers are found by their names. Not needed for a forecast
            made with the model itself, or for one from a file if the names in it are those that
            `tensorsManager.name_of` gives.

        Raises
        ------
        ConfigError
            None of the names is there.
        """
        teach(self.record, module)

    # -- kept -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the program into a file: a JSON text."""
        write(self.record, path)

    @classmethod
    def load(
        cls, path: str | Path, *, device: Any = "sim", host: Any = None, **more: Any
    ) -> Forecast:
        """Read what `save` has written.

        Raises
        ------
        ConfigError
            The file is not one of `save`.
        """
        return cls(read(path), spec_of(device, host), **more)


def forecast(
    call: Callable[..., Any],
    *args: Any,
    device: Any = "sim",
    budget: Any = None,
    strategy: Any = None,
    steps: int = 1,
    values: Any = "compute or zeros",
    host: Any = None,
    **kwargs: Any,
) -> Forecast:
    """Find out what a program would do, without running it: no data, no accelerator, any size.

    Parameters
    ----------
    call : callable
        A module, or any function. If it is a generator function, each `yield` ends a part of the
        program; what it yields is the name of that part if it is text.
    *args, **kwargs
        Its arguments. Modules on the meta device take part as if they had bytes.
    device : str or DeviceSpec, optional
        The simulated device: ``"rtx4060"``, ``"sim:h200"``.
    budget, strategy : optional
        As for `tensorsManager`.
    steps : int, optional
        How often the program is called, if it is no generator.
    values : optional
        As for `promising`. By default a value is computed where what it depends on has values, and
        zero otherwise.
    host : str or HostCosts, optional
        A processor whose time for management is counted: a name of `HOST_COSTS`, or a file of
        ``python -m benchmarks.host_time --calibrate --save FILE``. None: it takes no time.

    Returns
    -------
    Forecast

    Notes
    -----
    Real tensors are as they were afterwards, also those that the program writes or gives other
    memory, and so are the gradients of tensors and modules that it names or is given. What it keeps
    elsewhere (a cache, an optimizer's state) are promises without values then: give it its own.

    Examples
    --------
    >>> import torch, torchTensorRef
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(100_000, 100_000)
    >>> seen = torchTensorRef.forecast(model, torch.empty(1, 100_000), device="h200")
    >>> seen.steps[0].fetched_nbytes > 40e9
    True
    """
    if not callable(call):
        raise ConfigError(f"forecast() takes a module or a function to call, not {call!r}.")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"steps={steps!r}: a program is called once or more often.")
    spec = spec_of(device, host)
    check(budget, strategy)  # the program may take long
    lists_for = budget_on(spec, budget)
    record = record_of(call, *args, steps=steps, values=values, lists_for=lists_for, **kwargs)
    return Forecast(record, spec, budget, strategy)


def check(budget: Any, strategy: Any) -> None:
    """Refuse a budget or a strategy that is not understood, before anything is run with it.

    Raises
    ------
    ConfigError, StrategyError
        As when `tensorsManager` is given it.
    """
    read_budget(budget, list)
    make_strategy(strategy)


def history_of(setting: Any) -> Forecast | None:
    """Return the forecast that a setting of `tensorsManager.history` means, once it is taught.

    Raises
    ------
    ConfigError
        It is neither a forecast nor a file of one, or none of its tensors is there.
    """
    if isinstance(setting, (str, Path)):
        setting = Forecast.load(setting)
    if setting is None:
        return None
    if not isinstance(setting, Forecast):
        raise ConfigError(
            f"history is a Forecast, the path of a file that Forecast.save has written, or None, "
            f"not {setting!r}.",
            name=str(setting),
        )
    setting.teach()
    return setting
