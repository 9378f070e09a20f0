"""What the blocks of a recorded program are: weights, inputs, caches, activations."""

from __future__ import annotations

from .record import Record


def kinds_of(record: Record) -> dict[int, str]:
    """Say of each block what it is.

    Parameters
    ----------
    record : Record
        A program that has ended.

    Returns
    -------
    dict of int to str
        By the number of the block: "weights", "inputs", "activations", or "cache" for what is made
        in one part of the program and read in another, or said to be kept for one.
    """
    kinds: dict[int, str] = {}
    made_in: dict[int, int] = {}
    for part, (_, indices) in enumerate(record.step_ranges()):
        for index in indices:
            op = record.ops[index]
            made_in |= dict.fromkeys(op.births, part)
            kinds |= {n: "cache" for n in op.reads if made_in.get(n, part) != part}
    # What the last part makes of a cache, and keeps, is for one that would follow.
    dead = {number for op in record.ops[:-1] for number in op.deaths}
    for op in record.ops:
        if any(kinds.get(number) == "cache" for number in op.reads):
            kinds |= dict.fromkeys(set(op.births) - dead, "cache")
    for number, block in record.blocks.items():
        if block.is_persistent:
            kinds[number] = "weights"
        elif block.is_kept:
            kinds[number] = "cache"
        elif number not in kinds:
            kinds[number] = "activations" if number in made_in else "inputs"
    return kinds


def most_alive(record: Record, kinds: dict[int, str]) -> dict[str, int]:
    """Return the bytes alive by kind, at the operator when they are most."""
    blocks = record.blocks
    alive: dict[int, int] = {}
    found: dict[str, int] = {}
    total = most = 0
    sums: dict[str, int] = {}
    held: dict[str, int]
    for op in record.ops:
        if op.part_count:  # as one it takes so much more in passing
            held = {**sums, "kernels": op.peak_nbytes}
            for number in {*op.reads, *op.births} - alive.keys():
                held[kinds[number]] = held.get(kinds[number], 0) + blocks[number].nbytes
            if sum(held.values()) > most:
                most, found = sum(held.values()), held
            continue
        for number in (*op.reads, *op.births):
            if number not in alive:
                alive[number] = blocks[number].nbytes
                total += alive[number]
                kind = kinds[number]
                sums[kind] = sums.get(kind, 0) + alive[number]
        if total > most:
            most, found = total, dict(sums)
        for number in op.deaths:
            nbytes = alive.pop(number, 0)
            total -= nbytes
            sums[kinds[number]] = sums.get(kinds[number], 0) - nbytes
    return found
