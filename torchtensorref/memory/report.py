"""What `tensorsManager.report()` says: one screen of what is held and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..base.units import format_nbytes, format_ns
from .block import Block
from .ref import TensorRef

#: Rows of each list; what is left out is counted, so that a report fits a screen.
BLOCK_ROWS = 5
HELD_ROWS = 5
REASON_ROWS = 4


def report_text(manager: Any) -> str:
    """Describe what is resident, what is held by whom, and what has been moved and why.

    Parameters
    ----------
    manager : TensorsManager
        Whose books are read.

    Returns
    -------
    str
        At most about 30 lines of at most 100 characters.

    Notes
    -----
    Looking moves nothing and counts as no use.
    """
    stats = manager.stats()
    residency = manager.residency
    with residency.books.lock:
        ours = {residency.books.host, *residency.books.accelerators}
        blocks = [block for block in living_blocks(manager) if ours.issuperset(block.replicas)]
        lines = [*_totals(stats), *_fallbacks(stats), *_held(blocks)]
        lines += _largest(blocks, residency.books.tick)
    return "\n".join(lines)


def stats_of(manager: Any) -> dict[str, Any]:
    """Count what has happened since the counts were last reset, as plain numbers."""
    residency = manager.residency
    with residency.books.lock:
        residency.books.bury()
        books = residency.books
        main = books.main
        ledger = books.ledgers.get(main)
        counts, copies = books.counts, residency.copier.transfer.counts
        op_count = max(books.tick - manager._first_tick, 0)
        return {
            "strategy": residency.feed.strategy.name,
            "device": main.name,
            "budget_nbytes": ledger.limit_nbytes if ledger else main.capacity_nbytes,
            "resident_nbytes": main.resident_nbytes if ledger else 0,
            "peak_resident_nbytes": main.peak_nbytes if ledger else 0,
            "page_locked_nbytes": main.page_locked_nbytes,
            "fetched_nbytes": copies.fetched_nbytes,
            "prefetched_nbytes": copies.prefetched_nbytes,
            "written_back_nbytes": copies.written_back_nbytes,
            "dropped_nbytes": counts.dropped_nbytes,
            "fetch_count": copies.fetch_count + copies.prefetch_count,
            "evict_count": counts.evict_count,
            "slow_hit_count": counts.slow_hit_count,
            "miss_count": counts.miss_count,
            "op_count": op_count,
            "ready_op_count": max(op_count - counts.slow_op_count - counts.native_op_count, 0),
            "slow_op_count": counts.slow_op_count,
            "host_op_count": counts.host_op_count,
            "native_op_region_count": manager.native.native_count,
            "native_op_count": counts.native_op_count,
            "native_share": counts.native_op_count / max(op_count, 1),
            "host_fallback_count": sum(counts.host_fallbacks.values()),
            "host_fallback_reasons": dict(counts.host_fallbacks),
            "stall_ns": main.stall_ns - manager._first_stall_ns,
            "time_ns": manager._reached_ns() - manager._first_ns,
        }


def block_of(value: Any, asked: str) -> Block:
    """Return the block of a TensorRef; a TypeError that says what else it is, and what to do.

    Parameters
    ----------
    value : TensorRef
        What somebody wants to be told of.
    asked : str
        The method that was asked.
    """
    if type(value) is TensorRef:
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


def living_blocks(manager: Any) -> list[Block]:
    """Find the blocks that operators have used, that were adopted, or that are on an accelerator.

    Notes
    -----
    Not by asking the garbage collector for everything: it also gives what other threads are just
    making, which such a look can spoil (CPython then raises in that thread).
    """
    residency = manager.residency
    found = [reference() for reference in residency.books.known.valuerefs()]
    found += manager.ownership.table.blocks()
    for device in residency.books.ledgers:
        found += residency.books.blocks_on(device)
    return [block for block in dict.fromkeys(found) if block is not None]


def _totals(stats: dict[str, Any]) -> list[str]:
    size = {name: format_nbytes(n) for name, n in stats.items() if name.endswith("_nbytes")}
    on_host_count = stats["host_op_count"] + stats["host_fallback_count"]
    return [
        f"torchTensorRef: {stats['strategy']} on {stats['device']}",
        f"  resident   {size['resident_nbytes']} of {size['budget_nbytes']}, "
        f"peak {size['peak_resident_nbytes']}",
        f"  operators  {stats['op_count']} (views not counted): {stats['ready_op_count']} ready, "
        f"{stats['slow_op_count']} slow, {stats['native_op_count']} in "
        f"{stats['native_op_region_count']} native calls",
        f"  on host    {on_host_count} of the slow ones",
        f"  operands   {stats['miss_count']} misses; {stats['slow_hit_count']} hits on the slow "
        "path (on the ready path each is one)",
        f"  fetched    {size['fetched_nbytes']} on demand, {size['prefetched_nbytes']} ahead, "
        f"in {stats['fetch_count']} copies",
        f"  evicted    {stats['evict_count']} replicas: {size['dropped_nbytes']} given back, "
        f"{size['written_back_nbytes']} written back",
        f"  stalls     {format_ns(stats['stall_ns'])} of {format_ns(stats['time_ns'])}",
    ]


def _fallbacks(stats: dict[str, Any]) -> list[str]:
    reasons = sorted(stats["host_fallback_reasons"].items(), key=lambda row: -row[1])
    lines = [f"host fallbacks: {stats['host_fallback_count'] or 'none'}"]
    return lines + _rows(reasons, REASON_ROWS, lambda row: f"{row[1]:>6}  {row[0]}")


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
    pinned_on = [replica.device.name for replica in block.replicas.values() if replica.pins]
    if pinned_on:
        reasons.append(f"pinned on {', '.join(pinned_on)} by an operator that runs")
    return "; ".join(reasons)


def _largest(blocks: Iterable[Block], tick: int) -> list[str]:
    ordered = sorted(blocks, key=lambda block: -block.nbytes)
    total = format_nbytes(sum(block.nbytes for block in ordered))
    lines = [f"blocks: {len(ordered)}, {total}; the largest:" if ordered else "blocks: none"]
    return lines + _rows(ordered, BLOCK_ROWS, lambda block: _block_row(block, tick))


def _block_row(block: Block, tick: int) -> str:
    where = ", ".join(
        f"{replica.device.name} {replica.state.value}" for replica in block.readable_replicas()
    )
    used = f"last used by operator {block.last_use} of {tick}" if block.last_use else "not used yet"
    return f"  {block.name:>6} {format_nbytes(block.nbytes):>12}  {where:26} {used}"


def _rows(items: list[Any], count: int, row: Callable[[Any], str]) -> list[str]:
    """One line each for the first `count` items, and one that counts the others."""
    lines = [row(item) for item in items[:count]]
    if len(items) > count:
        lines.append(f"  ... and {len(items) - count} more")
    return lines
