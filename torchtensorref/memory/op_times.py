"""How long operators take where, learned as they run and never by waiting for them.

A simulated device's clock says it, and the host's own. A real accelerator is measured by pairs of
events around some of its operators, which are looked at once they have fired: the first of a kind,
then one in 2, one in 4, as far as one in 64, as what is known of it gets surer.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections import deque
from typing import Any, NamedTuple

from ..devices.base import Device, Stopwatch
from .op_times_file import OpTimesFile, file_for

#: Weight of the newest measurement, and by what factor it may differ from what is known so far.
NEWEST_WEIGHT = 0.2
MOST_FACTOR = 4.0
#: One operator of a kind in two to the power of this is measured at the least.
RAREST_BITS = 6
#: So many kinds are known; beyond it all is learned anew.
MOST_KINDS = 4096
#: Measurements that have not been looked at.
MOST_WAITING = 256
#: What was learned in another run counts for no more measurements: it may not hold any more.
KEPT_COUNT = 2


class OpCost(NamedTuple):
    """What an operator computes and moves: floating point operations, bytes, and its dtype."""

    flops: int
    nbytes: int
    dtype: str


class OpKey(NamedTuple):
    """What operators that take about as long for each byte have in common.

    Sizes are told apart by powers of two. That of the operations tells a product with one row from
    one with many, for which the bytes are nearly the same.
    """

    kind: int
    dtype: str
    nbytes_bucket: int
    flops_bucket: int
    device: str

    @classmethod
    def of(cls, kind: int, cost: OpCost, device: Device) -> OpKey:
        """Return the key of an operator on a device."""
        buckets = cost.nbytes.bit_length(), cost.flops.bit_length()
        return cls(kind, cost.dtype, *buckets, device.name)


class _Learned:
    """The time per byte, the logarithm of it on average, and how often it was measured."""

    __slots__ = ("count", "is_new", "log_ns_per_byte", "seen_count")

    def __init__(self) -> None:
        self.log_ns_per_byte = 0.0
        self.count = self.seen_count = 0
        self.is_new = False  # something was learned in this run

    def note(self, ns_per_byte: float) -> None:
        newest = math.log(ns_per_byte)
        if self.count:
            most = math.log(MOST_FACTOR)
            change = min(max(newest - self.log_ns_per_byte, -most), most)
            newest = self.log_ns_per_byte + NEWEST_WEIGHT * change
        self.log_ns_per_byte = newest
        self.count += 1
        self.is_new = True


class Timing:
    """The measurement of one operator: made before it runs, ended when it has been issued."""

    __slots__ = ("_began_ns", "_device", "_main", "_times", "_watch")

    def __init__(self, times: OpTimes, device: Device, main: Device, watch: Stopwatch | None):
        self._times, self._device, self._main, self._watch = times, device, main, watch
        # The host works in order: what its clock has moved on by is what the operator took.
        self._began_ns = main.now_ns()

    def end(self, kind: int, cost: OpCost) -> None:
        """Note what it took, or leave that to be asked once it is known."""
        key = OpKey.of(kind, cost, self._device)
        if self._device.is_host:
            self._times.note(key, cost.nbytes, self._main.now_ns() - self._began_ns)
        elif self._watch is not None:
            self._watch.stop()
            self._times.wait_for(key, cost.nbytes, self._watch)


class OpTimes:
    """What is known of operators: what they cost, and how long they took on each device."""

    def __init__(self) -> None:
        #: What an operator on operands of such sizes cost the last time.
        self.costs: dict[Any, OpCost] = {}
        #: Bytes that its results took the last time.
        self.result_nbytes: dict[Any, int] = {}
        self._learned: dict[OpKey, _Learned] = {}
        self._waiting: deque[tuple[OpKey, int, Stopwatch]] = deque(maxlen=MOST_WAITING)
        self._refused: set[tuple[int, str]] = set()
        #: Where it is kept between runs, by device; what each of them is.
        self._files: dict[str, tuple[OpTimesFile, str]] = {}
        self._seen: set[str] = set()
        self._is_saved_at_exit = False

    def begin(self, kind: int, cost: OpCost | None, device: Device, main: Device) -> Timing | None:
        """Begin to measure an operator on a device, if it is its turn.

        Parameters
        ----------
        cost : OpCost or None
            What it cost the last time; None where it is new.
        main : Device
            Whose clock the host goes by.
        """
        self._look()
        if device.name not in self._seen:
            self._read(device, main)
        if device.is_host:
            return Timing(self, device, main, None)
        if cost is not None:
            learned = self._of(OpKey.of(kind, cost, device))
            learned.seen_count += 1
            if learned.seen_count % (1 << min(learned.count, RAREST_BITS)):
                return None
        return Timing(self, device, main, device.stopwatch())

    def remember(self, sizes: Any, cost: OpCost) -> None:
        """Note what an operator on operands of such sizes costs."""
        if len(self.costs) > MOST_KINDS:
            self.costs.clear()
        self.costs[sizes] = cost

    def remember_results(self, sizes: Any, nbytes: int) -> None:
        """Note the bytes that the results of an operator on operands of such sizes take."""
        if len(self.result_nbytes) > MOST_KINDS:
            self.result_nbytes.clear()
        self.result_nbytes[sizes] = nbytes

    def forget(self) -> None:
        """Other devices are used from now on: what was learned, was learned on those before."""
        self.save()
        self._files.clear()
        self._seen.clear()
        self.costs.clear()
        self.result_nbytes.clear()
        self._learned.clear()
        self._waiting.clear()
        self._refused.clear()

    def note(self, key: OpKey, nbytes: int, took_ns: int) -> None:
        """Learn how long an operator took."""
        self._of(key).note(max(took_ns, 1) / max(nbytes, 1))

    def wait_for(self, key: OpKey, nbytes: int, watch: Stopwatch) -> None:
        """Learn from a measurement once it has ended."""
        self._waiting.append((key, nbytes, watch))
        self._look()

    def expected_ns(self, key: OpKey, nbytes: int) -> int | None:
        """Return how long an operator is expected to take; None where that was not learned."""
        learned = self._learned.get(key)
        if learned is None or not learned.count:
            return None
        return int(math.exp(learned.log_ns_per_byte) * max(nbytes, 1))

    def refuse(self, kind: int, dtype: str) -> None:
        """Note that the host has no kernel for it."""
        self._refused.add((kind, dtype))

    def is_refused(self, kind: int, dtype: str) -> bool:
        """Whether the host is known to have no kernel for it."""
        return (kind, dtype) in self._refused

    # -- kept between runs ----------------------------------------------------------------------

    def _read(self, device: Device, main: Device) -> None:
        """Know what was learned on such a device before."""
        self._seen.add(device.name)
        file = file_for(main)
        if file is None:
            return
        hardware = device.hardware
        if main.has_virtual_clock and device.is_host:
            hardware = f"host of {main.hardware}"
        if not self._is_saved_at_exit:
            self._is_saved_at_exit = True
            atexit.register(_save_at_exit, weakref.ref(self))
        self._files[device.name] = file, hardware
        for key, (log_ns_per_byte, count) in file.read(hardware).items():
            learned = self._of(OpKey(*key, device.name))
            if not learned.count:
                learned.log_ns_per_byte, learned.count = log_ns_per_byte, min(count, KEPT_COUNT)

    def save(self) -> None:
        """Keep what was learned for the next run; never an error."""
        for name, (file, hardware) in list(self._files.items()):
            found = {
                key[:4]: (learned.log_ns_per_byte, learned.count)
                for key, learned in list(self._learned.items())
                if key.device == name and learned.is_new
            }
            if found:
                file.write(hardware, found)

    def _of(self, key: OpKey) -> _Learned:
        learned = self._learned.get(key)
        if learned is None:
            if len(self._learned) >= MOST_KINDS:
                self._learned.clear()
            learned = self._learned[key] = _Learned()
        return learned

    def _look(self) -> None:
        """Take in what has ended, in the order in which it was begun."""
        waiting = self._waiting
        while waiting:
            try:
                key, nbytes, watch = waiting[0]
                took_ns = watch.took_ns()
                if took_ns is None:
                    return
                waiting.popleft()
            except IndexError:
                return  # another thread has taken it
            self.note(key, nbytes, took_ns)


def _save_at_exit(reference: weakref.ref[OpTimes]) -> None:
    times = reference()
    if times is not None:
        times.save()
