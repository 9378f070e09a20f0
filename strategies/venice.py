"""Spread a model over several accelerators: each block lives where it is used.

Weights are dealt out in the order in which the program first uses them, so that each accelerator
has a stretch of the program and activations cross once per boundary. The accelerator with the
largest budget comes first: what fits there stays there. What the budgets do not hold together is
dealt out so that all links are through with their share of it at the same time: with `T = (S - sum
of budgets) / (sum of links)` accelerator d gets `budget_d + T * link_d` bytes (THEORY.md, R6).
Operators run where their weights live, others where most of their operands are. On each
accelerator `Flow` decides what to keep and what to fetch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile

from ..strategy import (
    Access,
    Birth,
    BlockSnapshot,
    Death,
    DeviceSnapshot,
    OperandSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
)
from .dealing import WEIGHTS_SHARE, moves_to_even_out, rounds_of, shares_of
from .flow import Flow
from .flow.home_trial import HomeTrial

#: An accelerator takes blocks again when what lives there takes less than this of its budget.
GONE_SHARE = 0.5
#: What was fetched ahead and is not used yet comes to no more than this share of what is missing.
AHEAD_SHARE = 1 / 4
#: What was dealt out is evened out by blocks of at least this share of the smallest budget.
EVEN_SHARE = 1 / 128
#: ... and again, as caches grow, by blocks of at least this share: each that moves costs time.
GROWN_SHARE = 1 / 32
#: Weights up to this share of the smallest budget have no home: they go where they are needed.
TINY_SHARE = 1 / 4096
#: Budgets that follow what others take of a device change by this share before blocks move.
LIMIT_TOLERANCE = 0.05


class Venice(Strategy):
    """Deal weights out to all accelerators; follow the flow of each.

    Parameters
    ----------
    make_flow : callable, optional
        Makes what decides for one accelerator, and hears of its own alone.
    """

    name = "venice"
    watches_accesses = True
    spreads = True
    mixes_devices = True
    #: What is compiled runs on one accelerator, whatever lives elsewhere.
    allows_compiled = False

    def __init__(self, make_flow: Callable[[], Strategy] = Flow) -> None:
        self._make_flow = make_flow
        self._flows: dict[str, Strategy] = {}
        self._nbytes: dict[int, int] = {}  # of what lasts, in the order of its first use
        self._home: dict[int, str] = {}  # of what lasts: the accelerator where it lives
        self._dealt: dict[str, int] = {}  # bytes that live on each
        self._used_on: dict[int, str] = {}  # where a block was made or used last
        #: Bytes of what lasts and is made anew each time, as caches that grow are.
        self._made_anew: dict[int, int] = {}
        self._last = ""  # where the last operator ran
        self._limits: dict[str, int] = {}  # the budgets for which blocks were dealt out
        self._filled: set[str] = set()  # accelerators that take no more
        self._ordered: list[DeviceSnapshot] = []  # those that have them, as they were then
        self._is_in_rounds = False  # each has stretches of the program, by turns
        self._is_over = False  # more lives on the last accelerator than its share
        self._is_known = False  # ... and the program begins anew: all of it is known
        self._labels: set[str] = set()
        self._trial = HomeTrial()
        self._begins = False  # the program has begun anew, and nobody has looked at the clock
        self._ahead: dict[int, tuple[str, int]] = {}  # fetched ahead, not used yet: where, bytes
        self._ahead_nbytes: dict[str, int] = {}  # of them, by accelerator
        self._ahead_limits: dict[str, float] = {}  # so much may be

    # -- where operators run ---------------------------------------------------------------------

    def place(self, op: OpSnapshot) -> str:
        """Return the accelerator where the operator's weights live, or most of its operands are.

        Asked again about one that lacks an operand there, return the host where the flow of that
        accelerator finds that it ends sooner.
        """
        if not op.accelerators:
            return self._flow(op.default_device).place(op)
        self._look_at(op.accelerators)
        device = self._labelled(op.label) or self._of_weights(op) or _of_most(op, self._last)
        self._last = device or op.default_device
        return self._last

    def _labelled(self, label: str) -> str:
        """Obey what the program says, once it has named more than one accelerator."""
        if label:
            self._labels.add(label)
        return label if len(self._labels) > 1 else ""

    def _of_weights(self, op: OpSnapshot) -> str:
        least_nbytes = TINY_SHARE * min(device.limit_nbytes for device in op.accelerators)
        lasting = [
            operand
            for operand in op.operands
            if operand.is_persistent
            and operand.nbytes > least_nbytes
            and operand.block_id not in self._made_anew
        ]
        nbytes_on: dict[str, int] = {}
        for operand in lasting:
            home = self._home.get(operand.block_id) or self._settle(operand, op.accelerators)
            nbytes_on[home] = nbytes_on.get(home, 0) + operand.nbytes
        return max(nbytes_on, key=nbytes_on.__getitem__, default="")

    # -- where blocks live -----------------------------------------------------------------------

    def _look_at(self, accelerators: Sequence[DeviceSnapshot]) -> None:
        """Deal anew what other budgets, or other accelerators, were dealt for."""
        are_others = self._limits.keys() != {device.name for device in accelerators}
        if are_others or self._is_known or any(map(self._has_changed, accelerators)):
            self._limits = {device.name: device.limit_nbytes for device in accelerators}
            self._deal_again(accelerators)

    def _has_changed(self, device: DeviceSnapshot) -> bool:
        before = self._limits[device.name]
        return abs(device.limit_nbytes - before) > LIMIT_TOLERANCE * before

    def _settle(self, operand: OperandSnapshot, accelerators: Sequence[DeviceSnapshot]) -> str:
        """Choose where a block lives: where it is or was used last, or where there is room."""
        block_id, nbytes, _, devices = operand
        home = devices[0] if len(devices) == 1 else self._used_on.get(block_id, "")
        if home not in self._dealt:
            home = self._next(nbytes, accelerators)
        self._nbytes[block_id] = nbytes
        self._home[block_id] = home
        self._dealt[home] += nbytes
        return home

    def _next(self, nbytes: int, accelerators: Sequence[DeviceSnapshot]) -> str:
        """Fill one after the other: what is small does not go back to where there is a gap."""
        ordered = _largest_first(accelerators)
        for device in ordered:
            if device.name in self._filled:
                continue
            if self._dealt[device.name] + nbytes <= WEIGHTS_SHARE * device.limit_nbytes:
                return device.name
            self._filled.add(device.name)
        self._is_over = True
        return ordered[-1].name

    def _deal_again(self, accelerators: Sequence[DeviceSnapshot]) -> None:
        """Deal out all that is known; blocks move when they are used next."""
        self._is_over = self._is_known = False
        ordered = self._ordered = _largest_first(accelerators)
        self._dealt = {device.name: 0 for device in ordered}
        total_nbytes = sum(self._nbytes.values())
        shares = self.shares(ordered, total_nbytes)
        round_count = rounds_of(ordered, list(self._nbytes.values()))
        self._ahead_limits = {
            device.name: AHEAD_SHARE * max(0.0, share - WEIGHTS_SHARE * device.limit_nbytes)
            for device, share in zip(ordered, shares, strict=True)
        }
        ends = [share / round_count for share in accumulate(shares)]
        at_nbytes, at = 0.0, 0
        for block_id, nbytes in self._nbytes.items():
            middle = (at_nbytes + nbytes / 2) % ends[-1]
            at = next((n for n, end in enumerate(ends) if middle < end), len(ordered) - 1)
            self._home[block_id] = ordered[at].name
            self._dealt[ordered[at].name] += nbytes
            at_nbytes += nbytes
        self._filled = {device.name for device in ordered[:at]}
        self._is_in_rounds = round_count > 1
        self._even_out(EVEN_SHARE)

    def _even_out(self, least_share: float) -> None:
        """Move blocks from who has more than its share: its link would hold up the others."""
        if not self._is_in_rounds:
            return
        taken = dict(self._dealt)
        for block_id, nbytes in self._made_anew.items():
            if self._used_on[block_id] in taken:
                taken[self._used_on[block_id]] += nbytes
        shares = self.shares(self._ordered, sum(taken.values()))
        excess = {name: taken[name] - share for name, share in zip(taken, shares, strict=True)}
        least_nbytes = least_share * min(device.limit_nbytes for device in self._ordered)
        moves = moves_to_even_out(excess, self._home, self._nbytes, least_nbytes)
        for block_id, home in moves:
            self._dealt[self._home[block_id]] -= self._nbytes[block_id]
            self._dealt[home] += self._nbytes[block_id]
            self._home[block_id] = home

    def shares(self, accelerators: Sequence[DeviceSnapshot], total_nbytes: int) -> list[float]:
        """Return how many bytes of weights each gets: see `shares_of`."""
        return shares_of(accelerators, total_nbytes)

    @property
    def dealt_nbytes(self) -> dict[str, int]:
        """The bytes that live on each accelerator."""
        return dict(self._dealt)

    # -- told ------------------------------------------------------------------------------------

    def _flow(self, name: str) -> Strategy:
        found = self._flows.get(name)
        if found is None:
            found = self._flows[name] = self._make_flow()
        return found

    def _flow_of(self, block_id: int) -> Strategy:
        return self._flow(self._used_on.get(block_id, self._last))

    def on_access(self, access: Access) -> None:
        """Tell the flow of the accelerator that uses it."""
        if access.block_id == next(iter(self._nbytes), None):
            self._is_known |= self._is_over
            self._begins = True
        self._used_on[access.block_id] = self._last = access.device
        self._forget_ahead(access.block_id)
        self._flow(access.device).on_access(access)

    def _forget_ahead(self, block_id: int) -> None:
        if block_id in self._ahead:
            home, nbytes = self._ahead.pop(block_id)
            self._ahead_nbytes[home] -= nbytes

    def on_foretold(self, events: Sequence[Access | Birth | Death]) -> None:
        """Know in which order weights are used; which accelerator uses them is not decided yet."""
        for event in events:
            if isinstance(event, Access) and event.is_persistent:
                self._nbytes.setdefault(event.block_id, event.nbytes)
        self._limits = {}  # all of it is dealt out when the first operator comes
        self._is_in_rounds = False  # so nothing is evened out before
        self._filled.clear()

    def on_birth(self, block_id: int, nbytes: int, place: int, device: str = "") -> int:
        """Tell the flow of the accelerator that has made it."""
        self._used_on[block_id] = device
        persistent_after = self._flow(device).on_birth(block_id, nbytes, place)
        if not persistent_after:
            self._made_anew[block_id] = nbytes
        return persistent_after

    def on_evict(self, block_id: int) -> None:
        """Tell the flow of the accelerator that used it last."""
        self._forget_ahead(block_id)
        if block_id in self._used_on:
            self._flow_of(block_id).on_evict(block_id)

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        """Tell the flow that asked for it."""
        home = self._home.get(block_id, self._last)
        self._forget_ahead(block_id)  # asked for before, where it lived then
        self._ahead[block_id] = (home, nbytes)
        self._ahead_nbytes[home] = self._ahead_nbytes.get(home, 0) + nbytes
        self._flow(home).on_prefetch(block_id, nbytes)

    def on_death(self, block_id: int) -> None:
        """Forget a block."""
        self._used_on.pop(block_id, None)
        self._made_anew.pop(block_id, None)
        self._forget_ahead(block_id)
        nbytes, home = self._nbytes.pop(block_id, 0), self._home.pop(block_id, None)
        if home in self._dealt:
            self._dealt[home] -= nbytes
            if home in self._filled and self._dealt[home] < GONE_SHARE * self._limits[home]:
                self._filled.clear()
        for flow in self._flows.values():
            flow.on_death(block_id)

    # -- asked for one accelerator ---------------------------------------------------------------

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return what lives elsewhere by now, then what the flow of this accelerator names."""
        return self._flow(device.name).victims(device, candidates, need_nbytes)

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        """Return what the flow of this accelerator asks for, and lives there."""
        if self._begins:
            self._begins = False
            self._even_out(GROWN_SHARE)
            self._try_without_host(max(device.now_ns, device.compute_free_ns))
        if self._ahead_nbytes.get(device.name, 0) > self._ahead_limits.get(device.name, 0.0):
            return ()  # more would take the room of what is used before the program comes to it
        wishes = self._flow(device.name).prefetch(device, resident)
        return [w for w in wishes if self._home.get(w.block_id, device.name) == device.name]

    def _try_without_host(self, now_ns: int) -> None:
        """Let the host compute where that has paid, or the links could not do without."""
        flows = [flow for flow in self._flows.values() if isinstance(flow, Flow)]
        is_used = any(flow.let_home_compute(self._trial.is_allowed) for flow in flows)
        least_s = [
            (self._dealt[device.name] - device.limit_nbytes) / device.h2d_bytes_per_s
            for device in self._ordered
        ]
        is_allowed = self._trial.period(now_ns, max(least_s, default=0.0) * 1e9, is_used=is_used)
        for flow in flows:
            flow.let_home_compute(is_allowed)

    def expects(self, device: DeviceSnapshot) -> Iterable[int]:
        """Return what the flow of this accelerator expects next, up to what lives elsewhere."""
        expected = self._flow(device.name).expects(device)
        return takewhile(lambda b: self._home.get(b, device.name) == device.name, expected)

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return what the flow of this accelerator names."""
        return self._flow(device.name).write_back(device, resident)


def _largest_first(accelerators: Sequence[DeviceSnapshot]) -> list[DeviceSnapshot]:
    return sorted(accelerators, key=lambda device: -device.limit_nbytes)


def _of_most(op: OpSnapshot, last: str) -> str:
    """Return the accelerator that holds most of the operands; the last one used among equals."""
    nbytes_on: dict[str, int] = {}
    for operand in op.operands:
        for name in operand.devices:
            nbytes_on[name] = nbytes_on.get(name, 0) + operand.nbytes
    return max(nbytes_on, key=lambda name: (nbytes_on[name], name == last), default="")
