"""The least time that a step can take under a cap (THEORY 3.1, PEERS d.1).

No step is faster than its arithmetic and its reading of device memory, and that is what the same
program takes when everything is resident: measured, by the reference. And none is faster than the
copies of the weights for which there is no room: of what a sweep reads, at most the cap less what
the program's other tensors take can be there when the sweep begins. Both go on at once at best.

What the other tensors take can be read in two ways. `bound` counts their peak during a step as
always taken, as PEERS d.1 does: an activation that lives for a moment counts like a weight that
could have stayed, so a strategy that uses such moments can come out a little above 100 %. `floor`
counts only what is there when a step begins, caches and optimizer state: nobody is faster.
"""

from __future__ import annotations

from typing import NamedTuple


class Needs(NamedTuple):
    """What a workload needs whatever the cap.

    Attributes
    ----------
    read_nbytes : int
        Weights that a sweep reads.
    passes : int
        Sweeps per step.
    other_nbytes : int
        Everything else: activations, caches, adapters, optimizer state.
    compute_s : float
        A step with everything resident.
    """

    read_nbytes: int
    passes: int
    other_nbytes: int
    compute_s: float


class Bound(NamedTuple):
    """The least time of a step, and what it is made of."""

    seconds: float
    streamed_nbytes: int
    streaming_s: float


def bound(needs: Needs, cap_nbytes: int, h2d_bytes_per_s: float) -> Bound:
    """Return the least time of a step.

    Examples
    --------
    14 GB of weights, 7 GB of room of which 1 GB is needed for other things, 50 GB/s:

    >>> bound(Needs(14 * 10**9, 1, 10**9, 0.010), 7 * 10**9, 50e9)
    Bound(seconds=0.16, streamed_nbytes=8000000000, streaming_s=0.16)
    """
    room_nbytes = max(0, cap_nbytes - needs.other_nbytes)
    streamed_nbytes = needs.passes * max(0, needs.read_nbytes - room_nbytes)
    streaming_s = streamed_nbytes / h2d_bytes_per_s
    return Bound(max(streaming_s, needs.compute_s), streamed_nbytes, streaming_s)


def roofline_s(
    read_nbytes: int, passes: int, tokens: int, memory_bytes_per_s: float, flops_per_s: float
) -> float:
    """The least arithmetic and reading of a step, where no all-resident run fits the device.

    Two operations per weight (of two bytes) and token, as THEORY 3.1 has it.
    """
    return passes * max(read_nbytes / memory_bytes_per_s, read_nbytes * tokens / flops_per_s)
