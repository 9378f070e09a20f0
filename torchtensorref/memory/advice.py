"""What a run comes to: how far it is from the floor, what bounds it, and what would help."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base.units import format_nbytes
from .costs import Costs, Kept

GIB = 1 << 30
#: Of the time, what has to be waiting before advice is given.
WORTH_TELLING = 0.05
#: Of the copies, what a larger budget has to save before it is named.
WORTH_A_STEP = 0.01
#: Strategies that know what comes next, and fetch it ahead.
FORESEE = ("flow", "venice")


class Bound(NamedTuple):
    """What took the time of a run.

    `by` is "link", "compute", "host" (the program's own time, with interception and management), or
    "" where the device measures nothing; `times_floor` how many times longer it took than its
    operators alone, or its copies alone.
    """

    by: str
    times_floor: float
    compute_ns: int
    link_ns: int


#: What makes the host's own time less, or has less wait for it.
HELPS_THE_HOST = (
    "larger batches, so that each operator does more; larger blocks; the path in C++ where it is "
    "not in use"
)


def waits_for_management(stats: dict[str, Any]) -> bool:
    """Say whether a host whose own time is counted was late, rather than waiting itself."""
    rest_ns = stats["time_ns"] - stats["compute_ns"] - stats["stall_ns"]
    return bool(stats["host_ns"]) and 2 * stats["host_stall_ns"] > rest_ns


def bound_of(stats: dict[str, Any], h2d_bytes_per_s: float, d2h_bytes_per_s: float) -> Bound:
    """Say what bounds a run, from its counts and the speeds of the link.

    Notes
    -----
    The floor is that of the bytes that were copied: another strategy, or a larger budget, may need
    fewer. What is neither computed nor waited for a copy is the host's: the program itself, what
    runs there, and interception. Where management's time is counted and is what is waited for, it
    is the host's also if that is longer than the operators and the copies: they were issued late.
    """
    compute_ns, time_ns, stall_ns = stats["compute_ns"], stats["time_ns"], stats["stall_ns"]
    fetched = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    to_device_ns = fetched * 1e9 / h2d_bytes_per_s
    home_nbytes = stats["written_back_nbytes"] + stats.get("peeked_nbytes", 0)
    link_ns = int(max(to_device_ns, home_nbytes * 1e9 / d2h_bytes_per_s))
    if not compute_ns or not time_ns:
        return Bound("", 0.0, compute_ns, link_ns)
    waits = {
        "link": stall_ns,
        "compute": compute_ns,
        "host": max(time_ns - compute_ns - stall_ns, 0),
    }
    by = max(waits, key=lambda name: waits[name])
    if by == "compute" and link_ns > compute_ns:
        by = "link"
    if waits_for_management(stats) and stats["host_ns"] > max(compute_ns, link_ns):
        by = "host"
    return Bound(by, time_ns / max(compute_ns, link_ns, 1), compute_ns, link_ns)


def more_room_for(stats: dict[str, Any], costs: Costs, kept: Kept) -> tuple[int, float]:
    """Say how much more budget would be worth most, and what share of the copies it may save.

    Looked at are a GiB, what the largest operator in blocks would need to run as one, and quarters
    of what is missing for what is kept and one operator, or of the budget where it has room for
    them but not for all that is computed; the step that pays best.
    """
    fetched = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    if not fetched:
        return 0, 0.0
    budget = stats["budget_nbytes"]
    missing = costs.missing_nbytes(kept, budget)
    whole = max((cost.whole_op_nbytes for cost in list(costs.by_block.values())), default=0)
    tried = {GIB, whole, *((missing or budget) * part // 4 for part in range(1, 5))}
    steps = sorted(step for step in tried if 0 < step <= max(2 * missing, budget, whole))
    rows = [(step, costs.saved_by(step, budget, kept) / fetched) for step in steps]
    return max(rows, key=lambda row: row[1] / (row[0] + budget / 4), default=(0, 0.0))


def advice_of(stats: dict[str, Any], costs: Costs, kept: Kept) -> str:
    """Return one sentence of what would help most."""
    short = stats["out_of_budget_count"]
    need = stats["largest_op_nbytes"]
    if short and need > stats["budget_nbytes"]:
        return (
            f"{short} operators ran on the host for want of room: a budget of "
            f"{format_nbytes(need)} would have held the largest, {stats['largest_op']}."
        )
    if stats["bound_by"] == "host" and waits_for_management(stats):
        room = "; a larger budget, so that fewer blocks come and go" * bool(stats["evict_count"])
        share = stats["host_ns"] / max(stats["time_ns"], 1)
        return (
            f"the host's own time bounds this run: {share:.0%} of it went into management. What "
            f"would help: {HELPS_THE_HOST}{room}."
        )
    stall_share = stats["stall_ns"] / max(stats["time_ns"], 1)
    is_stalled = stall_share > WORTH_TELLING
    stalls = f"stalls take {stall_share:.0%} of the time"
    if stats["evict_count"] == 0:
        spare = stats["budget_nbytes"] - stats["peak_resident_nbytes"]
        if is_stalled:
            return f"everything fits; {stalls}, for what is new, or was written on the host."
        return f"everything fits, and {format_nbytes(max(spare, 0))} of the budget was never used."
    if is_stalled:
        more, share = more_room_for(stats, costs, kept)
        is_worth_it = share > WORTH_A_STEP
        room = f"budget +{format_nbytes(more)} would save up to {share:.0%} of the copies"
        if stats["strategy"] not in FORESEE:
            with_it = f" With it, {room}." * is_worth_it
            return f"{stalls}: strategy = 'flow' fetches ahead of need.{with_it}"
        if is_worth_it:
            return f"{room}; {stalls}."
        return f"{stalls}, most of them for what came for the first time."
    return "the budget is enough: the accelerator hardly ever waits for a copy."
