"""What `tensorsManager.report()` says: one screen of what is held and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..base.options import settings
from ..base.text import LINE, Text, fitted
from ..base.units import format_nbytes, format_ns
from ..operators.blocked.probe import unlike
from .advice import WORTH_A_STEP, advice_of, more_room_for, waits_for_management
from .block import Block
from .costs import BlockCost, Kept
from .device_times import bound_of_run
from .ref import TensorRef
from .states import CLEAN, DIRTY

#: Rows of each list; what is left out is counted, so that a report fits a screen.
BLOCK_ROWS = 10
HELD_ROWS = 5
REASON_ROWS = 4
CAUSES = 3
#: Characters of a name among the blocks.
NAME = 36
WORDS_OF_BOUNDS = {
    "link": "the link",
    "compute": "compute",
    "host": "the host and interception",
}
#: Operators that are cut where tiles of products have the bits of the whole.
PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "linear"))
NOT_CUT = (
    "products whose tiles have other bits on this processor were not cut. "
    "MKL_CBWR=COMPATIBLE before the start may mend it; TTR_BLOCKS=any cuts them all the same."
)


def report_text(manager: Any) -> str:
    """Describe what is resident, what is held by whom, and what has been moved and why.

    Parameters
    ----------
    manager : TensorsManager
        Whose books are read.

    Returns
    -------
    str
        At most about 40 lines of at most 80 characters.

    Notes
    -----
    Looking moves nothing and counts as no use.
    """
    manager.names.look()  # what optimizers keep is made late
    stats = manager.stats()
    residency = manager.residency
    with residency.books.lock:
        blocks = living_blocks(manager)
        lines = [*_totals(stats), *_devices(residency.books, stats), *_times(manager, stats)]
        lines += [*_needs(manager, stats, blocks), *_fallbacks(stats)]
        lines += [*_why_not_cut(residency.books, stats), *_held(blocks)]
        lines = [*fitted(lines), *_dearest(manager, blocks)]
    return Text("\n".join(lines))


def line_of(residency: Any) -> str:
    """Describe what each accelerator holds, in one line; None before the first use."""
    if residency is None:
        return "<TensorsManager: nothing opened yet>"
    where = ", ".join(
        f"{device.name} {format_nbytes(ledger.resident_nbytes)} of "
        f"{format_nbytes(ledger.budget.limit_nbytes)}"
        for device, ledger in list(residency.books.ledgers.items())
    )
    return f"<TensorsManager {residency.feed.strategy.name}: {where or 'host only'}>"


def block_of(value: Any, asked: str) -> Block:
    """Return the block of a TensorRef; a TypeError that says what else it is, and what to do.

    Parameters
    ----------
    value : TensorRef
        What somebody wants to be told of.
    asked : str
        The method that was asked.
    """
    if isinstance(value, TensorRef):
        block: Block = value._ttr_block
        return block
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = "Give it a TensorRef"
    if isinstance(value, torch.Tensor):
        advice = (
            "It is not managed, so nothing is known of it; tensorsManager.adopt(...) changes that"
        )
    elif isinstance(value, torch.nn.Module):
        advice = "Give it one of the module's tensors, such as a parameter"
    raise TypeError(f"tensorsManager.{asked}() tells of one TensorRef; this is a {kind}. {advice}.")


def description_of(manager: Any, ref: Any) -> str:
    """Describe a TensorRef's block and its replicas."""
    block = block_of(ref, "describe")
    shape = ", ".join(map(str, ref.size()))
    kind = str(ref.dtype).removeprefix("torch.")
    called = manager.names.of_block(block.block_id)
    name = block.name if called == block.name else f"{block.name} {called}"
    lines = [f"{kind}[{shape}] -> {name} {format_nbytes(block.nbytes)}  home cpu"]
    for replica in list(block.replicas.values()):
        pins = f", pinned {replica.pins}" if replica.pins else ""
        used = manager.residency.books.tick - block.last_use
        last = f", last used {used} operators ago" if replica.state in (CLEAN, DIRTY) else ""
        lines.append(f"  {replica.device.name:8} {replica.state.value}{pins}{last}")
    if block.exposure is not None and block.exposure.alive:
        exposure = block.exposure
        lines.append(f"  exposed on {exposure.device.name}: {exposure.why}")
    return "\n".join(lines)


def living_blocks(manager: Any) -> list[Block]:
    """Find the blocks that operators have used, that were adopted, or that are on an accelerator.

    Notes
    -----
    Not by asking the garbage collector for everything: it also gives what other threads are just
    making, which such a look can spoil (CPython then raises in that thread). What is left over on
    a device that is not in use any more is not among them.
    """
    residency = manager.residency
    ours = {residency.books.host, *residency.books.accelerators}
    found = residency.books.known.alive()
    found += manager.ownership.table.blocks()
    for device in residency.books.ledgers:
        found += residency.books.blocks_on(device)
    with residency.books.lock:
        parts = residency.books.parts.blocks()  # of others that are among them
    return [
        block
        for block in dict.fromkeys(found)
        if ours.issuperset(block.replicas) and block not in parts
    ]


def _totals(stats: dict[str, Any]) -> list[str]:
    size = {name: format_nbytes(n) for name, n in stats.items() if name.endswith("_nbytes")}
    on_host_count = stats["host_op_count"] + stats["host_fallback_count"]
    thrash = f"; {stats['thrash_count']} thrashed, {size['thrash_nbytes']}"
    return [
        f"torchTensorRef: {stats['strategy']} on {stats['device']}",
        f"  resident   {size['resident_nbytes']} of {size['budget_nbytes']}, "
        f"peak {size['peak_resident_nbytes']}",
        f"  operators  {stats['op_count']} (views not counted): {stats['ready_op_count']} ready, "
        f"{stats['slow_op_count']} slow, {stats['native_op_count']} in "
        f"{stats['native_call_count']} compiled calls",
        f"  on host    {on_host_count} of the slow ones",
        *_at_home(stats),
        f"  operands   {stats['miss_count']} misses; {stats['slow_hit_count']} hits on the slow "
        "path (on the ready one all are)",
        f"  fetched    {size['fetched_nbytes']} on demand, {size['prefetched_nbytes']} ahead, "
        f"in {stats['fetch_count']} copies{thrash if stats['thrash_count'] else ''}",
        f"  evicted    {stats['evict_count']} replicas: {size['dropped_nbytes']} given back, "
        f"{size['written_back_nbytes']} written back",
        *_causes(stats["evicted_nbytes_by_cause"]),
        *_peeked(stats),
    ]


def _at_home(stats: dict[str, Any]) -> list[str]:
    """What the strategy had computed at home, in one sentence; nothing where it had nothing."""
    if not stats["at_home_count"]:
        return []
    return [
        f"             {stats['at_home_count']} because their weights were there "
        f"({format_nbytes(stats['at_home_nbytes'])} not fetched): saved "
        f"{format_ns(stats['at_home_saved_ns'])}"
    ]


def _causes(by_cause: dict[str, int]) -> list[str]:
    rows = sorted(by_cause.items(), key=lambda row: -row[1])[:CAUSES]
    told = "; ".join(f"{format_nbytes(n)} for {why.partition(': ')[2] or why}" for why, n in rows)
    return [f"             {told}"] if rows else []


def _peeked(stats: dict[str, Any]) -> list[str]:
    """What was copied home only to be looked at; nothing where nothing was."""
    if not stats["peek_count"]:
        return []
    nbytes = format_nbytes(stats["peeked_nbytes"])
    return [f"  peeked     {nbytes} copied home to be read once, in {stats['peek_count']} copies"]


def _devices(books: Any, stats: dict[str, Any]) -> list[str]:
    """The other accelerators, a line each; the first is in the totals."""
    return [
        f"  {device.name:10} {format_nbytes(books.ledgers[device].resident_nbytes)} of "
        f"{format_nbytes(books.ledgers[device].limit_nbytes)}, peak "
        f"{format_nbytes(device.peak_nbytes)}"
        for device in books.accelerators[1:]
    ]


def _times(manager: Any, stats: dict[str, Any]) -> list[str]:
    lines = [f"  stalls     {_stalls(stats)}"]
    if stats["host_ns"]:
        lines.append(
            f"  host       {format_ns(stats['host_ns'])} of its own time for management; "
            f"the accelerator stood idle {format_ns(stats['host_stall_ns'])} for it"
        )
    bound = bound_of_run(manager.residency.books, stats)
    if bound.by:
        is_late = bound.by == "host" and waits_for_management(stats)
        by = "the host's time" if is_late else WORDS_OF_BOUNDS[bound.by]
        by += f" of {stats['busiest']}" * (len(stats["by_device"]) > 1 and bound.by != "host")
        lines.append(
            f"  bound by   {by}: operators {format_ns(bound.compute_ns)}, "
            f"copies {format_ns(bound.link_ns)}; took "
            f"{bound.times_floor:.2f} times the longer"
        )
    return lines


def _stalls(stats: dict[str, Any]) -> str:
    """How long was waited for copies; of several accelerators, by each of those that waited."""
    time_ns = stats["time_ns"]
    if len(stats["by_device"]) <= 1:
        share = stats["stall_ns"] / max(time_ns, 1)
        return f"{format_ns(stats['stall_ns'])} of {format_ns(time_ns)}, {share:.0%}"
    rows = [(name, row["stall_ns"] / max(time_ns, 1)) for name, row in stats["by_device"].items()]
    told = [f"{share:.0%} on {name}" for name, share in sorted(rows, key=lambda row: -row[1])]
    return f"{', '.join(told[:CAUSES])}, of {format_ns(time_ns)}"


def kept_of(manager: Any, blocks: Iterable[Block]) -> Kept:
    """Find out what the program keeps: parameters, buffers, what has outlived many operators."""
    kept = [block for block in blocks if block.is_persistent]
    state_nbytes = sum(block.nbytes for block in kept if manager.names.is_state(block))
    return Kept(sum(b.nbytes for b in kept), frozenset(b.block_id for b in kept), state_nbytes)


def together(manager: Any, stats: dict[str, Any]) -> dict[str, Any]:
    """Return the counts with the room of all accelerators, where a strategy spreads over them."""
    if not manager.residency.feed.spreads:
        return stats
    books = manager.residency.books
    return {
        **stats,
        "budget_nbytes": sum(books.ledgers[d].limit_nbytes for d in books.accelerators),
        "peak_resident_nbytes": sum(device.peak_nbytes for device in books.accelerators),
    }


def _needs(manager: Any, stats: dict[str, Any], blocks: list[Block]) -> list[str]:
    """How much budget the program would need, and for what; and one sentence of advice."""
    stats = together(manager, stats)
    kept, budget = kept_of(manager, blocks), stats["budget_nbytes"]
    largest, costs = stats["largest_op_nbytes"], manager.residency.books.counts.costs
    fits = "all of them fit" if kept.nbytes <= budget else f"{budget / kept.nbytes:.0%} of them fit"
    state = f" and {format_nbytes(kept.state_nbytes)} of optimizer state" * bool(kept.state_nbytes)
    others = format_nbytes(kept.nbytes - kept.state_nbytes)
    lines = [f"  needs      {others} of tensors that stay{state}, {fits}"]
    if largest:
        told = f"{format_nbytes(largest)}, {stats['largest_op']}"
        lines.append(f"{'':13}largest operator seen: {told}")
    advice = advice_of(stats, costs, kept)
    more, share = more_room_for(stats, costs, kept)
    if share > WORTH_A_STEP and "budget +" not in advice:
        told = f"budget +{format_nbytes(more)} would save up to {share:.0%} of the copies"
        lines.append(f"{'':13}{told}")
    return [*lines, f"  advice     {advice}"]


def _fallbacks(stats: dict[str, Any]) -> list[str]:
    reasons = sorted(stats["host_fallback_reasons"].items(), key=lambda row: -row[1])
    lines = [f"host fallbacks: {stats['host_fallback_count'] or 'none'}"]
    lines += _rows(reasons, REASON_ROWS, lambda row: f"{row[1]:>6}  {row[0]}")
    if reasons:
        lines.append(f"{'':13}{_most_often(stats['host_fallback_operators'])}")
    return [*_in_blocks(stats), *lines]


def _why_not_cut(books: Any, stats: dict[str, Any]) -> list[str]:
    """What to set where products ran on the host because their tiles would have other bits."""
    is_product = PRODUCTS.intersection(stats["host_fallback_operators"])
    is_said = is_product and unlike and books.main.has_host_kernels and settings.blocks == "exact"
    return [f"{'':13}{NOT_CUT}"] if is_said else []


def _most_often(operators: dict[str, int]) -> str:
    names = sorted(operators.items(), key=lambda row: -row[1])[:CAUSES]
    return ", ".join(f"{name.removeprefix('aten.')} {count}x" for name, count in names)


def _in_blocks(stats: dict[str, Any]) -> list[str]:
    """The operators that were larger than the room; nothing where there were none."""
    if not stats["blocked_op_count"]:
        return []
    told = _most_often(stats["blocked_operators"])
    reordered = stats["reordered_op_count"]
    order = f"; {reordered} added in another order" if reordered else ""
    return [
        f"in blocks: {stats['blocked_op_count']} operators in {stats['blocked_tile_count']} "
        f"blocks{order}: {told}"
    ]


def _held(blocks: Iterable[Block]) -> list[str]:
    """The blocks that strategies cannot move, with who holds them."""
    held = [(block, why) for block in blocks if (why := _holder(block))]
    held.sort(key=lambda row: -row[0].nbytes)
    total = format_nbytes(sum(block.nbytes for block, _ in held))
    lines = [f"held: {len(held)} blocks, {total}" if held else "held: none"]
    return lines + _rows(
        held,
        HELD_ROWS,
        lambda row: f"  {row[0].name:>6} {format_nbytes(row[0].nbytes):>12}  {row[1]}",
    )


def _holder(block: Block) -> str:
    """Who holds a block where it is; empty if nobody does."""
    reasons = []
    exposure = block.exposure
    if exposure is not None and exposure.alive:
        length = "for good" if exposure.forever else "while that lives"
        reasons.append(f"exposed on {exposure.device.name} by {exposure.why}, {length}")
    replicas = list(block.replicas.values())
    pinned_on = [replica.device.name for replica in replicas if replica.pins]
    if pinned_on:
        reasons.append(f"pinned on {', '.join(pinned_on)} by an operator that runs")
    return "; ".join(reasons)


def _dearest(manager: Any, blocks: list[Block]) -> list[str]:
    """The blocks for which most was copied; where nothing was, the largest."""
    costs = manager.residency.books.counts.costs.by_block
    none = BlockCost(0, 0)

    def order(block: Block) -> tuple[int, int]:
        return -costs.get(block.block_id, none).fetched_nbytes, -block.nbytes

    ordered = sorted(blocks, key=order)
    total = format_nbytes(sum(block.nbytes for block in ordered))
    head = (
        f"blocks: {len(ordered)}, {total}; those fetched most, how often, what evicted them:"
        if ordered
        else "blocks: none"
    )
    named = manager.names.last_of_block
    return [head, *_rows(ordered, BLOCK_ROWS, lambda block: _block_row(block, costs, named))]


def _block_row(block: Block, costs: dict[int, BlockCost], named: Callable[[int], str]) -> str:
    where = ", ".join(
        f"{replica.device.name} {replica.state.value}" for replica in block.readable_replicas()
    )
    name = shortened(named(block.block_id), NAME)
    row = f"  {block.name:>6} {format_nbytes(block.nbytes):>11}  {name:{NAME}} "
    cost = costs.get(block.block_id)
    if cost is None or not cost.fetched_nbytes:
        return f"{row}{where}"[:LINE]
    why = cost.why.partition(": ")[2] or cost.why
    parts = f"{cost.parts_nbytes / max(cost.nbytes, 1):.1f}x in parts" if cost.parts_nbytes else ""
    times = f"{cost.fetch_count}x" if cost.fetch_count or not parts else ""
    return (row + ", ".join(filter(None, (times, parts, why))))[:LINE]


def shortened(name: str, most: int) -> str:
    """Shorten a name in its middle: which layer it is of stands before that.

    The class of its model, where that is in front, gives way first: `Qw..#2:layers.0.weight`.
    """
    if len(name) <= most:
        return name
    model, colon, rest = name.rpartition(":")
    if colon:
        kind, mark, number = model.partition("#")
        model = f"{kind[:2]}..{mark}{number}:"
        rest = rest.removeprefix("model.")
        return model + shortened(rest, max(most - len(model), 20))
    end = max(most * 2 // 5, len("q_proj.weight"))
    return f"{name[: most - end - 2]}..{name[-end:]}"


def _rows(items: list[Any], count: int, row: Callable[[Any], str]) -> list[str]:
    """One line each for the first `count` items, and one that counts the others."""
    lines = [row(item) for item in items[:count]]
    if len(items) > count:
        lines.append(f"  ... and {len(items) - count} more")
    return lines
