"""Where an operator that lacks an operand runs: the strategy decides, from what each place offers.

An offer says when the operands could be there and how long the operator takes there. At home that
is when what it reads of the accelerator's has come back; on the accelerator, when the link is
through with what is queued and with what is missing. Only operators that lack an operand are asked
about: what has all of them there runs where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base.units import format_nbytes, format_ns
from ..devices.base import Clocks, Device
from ..strategy import MissingBlock, Offer, OpSnapshot
from .block import Block
from .leases import struct_of
from .op_times import OpCost, OpKey
from .residency import Residency
from .states import FILLING

#: From the end of an operator to the start of the next one that needs its result on another device:
#: the host has to see the one, or to issue the other (THEORY.md, 3.1: 30 to 60 us there and back).
HAND_OVER_NS = 20_000
#: What the host is taken to read and to compute as long as nobody has measured it: little, so that
#: no more than a first try is lost.
LEAST_BYTES_PER_S = 8e9
LEAST_FLOPS_PER_S = 50e9


class Call(NamedTuple):
    """One call of an operator, as far as its place depends on it."""

    name: str
    #: What strategies know its uses by (`OpPlan.kind`).
    kind: int
    cost: OpCost
    #: It writes no operand and draws no random numbers: where it runs changes its time, no more.
    is_movable: bool
    #: What its results took the last time.
    result_nbytes: int


class Answer(NamedTuple):
    """Where it runs, and whether that is at home because the strategy wants it."""

    device: Device
    is_at_home: bool


def choose(
    residency: Residency, call: Call, blocks: Sequence[Block], accelerator: Device
) -> Answer:
    """Ask the strategy where an operator runs, if one of its operands is missing.

    Parameters
    ----------
    call : Call
        The operator.
    blocks : sequence of Block
        Its distinct operands.
    accelerator : Device
        Where it runs otherwise.

    Returns
    -------
    Answer
        What the strategy wants; it is noted in the stories of the blocks that need not move.
    """
    books = residency.books
    with books.lock:
        # What another accelerator has ready is an activation, and crosses wherever this one runs.
        missing = [b for b in blocks if b.ready is None and not b.readable_on(accelerator)]
        if not missing:
            return Answer(accelerator, is_at_home=False)
        snapshot = _snapshot(residency, call, blocks, missing, accelerator)
    device = residency.feed.place(snapshot, accelerator)
    if not device.is_host or accelerator.is_host:
        return Answer(device, is_at_home=False)
    saved_ns = snapshot.offer(accelerator.name).end_ns - snapshot.offer(device.name).end_ns
    counts = books.counts
    counts.at_home_count += 1
    counts.at_home_saved_ns += max(saved_ns, 0)
    counts.at_home_nbytes += snapshot.missing_nbytes
    for block in missing:
        how = f"{format_ns(max(saved_ns, 0))} sooner than by fetching {format_nbytes(block.nbytes)}"
        books.log.note(block.name, f"used at home by {call.name}", how)
    return Answer(device, is_at_home=True)


def _snapshot(
    residency: Residency,
    call: Call,
    blocks: Sequence[Block],
    missing: Sequence[Block],
    accelerator: Device,
) -> OpSnapshot:
    """Describe an operator and what each place offers (lock of the books held)."""
    clocks, now_ns = accelerator.clocks(), accelerator.now_ns()
    return OpSnapshot(
        name=call.name,
        operand_nbytes=sum(block.nbytes for block in blocks),
        missing_nbytes=sum(block.nbytes for block in missing),
        flops=call.cost.flops,
        default_device=accelerator.name,
        is_movable=call.is_movable and not residency.times.is_refused(call.kind, call.cost.dtype),
        is_pressed=residency.books.is_pressed,
        missing=tuple(
            MissingBlock(
                block.block_id,
                block.nbytes,
                struct_of(call.kind, block.nbytes),
                block.is_persistent,
                int(block.nbytes / clocks.h2d_bytes_per_s * 1e9),
                _is_coming(block, accelerator),
            )
            for block in missing
        ),
        offers=(
            _offer_of_accelerator(residency, call, missing, accelerator, clocks, now_ns),
            _offer_of_host(residency, call, blocks, clocks, now_ns),
        ),
    )


def _is_coming(block: Block, accelerator: Device) -> bool:
    replica = block.replicas.get(accelerator)
    return replica is not None and replica.state is FILLING


def _offer_of_accelerator(
    residency: Residency,
    call: Call,
    missing: Sequence[Block],
    accelerator: Device,
    clocks: Clocks,
    now_ns: int,
) -> Offer:
    there_ns = max(now_ns, clocks.compute_free_ns)
    link_ns = max(now_ns, clocks.link_free_ns)
    for block in missing:
        replica = block.replicas.get(accelerator)
        if replica is not None and replica.state is FILLING:
            arrival_ns = now_ns if replica.arrival is None else replica.arrival.end_ns
        else:
            link_ns += int(block.nbytes / clocks.h2d_bytes_per_s * 1e9)
            arrival_ns = link_ns
        there_ns = max(there_ns, arrival_ns)
    key = OpKey.of(call.kind, call.cost, accelerator)
    run_ns = residency.times.expected_ns(key, call.cost.nbytes)
    return Offer(accelerator.name, there_ns, run_ns or 0, 0, run_ns is not None)


def _offer_of_host(
    residency: Residency, call: Call, blocks: Sequence[Block], clocks: Clocks, now_ns: int
) -> Offer:
    host = residency.books.host
    there_ns = now_ns
    leaves_ns = max(now_ns, clocks.compute_free_ns, clocks.d2h_free_ns)
    for block in blocks:
        if block.readable_on(host) is not None:
            continue
        home = block.replicas.get(host)
        if home is not None and home.state is FILLING and home.arrival is not None:
            there_ns = max(there_ns, home.arrival.end_ns)
        else:
            leaves_ns += int(block.nbytes / clocks.d2h_bytes_per_s * 1e9)
            there_ns = max(there_ns, leaves_ns + HAND_OVER_NS)
    cost = call.cost
    run_ns = residency.times.expected_ns(OpKey.of(call.kind, cost, host), cost.nbytes)
    is_learned = run_ns is not None
    if run_ns is None:
        moved_s = cost.nbytes / (clocks.host_bytes_per_s or LEAST_BYTES_PER_S)
        worked_s = cost.flops / (clocks.host_flops_per_s or LEAST_FLOPS_PER_S)
        run_ns = int(max(moved_s, worked_s) * 1e9)
    back_ns = HAND_OVER_NS + int(call.result_nbytes / clocks.h2d_bytes_per_s * 1e9)
    is_here = all(block.readable_on(host) is not None for block in blocks)
    return Offer(host.name, there_ns, run_ns, back_ns, is_learned, is_here)
