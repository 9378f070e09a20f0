"""What `tensorsManager.stats()` gives: plain numbers of what has happened since they were reset."""

from __future__ import annotations

from typing import Any

from .advice import advice_of
from .device_times import as_numbers, bound_of_run, busiest, times_by_device
from .report import BLOCK_ROWS, kept_of, living_blocks, together


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
        first = manager._first_times
        times = {d: now.since(first.get(d)) for d, now in times_by_device(books).items()}
        stats = {
            "strategy": residency.feed.strategy.name,
            "device": ",".join(device.name for device in books.accelerators) or main.name,
            "budget_nbytes": ledger.limit_nbytes if ledger else main.capacity_nbytes,
            "resident_nbytes": main.resident_nbytes if ledger else 0,
            "peak_resident_nbytes": main.peak_nbytes if ledger else 0,
            "page_locked_nbytes": main.page_locked_nbytes,
            "staged_nbytes": main.staged_nbytes,
            "fetched_nbytes": copies.fetched_nbytes,
            "prefetched_nbytes": copies.prefetched_nbytes,
            "peer_nbytes": copies.peer_nbytes,
            "written_back_nbytes": copies.written_back_nbytes,
            "peeked_nbytes": sum(copies.peeked_from.values()),
            "peek_count": copies.peek_count,
            "alloc_retry_count": main.release_count() - manager._first_release_count,
            "dropped_nbytes": counts.dropped_nbytes,
            "fetch_count": copies.fetch_count + copies.prefetch_count,
            "evict_count": counts.evict_count,
            "slow_hit_count": counts.slow_hit_count,
            "miss_count": counts.miss_count,
            "op_count": op_count,
            "ready_op_count": max(op_count - counts.slow_op_count - counts.native_op_count, 0),
            "slow_op_count": counts.slow_op_count,
            "host_op_count": counts.host_op_count,
            "at_home_count": counts.at_home_count,
            "at_home_nbytes": counts.at_home_nbytes,
            "at_home_saved_ns": counts.at_home_saved_ns,
            "native_call_count": counts.native_call_count,
            "native_op_count": counts.native_op_count,
            "native_share": counts.native_op_count / max(op_count, 1),
            "host_fallback_count": sum(counts.host_fallbacks.values()),
            "host_fallback_reasons": dict(counts.host_fallbacks),
            "host_fallback_operators": dict(counts.host_fallback_operators),
            "out_of_budget_count": counts.out_of_budget_count,
            "blocked_op_count": counts.blocked_op_count,
            "blocked_tile_count": counts.blocked_tile_count,
            "reordered_op_count": counts.reordered_op_count,
            "blocked_operators": dict(counts.blocked_operators),
            "parts_op_count": counts.parts_op_count,
            "thrash_count": counts.costs.thrash_count,
            "thrash_nbytes": counts.costs.thrash_nbytes,
            "evicted_nbytes_by_cause": dict(counts.costs.evicted_nbytes),
            "largest_op": counts.costs.largest_op,
            "largest_op_nbytes": counts.costs.largest_op_nbytes,
            **as_numbers(times),
            "busiest": busiest(times).name,
            "by_device": {
                device.name: {
                    "compute_ns": one.compute_ns,
                    "stall_ns": one.stall_ns,
                    "host_stall_ns": one.host_stall_ns,
                    "fetched_nbytes": copies.nbytes_to.get(device.name, 0),
                    "written_back_nbytes": copies.nbytes_from.get(device.name, 0),
                    "peeked_nbytes": copies.peeked_from.get(device.name, 0),
                }
                for device, one in times.items()
            },
        }
        return {**stats, **_judged(manager, stats)}


def _judged(manager: Any, stats: dict[str, Any]) -> dict[str, Any]:
    """What a report says beside the counts: what is needed, what bounds, what would help."""
    books = manager.residency.books
    costs = books.counts.costs
    kept = kept_of(manager, living_blocks(manager))
    bound = bound_of_run(books, stats)
    stats = {**together(manager, stats), "bound_by": bound.by}
    return {
        "weights_nbytes": kept.nbytes - kept.state_nbytes,
        "optimizer_nbytes": kept.state_nbytes,
        "bound_by": bound.by,
        "times_floor": bound.times_floor,
        "advice": advice_of(stats, costs, kept),
        "dearest_blocks": [
            {
                "name": manager.names.of_block(cost.block_id),
                "nbytes": cost.nbytes,
                "fetch_count": cost.fetch_count,
                "parts_nbytes": cost.parts_nbytes,
                "evict_count": cost.evict_count,
                "evicted_for": cost.why,
            }
            for cost in costs.dearest(BLOCK_ROWS)
            if cost.fetched_nbytes
        ],
    }
