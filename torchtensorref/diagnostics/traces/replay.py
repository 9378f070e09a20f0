"""A timeline run again by a strategy, without the model and without an accelerator."""

from __future__ import annotations

from typing import Any

from ...base.errors import ConfigError
from ...base.units import format_nbytes, format_ns
from ...devices.registry import spec_of
from ...devices.sim.cards import SPECS
from ...devices.sim.host_costs import HostCosts
from ...devices.sim.spec import DeviceSpec
from ...promises.record import BlockRecord, OpRecord, Record
from ...promises.replayer import Replayer, StepCost
from .recording import Recording, Slice


def record_of(recording: Recording) -> Record:
    """Return the operators of a timeline as the record that a replayer does again."""
    record = Record()
    for number, (name, nbytes, is_persistent) in recording.about["blocks"].items():
        record.blocks[int(number)] = BlockRecord(int(number), nbytes, is_persistent, name=name)
    for one in recording.operators:
        if record.ops:
            record.ops[-1].deaths.extend(one.args["dead"])
        record.ops.append(_op_of(one))
    return record


def _op_of(one: Slice) -> OpRecord:
    args, facts = one.args, one.args["facts"]
    return OpRecord(
        one.name,
        args["kind"],
        tuple(args["reads"]),
        tuple(args["writes"]),
        tuple(number for number, _ in args["born"]),
        flops=args["flops"],
        nbytes=args["touched_nbytes"],
        dtype=args["dtype_name"],
        peak_nbytes=args["peak_nbytes"],
        may_be_ready="ready" in facts,
        may_be_fetched="fetched" in facts,
        on_host="on_host" in facts,
        overwrites="overwrites" in facts,
        reads_part="reads_part" in facts,
        parts=tuple(map(tuple, args.get("parts", ()))),
        packs="packs" in facts,
        waits="waits" in facts,
        shares="shares" in facts,
        form=args["form"],
        fetched_form=args["form"],
    )


def replay(
    recording: Recording, *, strategy: Any = None, budget: Any = None, device: str | None = None
) -> tuple[StepCost, Replayer]:
    """Do what a timeline has recorded again.

    Parameters
    ----------
    strategy, budget : optional
        As `tensorsManager` takes them; those of the recorded run if not given.
    device : str, optional
        The name of a simulated one, such as "rtx3060"; the recorded one if that was simulated.

    Returns
    -------
    StepCost, Replayer
        What it has cost, and who has done it, for more.

    Raises
    ------
    ConfigError
        The recorded device is a real one and no other is named, a setting is not understood, or
        the timeline was cut.
    """
    if recording.missing:
        raise ConfigError(f"A replay needs the whole run. {recording.missing}")
    about = recording.about
    replayer = Replayer(
        record_of(recording),
        _spec(about, device),
        about["budget_nbytes"] if budget is None else budget,
        about["strategy"] if strategy is None else strategy,
    )
    if budget is None and device is None and about.get("limit_nbytes"):
        replayer.device.limit(about["limit_nbytes"])
    # In their order: strategies are told of an operator's blocks by their numbers.
    born = {number for op in replayer.record.ops for number in op.births}
    for number in sorted(replayer.record.blocks.keys() - born):
        replayer.block(number)
    return replayer.run()[0], replayer


def _spec(about: dict[str, Any], device: str | None) -> DeviceSpec:
    if device is not None:
        return spec_of(device)
    if about["spec"] is None:
        raise ConfigError(
            f"{about['device']} is a real device, whose speeds are not in the timeline. Name a "
            f"simulated one like it: --device {' or '.join(list(SPECS)[:3])}."
        )
    costs = HostCosts(**about["spec"].get("host_costs", {}))
    return DeviceSpec(**{**about["spec"], "host_costs": costs})


def rows_of(recording: Recording, cost: StepCost, replayer: Replayer) -> list[tuple[str, str, str]]:
    """Compare the recorded run with the replayed one: what, recorded, replayed."""
    stats, after = recording.stats, replayer.residency.copier.transfer.counts
    strategy = replayer.residency.feed.strategy.name
    pairs = (
        ("strategy", recording.about["strategy"], strategy),
        ("budget", recording.about["budget_nbytes"],
         replayer.residency.books.ledgers[replayer.device].limit_nbytes),
        ("time", stats["time_ns"], cost.time_ns),
        ("stalls", stats["stall_ns"], cost.stall_ns),
        ("fetched on demand", stats["fetched_nbytes"], after.fetched_nbytes),
        ("fetched ahead", stats["prefetched_nbytes"], after.prefetched_nbytes),
        ("written back", stats["written_back_nbytes"], cost.written_back_nbytes),
        ("operators on the host", stats["host_op_count"] + stats["host_fallback_count"],
         cost.host_op_count + cost.fallback_count),
    )  # fmt: skip
    return [(name, _told(name, a), _told(name, b)) for name, a, b in pairs]


def _told(name: str, value: Any) -> str:
    if name in ("time", "stalls"):
        return format_ns(value)
    is_count = isinstance(value, str) or name.startswith("operators")
    return str(value) if is_count else format_nbytes(value)
