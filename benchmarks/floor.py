"""What a program needs at the least on a device: from the program and the device's data sheet.

The program is run once on plain tensors under a dispatch mode that writes down which parameters
each operator reads and what it costs by the roofline. None of it comes from a run of ours.

The floor of time: no run is faster than its operators one after the other, nor than the copies of
the bytes that have to be moved, and those are at least what the optimal policy (MIN: evict what is
used again last) moves. At any operator both hold at once: what MIN has moved so far had to be
copied, and the operators from there on have still to run. The largest such sum is the floor; for
one step of a loop it is max(S / link, compute), and for a cold start the weights come first.

Activations, caches and gradients take room as weights do (THEORY 3.1: B is what the budget leaves
to the weights), so the policy in the floor has them in its trace: a result comes for nothing, takes
room while it is used again, and has to be copied like any other if it was evicted meanwhile. The
bytes that the table compares with (`bytes_over_min`) are those of the parameters and of what lives
as long as they do, with the whole budget for them.

A program whose phases are bound in turn by the link and by compute (an optimizer after four
passes) cannot overlap them further than the budget reaches: of what a stretch of the program uses,
no more than a budget can be there when it begins. So a stretch takes as long as its operators, and
as long as the copies of what it uses less one budget; stretches that do not overlap add up.

Likewise for what it makes (THEORY 3.1: gradients, moments and updated weights leave the device): of
what a stretch writes and the program reads after it, no more than a budget can still be there when
it ends, and the rest has been copied home after it was written, so within the stretch. Where the
device's link is duplex both directions work at once, otherwise they add up; either way all of it
passes the host's memory. The floor is the larger of the two bounds.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchTensorRef.operators.costs import flop_rule, touched_nbytes
from torchTensorRef.operators.plan import plan_of

#: Places in the program between which stretches are looked for.
STRETCH_EDGES = 150

#: Operators that read nothing of what they write.
OVERWRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}

#: Operators after which a storage still in use counts as one that stays (optimizer state).
LONG_LIFE = 400


@dataclass
class Life:
    """One storage of the program: its size, and the operators that met it."""

    nbytes: int
    first: int
    last: int
    #: There before the program ran: has to be copied to the device before its first use.
    is_given: bool


class Recorder(TorchDispatchMode):
    """Writes down which storages a plain run meets, and what its operators take by the roofline."""

    def __init__(self, spec: Any, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.spec = spec
        self.lives: list[Life] = []
        self.trace: list[tuple[int, ...]] = []
        #: Storages that each operator writes, and the last operator that reads each.
        self.writes: list[tuple[int, ...]] = []
        self.last_read: dict[int, int] = {}
        self.took_ns: list[float] = []
        self.flops = 0
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in given:
            self._number(tensor, is_given=True)

    def _number(self, tensor: torch.Tensor, *, is_given: bool = False) -> int:
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage._cdata)
        if known is None or known[0].expired():
            # The weak reference keeps the address from being used again while it is in the table.
            number = len(self.lives)
            self._numbers[storage._cdata] = (StorageWeakRef(storage), number)
            self.lives.append(Life(storage.nbytes(), len(self.trace), len(self.trace), is_given))
            return number
        self.lives[known[1]].last = len(self.trace)
        return known[1]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        plan = plan_of(op)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if plan.is_true_view or not operands:
            return out
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        gathered = args[0] if plan.gathers_rows else None
        met = [x for x in (*operands, *results) if x is not gathered and x.numel()]
        self.trace.append(tuple(dict.fromkeys(self._number(x) for x in met)))
        self._note_writes(op, operands, results)
        flops = flop_rule(plan)(args, kwargs, out)
        speed = self.spec.flops_per_s.get("float32", self.spec.default_flops_per_s)
        move_ns = sum(touched_nbytes(x) for x in met) / self.spec.memory_bytes_per_s * 1e9
        took_ns = self.spec.launch_ns + max(flops / speed * 1e9, move_ns)
        self.took_ns.append(took_ns)
        self.flops += flops
        return out

    def _note_writes(
        self, op: Any, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Note what an operator writes: its results, which are its operands where it is in place.

        Writes that are declared and not returned go unnoticed, which lowers the floor.
        """
        position = len(self.trace) - 1
        only_written = operands[:1] if op in OVERWRITES else ()
        for operand in operands[len(only_written) :]:
            self.last_read[self._number(operand)] = position
        self.writes.append(tuple(dict.fromkeys(self._number(x) for x in results if x.numel())))

    def stays(self, number: int) -> bool:
        """Whether a storage is a parameter, or lives as long as one."""
        life = self.lives[number]
        return life.is_given or life.last - life.first > LONG_LIFE

    def passing_nbytes(self) -> int:
        """The most bytes that results and caches take at once, beside what stays."""
        change: dict[int, int] = defaultdict(int)
        for number, life in enumerate(self.lives):
            if not self.stays(number):
                change[life.first] += life.nbytes
                change[life.last + 1] -= life.nbytes
        held = most = 0
        for position in sorted(change):
            held += change[position]
            most = max(most, held)
        return most

    def floor_ns(self, budget_nbytes: int) -> float:
        """The least time for the whole program, from an empty device; see above."""
        left_ns = sum(self.took_ns)
        floor_ns = 0.0
        moved = self._moved_so_far(budget_nbytes, self.trace)
        for nbytes, took_ns in zip(moved, self.took_ns, strict=True):
            floor_ns = max(floor_ns, nbytes / self.spec.h2d_bytes_per_s * 1e9 + left_ns)
            left_ns -= took_ns
        return max(floor_ns, self._stretches_ns(budget_nbytes))

    def _stretches_ns(self, budget_nbytes: int) -> float:
        """The largest sum, over stretches one after another, of what each takes at the least."""
        step = max(1, len(self.trace) // STRETCH_EDGES)
        edges = [*range(0, len(self.trace), step), len(self.trace)]
        #: The first edge at which a storage is read no more.
        done_at = {n: bisect.bisect_right(edges, read) for n, read in self.last_read.items()}
        least_ns = [0.0] * len(edges)  # from the edge to the end
        for first in range(len(edges) - 2, -1, -1):
            used: set[int] = set()
            used_nbytes, took_ns = 0, 0.0
            there_nbytes = budget_nbytes if first else 0  # nothing is there when it all begins
            written: set[int] = set()
            left_nbytes, done = 0, defaultdict[int, int](int)
            for last in range(first, len(edges) - 1):
                for position in range(edges[last], edges[last + 1]):
                    for number in self.writes[position]:
                        if number not in written and done_at.get(number, 0) > last + 1:
                            left_nbytes += self.lives[number].nbytes
                            done[done_at[number]] += self.lives[number].nbytes
                            written.add(number)
                    took_ns += self.took_ns[position]
                    for number in self.trace[position]:
                        life = self.lives[number]
                        if number not in used and (life.is_given or life.first < edges[first]):
                            used_nbytes += life.nbytes
                        used.add(number)
                left_nbytes -= done.pop(last + 1, 0)
                in_nbytes = max(0, used_nbytes - there_nbytes)
                out_nbytes = max(0, left_nbytes - budget_nbytes)
                copied_ns = self._copies_ns(in_nbytes, out_nbytes)
                stretch_ns = max(took_ns, copied_ns) + least_ns[last + 1]
                least_ns[first] = max(least_ns[first], stretch_ns)
        return least_ns[0]

    def _copies_ns(self, in_nbytes: int, out_nbytes: int) -> float:
        """The least time in which so much can be copied to the device and from it."""
        spec = self.spec
        in_s, out_s = in_nbytes / spec.h2d_bytes_per_s, out_nbytes / spec.d2h_bytes_per_s
        link_s = max(in_s, out_s) if spec.duplex else in_s + out_s
        return max(link_s, (in_nbytes + out_nbytes) / spec.host_memory_bytes_per_s) * 1e9

    def min_nbytes(self, budget_nbytes: int) -> int:
        """Bytes that MIN copies to the device for the whole program."""
        return self.min_nbytes_so_far(budget_nbytes)[-1]

    def min_nbytes_so_far(self, budget_nbytes: int) -> list[int]:
        """Bytes that MIN has copied to the device before each operator, for what stays."""
        trace = [tuple(n for n in bundle if self.stays(n)) for bundle in self.trace]
        return self._moved_so_far(budget_nbytes, trace)

    def _moved_so_far(self, budget_nbytes: int, trace: list[tuple[int, ...]]) -> list[int]:
        """Bytes that MIN has copied to the device before each operator of a trace.

        An operator's operands must be there together; evicted is what is used again last. Blocks
        are small against the budget, so that this greedy choice is the optimum up to one block
        (THEORY 1.2). What the program makes itself has its first use for nothing.
        """
        uses: dict[int, list[int]] = defaultdict(list)
        for position, bundle in enumerate(trace):
            for number in bundle:
                uses[number].append(position)
        held: dict[int, float] = {}
        held_nbytes = moved_nbytes = 0
        so_far = []
        for position, bundle in enumerate(trace):
            for number in bundle:
                life = self.lives[number]
                if number not in held:
                    if life.is_given or uses[number][0] != position:
                        moved_nbytes += life.nbytes
                    held_nbytes += life.nbytes
                later = bisect.bisect_right(uses[number], position)
                held[number] = uses[number][later] if later < len(uses[number]) else float("inf")
            while held_nbytes > budget_nbytes:
                victims = [number for number in held if number not in bundle]
                if not victims:
                    break
                victim = max(victims, key=held.__getitem__)
                held_nbytes -= self.lives[victim].nbytes
                del held[victim]
            so_far.append(moved_nbytes)
        return so_far
