"""An error at any line of the package, one after the other: what is left is plain torch's.

A part of the lines in each run of the tests; all of them by `make interrupts`, which sets
`INTERRUPT_EVERY_LINE` to a file in which they are noted. After each error the same program runs
again and is compared with plain torch to the bit, the books are checked, the budget has held, and
nothing is held or lost.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import LostError, tensorsManager
from torchTensorRef.memory.states import DIRTY

from ..stress.interrupts import Training, blocks, trouble_of
from ..support import interrupting
from ..support.interrupting import PACKAGE, Place, Sent, Tracer, interrupt, lines_of
from ..support.over_host import adapters
from ..support.programs import RandomEviction, called_natively

#: Where every line is noted that a program has passed, and that was interrupted, by all processes.
NOTES = os.environ.get("INTERRUPT_EVERY_LINE", "")
EVERY_LINE = bool(NOTES)
#: Of the places that a program passes, how many are tried in a usual run.
SAMPLE = 16
#: So many runs tell which places a program passes.
RUNS = 3
#: A program may pass a line in one run and not in the next; then it is tried again.
TRIES = 4

STRATEGIES: dict[str, Callable[[], Any]] = {
    "genoa": lambda: "genoa",
    "lru": lambda: "lru",
    "flow": lambda: "flow",
    "random": lambda: RandomEviction(1),
}
ERRORS = {
    "sent by a thread": interrupting.sent,
    "no memory": interrupting.no_memory,
    "ctrl-c": interrupting.ctrl_c,
}


class Forward:
    """A forward pass whose weights do not fit: what is needed is fetched, and evicts others."""

    nbytes = 6 << 10

    def __init__(self) -> None:
        self.model = blocks(3, 16)
        self.x = torch.arange(16.0 * 4).view(4, 16).sin()

    def run(self) -> Any:
        with torch.no_grad():
            return self.model(self.x)


class Steps(Training):
    """A step of training: what it writes is written back before it is evicted."""

    nbytes = 6 << 10

    def __init__(self) -> None:
        self.model = blocks(1, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.arange(16.0 * 4).view(4, 16).sin()

    def run(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return [loss.detach(), [p.detach() for p in self.model.parameters()]]


class Mixed:
    """Copies that share until they are written, arrays, views, what goes home and comes back.

    And what the host draws into memory of the accelerator's.
    """

    nbytes = 200 << 10

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(1, 1)  # for the books of the suite only
        self.x = torch.rand(128, 160)  # large enough to be shared by copies
        self.weight = torch.rand(160, 64)

    def run(self) -> Any:
        with torch.no_grad():
            a = self.x + 1
            b = a.clone()
            b.mul_(2)
            c = (b @ self.weight)[::2].t().contiguous()
            a.t()[3:5] += 1
            d = torch.cat([a, b]).sum(0)
            array = d.numpy().copy()
            torch.manual_seed(6)
            e = a * torch.empty_like(a).bernoulli_(0.5)
            return [a, b, c, d, e, torch.from_numpy(array), c.tolist()[0][0]]


class Compiled(Forward):
    """The same, as if it were compiled: what is interrupted is not run natively again."""

    nbytes = 40 << 10

    def run(self) -> Any:
        called_natively(self.model)
        super().run()
        return super().run()


PROGRAMS = {"forward": Forward, "step": Steps, "mixed": Mixed, "compiled": Compiled}


@pytest.fixture(autouse=True)
def injected(manage: Any) -> Iterator[None]:
    """Have what torch makes managed."""
    with torchTensorRef.inject.hooks.is_disabled.entered(False):
        yield


def prepared(manage: Any, make: Any, strategy: Any, device: str = "sim") -> tuple[Any, Any]:
    """Make a program twice, plain and managed, and let the strategy learn it."""
    with torchTensorRef.disabled():
        plain = make()
    manage(strategy, nbytes=make.nbytes, decision_nbytes=4 << 10)
    if device == "adapter":
        (tensorsManager.device,) = adapters(1, make.nbytes)
        tensorsManager.budget = make.nbytes
    ours = make()
    for _ in range(3):
        ours.run()
    return plain, ours


def sample_of(places: list[Place], name: str) -> list[Place]:
    """Return every place, or so many of them, others for each name."""
    if EVERY_LINE:
        return places
    step = max(1, len(places) // SAMPLE)
    return places[sum(map(ord, name)) % step :: step]


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def cases() -> list[tuple[str, str, str, str]]:
    """Return what is tried: all of it, or some, each program, strategy and error among them."""
    on_sim = list(itertools.product(PROGRAMS, STRATEGIES, ERRORS, ("sim",)))
    on_adapter = list(itertools.product(("step", "mixed"), ("lru", "flow"), ERRORS, ("adapter",)))
    if EVERY_LINE:
        return on_sim + on_adapter
    # Steps prime to how many strategies and errors there are: each of them has its turn.
    return on_sim[::7] + on_adapter[::5]


@pytest.mark.timeout(3600 if EVERY_LINE else 300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("program", "strategy", "error", "device"), cases())
def test_after_an_error_at_any_line_all_is_as_before(manage, program, strategy, error, device):
    make, name = PROGRAMS[program], f"{program} {strategy} {error} {device}"

    def begin() -> tuple[Any, Any]:
        return prepared(manage, make, STRATEGIES[strategy](), device)

    plain, ours = begin()
    places = sorted({place for _ in range(RUNS) for place in lines_of(ours.run)})
    wanted = sample_of(places, name)
    missed = []
    for place in wanted:
        has_come = _interrupt_at(place, ours.run, ERRORS[error])
        if not has_come and place not in _interrupted:
            # It is passed while something is learned: as it was when the places were found.
            plain, ours = begin()
            has_come = any(interrupt(ours.run, ERRORS[error], place) for _ in range(RUNS))
        if not has_come:
            missed.append(place)
        trouble = [f"{kind}: {text}" for kind, text in trouble_of(plain, ours)]
        assert trouble == [], f"{error} at {place[0].removeprefix(PACKAGE)}:{place[1]} {place[2]}"
    assert len(missed) < len(wanted) // 2
    _note(wanted, missed)


def _interrupt_at(place: Place, run: Any, act: Any) -> bool:
    """Run until a place is passed, but not for ever; whether it was."""
    return any(interrupt(run, act, place) for _ in range(TRIES))


#: The places that this process has interrupted.
_interrupted: set[Place] = set()


def _note(places: list[Place], missed: list[Place]) -> None:
    came = set(places) - set(missed)
    _interrupted.update(came)
    if EVERY_LINE:
        with open(NOTES, "a") as notes:
            json.dump([sorted({p[:2] for p in places}), sorted({p[:2] for p in came})], notes)
            notes.write("\n")


@pytest.mark.skipif(not EVERY_LINE, reason="make interrupts")
def test_every_line_of_the_slow_path_was_interrupted():
    folders = tuple(f"{PACKAGE}{folder}/" for folder in ("interception", "memory"))
    noted = [json.loads(line) for line in Path(NOTES).read_text().splitlines()]
    passed = {(file, line) for places, _ in noted for file, line in places}
    interrupted = {(file, line) for _, came in noted for file, line in came}
    slow = {place for place in passed if place[0].startswith(folders)}
    for file in sorted({file for file, _ in interrupted}):
        lines = sorted(line for name, line in interrupted if name == file)
        sys.stdout.write(f"{file.removeprefix(PACKAGE)}: {', '.join(map(str, lines))}\n")
    assert len(slow) > 400
    left = sorted(f"{file.removeprefix(PACKAGE)}:{line}" for file, line in slow - interrupted)
    assert left == [], " ".join(left)


# -- what cannot be undone is said ----------------------------------------------------------------


def test_a_block_whose_only_copy_is_gone_says_so(manage):
    manage("lru")
    x = tensorsManager.adopt(torch.rand(64)) + 1
    replica = x._ttr_block.replicas[tensorsManager.residency.books.main]
    assert replica.state is DIRTY
    books = tensorsManager.residency.books
    with pytest.raises(Sent):
        _fail_halfway(replica)
    assert books.is_in_doubt
    for read in (lambda: x + 1, lambda: x.tolist(), lambda: x.numpy(), lambda: x.sum()):
        with pytest.raises(LostError, match=f"only copy of b{replica.block_id} .* is lost"):
            read()
    y = tensorsManager.adopt(torch.ones(4))
    assert (y + y).tolist() == [2, 2, 2, 2]
    tensorsManager.check()


def _fail_halfway(replica: Any) -> None:
    """Take the bytes of a replica away, as no order of our own does, and raise."""
    try:
        replica.base.untyped_storage().resize_(0)
        raise Sent
    except Sent:
        tensorsManager.doubt()
        raise


def test_an_error_sent_by_another_thread_reaches_the_program(manage):
    plain, ours = prepared(manage, Forward, "lru")
    me, sent, count = threading.get_ident(), threading.Event(), 0

    def send() -> None:
        while not sent.wait(0.003):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(Sent))
            return

    for _ in range(30):
        sender = threading.Thread(target=send)
        try:
            sender.start()
            for _ in range(100):
                ours.run()
        except Sent:
            count += 1
        sender.join()
        assert list(trouble_of(plain, ours)) == []
    assert count == 30


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready path", "slow path"])
def test_gradients_of_what_was_written_halfway_are_refused(manage, is_ready):
    """What autograd has saved was written: with another value a gradient would be wrong."""
    manage("lru")
    weight = tensorsManager.adopt(torch.rand(4)).requires_grad_()
    saved = tensorsManager.adopt(torch.rand(4)) + 1
    loss = (weight * saved).sum()
    places = lines_of(lambda: _written(saved, is_ready))
    before = saved.tolist()
    for place in places:
        if place[2] == "return" and place[0].endswith("entry.py"):
            continue  # between us and torch there is no line
        version = saved._version
        interrupt(lambda: _written(saved, is_ready), interrupting.no_memory, place)
        if saved.tolist() != before:
            assert saved._version > version, place
            before = saved.tolist()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _written(saved: Any, is_ready: bool) -> None:
    if not is_ready:
        saved._ttr_block.ready = None
    saved.add_(1)


# -- handlers -------------------------------------------------------------------------------------


def test_a_handler_may_run_operators(manage):
    plain, ours = prepared(manage, Forward, "flow")
    seen: list[Any] = []
    signal.signal(signal.SIGINT, lambda signum, frame: seen.append(ours.run()))
    with torchTensorRef.disabled():
        expected = plain.run()
    for place in sample_of(lines_of(ours.run), "handlers"):
        with Tracer(interrupting.ctrl_c, place).watching():
            ours.run()
        time.sleep(0.01)
    assert len(seen) >= SAMPLE // 2
    assert all(torch.equal(expected, result) for result in seen)


def test_ctrl_c_comes_after_backward_as_in_plain_torch(manage):
    """Plain torch's backward pass is C++: no handler comes between two of its operators."""
    _, ours = prepared(manage, Steps, "lru")
    weights = list(ours.model.parameters())

    def prepare() -> Any:
        ours.optimizer.zero_grad()
        return ours.model(ours.x).square().mean()

    places = sample_of(lines_of(prepare().backward), "backward")
    counts = set()
    for place in places:
        loss = prepare()
        interrupt(loss.backward, interrupting.ctrl_c, place)
        counts.add(sum(weight.grad is not None for weight in weights))
    assert counts <= {0, len(weights)}  # it begins with a few lines of torch's own Python
    assert len(weights) in counts
