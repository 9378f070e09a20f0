"""Many threads, shared and own tensors, too little room: right results and books, no deadlock."""

from __future__ import annotations

import contextvars
import copy
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.base.interrupts import holds_operands
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.interception import handlers, results
from torchTensorRef.interception.slow_path import SlowPath
from torchTensorRef.memory import strategy_feed
from torchTensorRef.memory.bookkeeping import Doubt
from torchTensorRef.memory.budget import OutOfBudgetError
from torchTensorRef.memory.filling import RoomTakenError
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.strategies.lru import LeastRecentlyUsed

from ..support.programs import InTurn, RandomEviction, Scatter, assert_same, called_natively
from ..support.sweeps import in_turn
from ..support.turns import taking_turns_every

#: How often what goes by chance is tried; `make threads` tries it more often.
ROUNDS = int(os.environ.get("THREAD_ROUNDS", "1"))
pytestmark = pytest.mark.timeout(60 * ROUNDS)

THREADS = 8


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run `work(0)`, `work(1)`, ... at once, all beginning together; return what they return."""
    barrier = threading.Barrier(count)

    kernel_threads = torch.get_num_threads()

    def begin(number: int) -> Any:
        barrier.wait()
        torch.set_num_threads(
            kernel_threads
        )  # each has a number of its own: other bits with another
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        # In the context of the test: `disabled()` holds in its threads too.
        contexts = [contextvars.copy_context() for _ in range(count)]
        futures = [pool.submit(contexts[n].run, begin, n) for n in range(count)]
        return [future.result() for future in futures]


def assert_idle(manager: Any, limit_nbytes: int | None = None) -> None:
    manager.check()
    residency = manager.residency
    assert not residency.holds.pins_by_thread
    assert not residency.holds.announced
    ledgers = residency.books.ledgers.values()
    assert not [r for ledger in ledgers for r in ledger.replicas() if r.pins]
    for device in residency.books.accelerators:
        whole_nbytes = residency.books.ledgers[device].limit_nbytes
        assert device.peak_nbytes <= (limit_nbytes or whole_nbytes)
        assert device.recount_nbytes() == device.resident_nbytes


STRATEGIES = {
    "lru": lambda: "lru",
    "genoa": lambda: "genoa",
    "flow": lambda: "flow",
    "random": lambda: RandomEviction(7),
    "in turn": InTurn,
    "scatter": lambda: Scatter(7),
}


@pytest.fixture
def manage(manage: Any) -> Any:
    """Give as many accelerators as the strategy uses: two where it spreads."""

    def make(strategy: Any = "lru", nbytes: int = 1 << 20, **values: Any) -> Any:
        count = 2 if getattr(strategy, "spreads", False) else 1
        return manage(strategy, nbytes, count, **values)

    return make


#: Those by which a test runs. They are the same ones in Python: there, who picks by use, who looks
#: ahead and who spreads tell what is special.
BY = ["lru", "flow", "scatter"] if os.environ.get("TTR_CORE") == "python" else list(STRATEGIES)


@pytest.fixture(params=BY)
def strategy(request):
    return STRATEGIES[request.param]()


def work_on(shared: list[Any], own: Any, rounds: int) -> Any:
    """Read what all threads share, write what is the thread's own, make and drop temporaries."""
    for i in range(rounds):
        own = own @ shared[i % len(shared)]
        own.sub_(own.mean()).div_(own.abs().max() + 1)
        own.t()[i % 5 :: 3].add_(shared[-1][0, i % 7])
        twin = own.clone()
        twin[0] += 1
        own = own + twin.sort(dim=0)[0]
    return own


@pytest.mark.parametrize("_", range(ROUNDS))
def test_eight_threads_on_shared_and_own_tensors(manage, strategy, _):
    rounds = 12 if ROUNDS > 1 else 7
    shared = [torch.rand(16, 16) for _ in range(5)]
    owns = [torch.rand(16, 16) for _ in range(THREADS)]
    expected = [work_on(shared, own.clone(), rounds) for own in owns]
    manager = manage(strategy, nbytes=8_000)
    refs = [manager.adopt(t.clone()) for t in shared]
    mine = [manager.adopt(t.clone()) for t in owns]
    results = in_threads(lambda n: work_on(refs, mine[n], rounds))
    assert_same(expected, results)
    assert_same(shared, refs)
    assert_idle(manager)


def test_bundles_that_exceed_the_budget_together_take_turns(manage):
    """Each operator needs more than half the budget: two at once do not fit, and none goes home."""
    nbytes = 4 * 32 * 32
    manager = manage("lru", nbytes=4 * nbytes)
    plain = [torch.rand(32, 32) for _ in range(2 * THREADS)]
    refs = [manager.adopt(p.clone()) for p in plain]

    def work(number: int) -> Any:
        a, b = refs[2 * number : 2 * number + 2]
        return [a @ b for _ in range(10)][-1]

    results = in_threads(work)
    assert_same([plain[2 * n] @ plain[2 * n + 1] for n in range(THREADS)], results)
    assert_idle(manager)


def test_backward_in_threads(manage, strategy):
    def step(model: nn.Module, x: Any) -> Any:
        grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        return list(grads)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))
    xs = [torch.rand(6, 12) for _ in range(THREADS)]
    expected = [step(model, x) for x in xs]
    manager = manage(strategy, nbytes=6_000)
    manager.adopt(model)
    refs = [manager.adopt(x.clone()) for x in xs]
    assert_same(expected, in_threads(lambda n: step(model, refs[n])))
    assert_idle(manager)


def train(make: Callable[[Any], Any], seed: int) -> Any:
    """Two steps of a model with batch norm; nothing in it is random or shared."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.rand(10, 10, generator=generator) for _ in range(2)]
    w1, w2 = (make(w).requires_grad_() for w in weights)
    mean, var = make(torch.zeros(10)), make(torch.ones(10))
    x = make(torch.rand(7, 10, generator=generator))
    optimizer = torch.optim.AdamW([w1, w2], lr=0.1)
    for _ in range(2):  # the first makes the optimizer's state
        h = nn.functional.batch_norm(x @ w1, mean, var, training=True)
        optimizer.zero_grad()
        (h @ w2).square().mean().backward()
        optimizer.step()
    return [w1.detach(), w2.detach(), w1.grad, mean, var]


def test_models_of_their_own_train_in_threads(manage, strategy):
    expected = [train(lambda t: t, seed) for seed in range(THREADS)]
    manager = manage(strategy, nbytes=3_000)
    assert_same(expected, in_threads(lambda n: train(manager.adopt, n)))
    assert_idle(manager)


def test_copies_on_write_are_written_and_read_in_threads(manage, monkeypatch, strategy):
    """A thread that writes its copy must not be seen by those that read theirs."""
    monkeypatch.setattr(handlers, "SHARE_FROM_NBYTES", 1)
    plain = torch.rand(20, 20)
    manager = manage(strategy, nbytes=7_000)
    for _ in range(6):
        source = manager.adopt(plain.clone())
        twins = [source, *(copy.deepcopy(source) for _ in range(THREADS - 1))]

        def work(number: int, twins: list[Any] = twins) -> Any:
            mine = twins[number]
            if number % 2:
                return mine @ mine
            mine.mul_(number + 1)
            return mine + mine.clone().zero_()

        expected = [plain @ plain if n % 2 else plain * (n + 1) for n in range(THREADS)]
        assert_same(expected, in_threads(work))
        del source, twins
    assert_idle(manager)


def test_the_budget_and_the_strategy_change_while_threads_work(manage):
    manager = manage("lru", nbytes=20_000)
    plain = [torch.rand(16, 16) for _ in range(THREADS)]
    expected = [work_on(plain, p.clone(), 8) for p in plain[:-1]]
    shared = [manager.adopt(p.clone()) for p in plain]

    def work(number: int) -> Any:
        if number < THREADS - 1:
            return work_on(shared, shared[number].clone(), 8)
        for i in range(30):
            manager.budget = (20_000, 5_000, 12_000)[i % 3]
            manager.strategy = ("genoa", "lru", "flow")[i % 3]
        return None

    assert_same([*expected, None], in_threads(work))
    assert_idle(manager, limit_nbytes=20_000)


ON_SEVERAL = "it ran on several devices, of which one is in use now"


def other_devices(nbytes: int) -> list[Any]:
    """Two simulated accelerators, and none."""
    specs = [DeviceSpec(name=name, capacity_nbytes=nbytes) for name in ("one", "two")]
    return [*(SimDevice(spec, poison=True, name=f"sim:{spec.name}") for spec in specs), "cpu"]


def assert_left(device: Any, manager: Any) -> None:
    """Nothing of ours is on a device that is out of use."""
    assert device not in manager.residency.books.ledgers
    assert device.resident_nbytes == device.recount_nbytes() == 0


@pytest.fixture
def short_switches():
    with taking_turns_every(1e-4):
        yield


def changing(manager: Any, devices: list[Any], work: Callable[[int], Any], count: int) -> list[Any]:
    """Run `work` in threads, and change the device until they are done; at least three times."""
    running = set(range(count))
    change_counts = []

    def run(number: int) -> Any:
        if number < count:
            try:
                return work(number)
            finally:
                running.discard(number)
        change_counts.append(0)
        while running or change_counts[0] < 3:
            manager.device = devices[change_counts[0] % len(devices)]
            change_counts[0] += 1
            time.sleep(0.002)
        return None

    results = in_threads(run, count + 1)
    assert change_counts[0] >= 3
    return results[:-1]


@pytest.mark.usefixtures("short_switches")
@pytest.mark.parametrize(
    ("strategy", "nbytes"), in_turn(BY, [8_000, 40_000], each=1), indirect=["strategy"]
)
def test_the_device_changes_while_threads_work(manage, strategy, nbytes):
    count = 5
    shared = [torch.rand(16, 16) for _ in range(5)]
    owns = [torch.rand(16, 16) for _ in range(count)]
    expected = [work_on(shared, own.clone(), 10) for own in owns]
    manager = manage(strategy, nbytes=nbytes)
    first = manager.residency.books.main
    refs = [manager.adopt(t.clone()) for t in shared]
    mine = [manager.adopt(t.clone()) for t in owns]
    devices = [*other_devices(nbytes), first]
    results = changing(manager, devices, lambda n: work_on(refs, mine[n], 10), count)
    manager.device = first
    assert_same([*expected, *shared], [*results, *refs], on_host_because=ON_SEVERAL)
    assert_idle(manager)
    for device in devices[:2]:
        assert_left(device, manager)
        assert device.peak_nbytes <= nbytes
    assert sum(device.clocks().compute_ns for device in (first, *devices[:2]))


@pytest.mark.usefixtures("short_switches")
def test_the_device_changes_while_models_train_and_run_natively(manage, strategy):
    count = 4
    expected = [train(lambda t: t, seed) for seed in range(count)]
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4)).eval()
    x = torch.rand(3, 12)
    with torch.no_grad():
        forward = copy.deepcopy(model)(x)
    manager = manage(strategy, nbytes=9_000)
    first = manager.residency.books.main
    manager.adopt(model)
    ref = manager.adopt(x.clone())

    def work(number: int) -> Any:
        if number % 2:
            return train(manager.adopt, number)
        with torch.no_grad():
            return [model(ref) for _ in range(15)]

    devices = [*other_devices(9_000), first]
    results = changing(manager, devices, work, count)
    manager.device = first
    for number in range(count):
        right = expected[number] if number % 2 else [forward] * 15
        assert_same(right, results[number], on_host_because=ON_SEVERAL)
    assert sum(device.clocks().compute_ns for device in (first, *devices[:2]))
    assert_idle(manager)
    for device in devices[:2]:
        assert_left(device, manager)


@pytest.mark.usefixtures("short_switches")
@pytest.mark.filterwarnings("ignore:The budget has no effect")
def test_everything_that_can_be_set_is_set_while_threads_work(manage):
    count = 4
    plain = [torch.rand(16, 16) for _ in range(count + 2)]
    expected = [work_on(plain, p.clone(), 10) for p in plain[:count]]
    manager = manage("lru", nbytes=20_000)
    first = manager.residency.books.main
    shared = [manager.adopt(p.clone()) for p in plain]
    devices = [*other_devices(20_000), first]
    ended = threading.Event()

    def set_all(number: int) -> None:
        i = 0
        while not ended.is_set():
            if number == count:
                manager.device = devices[i % 4]
            else:
                manager.budget = (20_000, 5_000, 12_000)[i % 3]
                manager.strategy = ("genoa", "lru", RandomEviction(i), "flow")[i % 4]
            str(manager), manager.stats(), manager.device, manager.budget, manager.report()
            i += 1

    def work(number: int) -> Any:
        if number >= count:
            return set_all(number)
        try:
            return work_on(shared, shared[number].clone(), 10)
        finally:
            done.append(number)
            if len(done) == count:
                ended.set()

    done: list[int] = []
    results = in_threads(work, count + 2)
    manager.device = first
    assert_same(expected, results[:count], on_host_because=ON_SEVERAL)
    assert_idle(manager, limit_nbytes=20_000)


class Gate:
    """Stops the first caller of a function at its door, until somebody lets it in."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(20)
        return self.function(*args, **kwargs)


def gated(monkeypatch: Any, owner: Any, name: str) -> Gate:
    gate = Gate(getattr(owner, name))
    monkeypatch.setattr(owner, name, gate)
    return gate


def two_at_once(gate: Gate, first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """Run `first` up to the gate, then `second` until it waits or is done, then let `first` on."""
    with ThreadPoolExecutor(2) as pool:
        run = contextvars.copy_context().run
        one = pool.submit(run, first)
        assert gate.reached.wait(20)
        two = pool.submit(contextvars.copy_context().run, second)
        threading.Event().wait(0.1)  # `second` has come as far as it can
        gate.opened.set()
        return [one.result(), two.result()]


def test_a_device_is_left_when_the_operator_in_flight_has_ended(manage, monkeypatch):
    manager = manage()
    plain = torch.rand(30, 30)
    ref = manager.adopt(plain.clone())
    old, (new, *_) = manager.residency.books.main, other_devices(1 << 20)
    had_changed: list[bool] = []
    after = old.after_operator

    def after_operator(*args: Any, **kwargs: Any) -> None:
        had_changed.append(changed.is_set())
        after(*args, **kwargs)

    monkeypatch.setattr(old, "after_operator", after_operator)
    gate = gated(monkeypatch, manager.residency, "tell_operator")
    changed = threading.Event()

    def change() -> None:
        manager.device = new
        changed.set()

    result, _ = two_at_once(gate, lambda: ref.mul_(2) + 1, change)
    assert not had_changed[0], "it waited for the operator"
    assert_same([plain * 2, plain * 2 + 1], [ref, result])
    assert_same(plain * 2 + 1, ref + 1)
    assert_idle(manager)
    assert_left(old, manager)


def learned(manager: Any) -> tuple[nn.Module, Any, Any]:
    """A module that has run natively, its input, and what plain torch makes of it."""
    module, x = nn.Sequential(nn.Linear(12, 20), nn.Tanh()).eval(), torch.rand(3, 12)
    with torch.no_grad():
        expected = copy.deepcopy(module)(x)
        called_natively(manager.adopt(module))
        ref = manager.adopt(x.clone())
        module(ref), module(ref)
    assert manager.stats()["native_call_count"] == 1
    return module, ref, expected


def while_it_runs_natively(
    manager: Any, monkeypatch: Any, other: Callable[[nn.Module, Any], Any], waits: bool = True
) -> Any:
    """Run a module natively and have another thread do something that must wait for its end.

    Without `waits` it must not: the run may be waiting for that.
    """
    module, ref, expected = learned(manager)
    gate = gated(monkeypatch, torch, "tanh")
    tanh, ended_meanwhile = gate.function, []
    is_over = threading.Event()

    runner: list[int] = []

    def passed(*args: Any) -> Any:
        if runner == [threading.get_ident()]:
            ended_meanwhile.append(is_over.is_set())
        return tanh(*args)

    def run() -> Any:
        runner.append(threading.get_ident())
        with torch.no_grad():
            return module(ref)

    def do_other() -> Any:
        result = other(module, ref)
        is_over.set()
        return result

    gate.function = passed
    result, others = two_at_once(gate, run, do_other)
    assert manager.stats()["native_call_count"] >= 2
    assert ended_meanwhile == [not waits], "it waited for the run"
    assert_same(expected, result, on_host_because="the device may be another one now")
    return expected, others


def test_a_device_is_left_when_a_module_that_runs_natively_there_has_ended(manage, monkeypatch):
    manager = manage()
    old, (new, *_) = manager.residency.books.main, other_devices(1 << 20)

    def change(module: nn.Module, ref: Any) -> None:
        manager.device = new

    while_it_runs_natively(manager, monkeypatch, change)
    assert_idle(manager)
    assert_left(old, manager)


@pytest.mark.parametrize("why", ["strategy", "gradients", "budget"])
def test_a_module_that_runs_natively_is_not_seen_half_exchanged(manage, monkeypatch, why):
    """Another thread's call is intercepted beside it, and has the parameters all the same."""
    manager = manage()

    def call(module: nn.Module, ref: Any) -> Any:
        if why == "strategy":
            manager.strategy = "genoa"
        elif why == "budget":
            manager.budget = 1 << 19
        with torch.set_grad_enabled(why == "gradients"):
            return module(ref)

    expected, found = while_it_runs_natively(manager, monkeypatch, call, waits=False)
    assert_same(expected, found)
    assert found.requires_grad == (why == "gradients")
    assert_idle(manager)


@pytest.mark.parametrize("new_device", ["sim:one", "cpu"])
def test_an_operator_that_had_chosen_a_device_ends_there_and_clears_it(
    manage, monkeypatch, new_device
):
    """Nothing tells yet that it will use the device, so nobody waits for it."""
    manager = manage()
    plain = torch.rand(30, 30)
    ref = manager.adopt(plain.clone())
    old, (one, *_) = manager.residency.books.main, other_devices(1 << 20)
    gate = gated(monkeypatch, manager.residency, "acquire")

    def change() -> None:
        manager.device = one if new_device == "sim:one" else "cpu"

    result, _ = two_at_once(gate, lambda: ref + 1, change)
    assert manager.device == new_device
    assert_same(plain + 1, result, on_host_because="the device that was left ran it")
    assert_left(old, manager)
    assert old.clocks().compute_ns > 0
    assert_same(plain + 2, result + 1, on_host_because="there is no accelerator")
    manager.check()


def test_a_copy_that_another_thread_is_just_issuing_is_waited_for(manage, monkeypatch):
    manager = manage()
    plain = torch.rand(30, 30)
    ref = manager.adopt(plain.clone())
    gate = gated(monkeypatch, manager.residency.copier.transfer, "fetch")
    results = two_at_once(gate, lambda: ref + 1, lambda: ref * 2)
    assert_same([plain + 1, plain * 2], results)
    assert_idle(manager)


@pytest.mark.parametrize("write", [lambda x: x.mul_(3), lambda x: x.t()[2:].zero_()])
def test_what_is_written_while_it_is_evicted_is_not_lost(manage, monkeypatch, write):
    manager = manage(nbytes=20_000)
    plain = torch.rand(40, 40)
    ref = manager.adopt(plain.clone()) + 1
    plain = plain + 1
    other = manager.adopt(torch.rand(60, 60))  # pushes `ref` out
    gate = gated(monkeypatch, manager.residency.copier.transfer, "write_back")
    two_at_once(gate, other.toGPU, lambda: write(ref))
    write(plain)
    assert_same(plain, ref)
    assert_same(plain + 0, ref + 0)
    assert_idle(manager)


@pytest.mark.parametrize("writes_source", [True, False])
def test_a_sharer_writes_while_another_one_is_read(manage, monkeypatch, writes_source):
    manager = manage()
    plain = torch.rand(30, 30)
    source = manager.adopt(plain.clone())
    twin = copy.deepcopy(source)
    read, written = (twin, source) if writes_source else (source, twin)
    gate = gated(monkeypatch, manager.residency, "tell_operator")
    results = two_at_once(gate, lambda: read * 2, lambda: written.zero_())
    assert_same([plain * 2, torch.zeros(30, 30)], results)
    assert_same([plain, torch.zeros(30, 30)], [read, written])
    assert_idle(manager)


@pytest.mark.parametrize("writes_source", [True, False])
def test_a_sharer_writes_while_another_one_is_read_at_home(manage, monkeypatch, writes_source):
    manager = manage(nbytes=100)  # nothing fits: everything runs at home
    plain = torch.rand(30, 30)
    source = manager.adopt(plain.clone())
    twin = copy.deepcopy(source)
    read, written = (twin, source) if writes_source else (source, twin)
    gate = gated(monkeypatch, manager.residency.books.host, "before_operator")
    results = two_at_once(gate, lambda: read * 2, lambda: written.zero_())
    assert_same([plain * 2, torch.zeros(30, 30)], results, on_host_because="nothing fits")
    assert_idle(manager)


def test_a_fetch_takes_its_room_or_refuses(manage):
    """Two threads may both have been told that there is room for one: only one fetches."""
    manager = manage("lru", nbytes=1_000)
    xs = [manager.adopt(torch.rand(150)) for _ in range(2)]
    residency = manager.residency
    for _ in xs:
        residency.evictor.make_room(residency.books.main, 600, "both are told so")
    residency.copier.fetch(xs[0]._ttr_block, residency.books.main)
    with pytest.raises(RoomTakenError):
        residency.copier.fetch(xs[1]._ttr_block, residency.books.main)
    assert residency.books.main.resident_nbytes == 600
    manager.check()


def test_two_fast_operators_do_not_wait_for_each_other(manage, monkeypatch):
    """Each announces its operands and needs room for a result that the other's operands take."""
    manager = manage("lru", nbytes=1_000)
    mine, other = (manager.adopt(torch.rand(100)) for _ in range(2))
    _ = mine + 1, other + 1
    residency = manager.residency
    waits: list[float] = []
    monkeypatch.setattr(residency.books, "wait_for_release", waits.append)
    residency.holds.announced[threading.get_ident()] = (mine,)
    residency.holds.announced[-1] = (other,)
    try:
        with pytest.raises(OutOfBudgetError):
            residency.evictor.make_room_patiently(residency.books.main, 800, "results")
    finally:
        residency.holds.announced.clear()
    assert len(waits) == 1
    assert_idle(manager)


def test_operators_go_on_after_an_exchange_that_was_interrupted(manage, monkeypatch):
    """Memory runs out just when the other threads' operators are told to wait."""
    manager = manage()
    ref = manager.adopt(torch.ones(4))
    books = manager.residency.books
    reopen, calls = books.reopen, []

    def short_of_memory() -> None:
        calls.append(1)
        if len(calls) <= 2:
            raise MemoryError
        reopen()

    monkeypatch.setattr(books, "reopen", short_of_memory)
    with pytest.raises(MemoryError):
        manager.device = other_devices(9_000)[0]
    assert len(calls) == 2  # the second one at the end of the exchange, which was left as well
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(contextvars.copy_context().run, lambda: ref + 1).result(20)
    assert_same(torch.ones(4) + 1, result)


def test_a_repair_takes_nothing_from_who_has_repaired_meanwhile(manage, monkeypatch):
    """A thread's error is noted; before another one repairs, it has done so, and runs on."""
    manager = manage("lru")
    ref = manager.adopt(torch.ones(4))
    residency = manager.residency
    repair, holds = residency._repair, residency.holds
    fails, repaired, held = (threading.Event() for _ in range(3))
    looked = repair._has_lost_copies

    def fail_and_go_on() -> None:
        with pytest.raises(RuntimeError):
            _ = ref @ torch.ones(3)
        fails.set()
        repaired.wait(20)
        residency.repair()
        replicas = residency.acquire(residency.books.main, [ref._ttr_block], [], 0)
        held.set()
        go_on.wait(20)
        pins.append([replica.pins for replica in replicas])
        residency.release(replicas)

    def let_the_other_go_on(device: Any, idents: Any) -> bool:
        monkeypatch.setattr(repair, "_has_lost_copies", looked)
        repaired.set()
        assert held.wait(20)
        return looked(device, idents)

    go_on, pins = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(contextvars.copy_context().run, fail_and_go_on)
        assert fails.wait(20)
        monkeypatch.setattr(repair, "_has_lost_copies", let_the_other_go_on)
        residency.repair()
        assert holds.pins_by_thread
        go_on.set()
        other.result(20)
    assert pins == [[1]]
    assert_idle(manager)


class Thinker(LeastRecentlyUsed):
    """LRU that takes its time over what it is told, once it is let."""

    name = "thinker"
    watches_accesses = True

    def __init__(self) -> None:
        self.thoughts = [0]

    def on_access(self, access: Any) -> None:
        before = self.thoughts
        if not thinking.is_set():
            thinking.set()
            has_thought.wait(20)
            are_its_own.append(self.thoughts is before)


thinking, has_thought = threading.Event(), threading.Event()
are_its_own: list[bool] = []


def test_a_repair_waits_for_who_is_just_telling_the_strategy(manage):
    """A strategy that was interrupted begins anew, and not while another thread is inside it."""
    manager = manage(Thinker())
    ref = manager.adopt(torch.ones(4))
    residency = manager.residency
    with ThreadPoolExecutor(2) as pool:
        use = pool.submit(contextvars.copy_context().run, lambda: ref + 1)
        assert thinking.wait(20)
        interrupted = Doubt(0, frozenset({strategy_feed.__file__}))
        residency.books.doubts.append(interrupted)
        repair = pool.submit(residency.repair)
        with pytest.raises(TimeoutError):
            repair.result(0.2)
        has_thought.set()
        assert_same(torch.ones(4) + 1, use.result(20))
        repair.result(20)
    assert are_its_own == [True]
    assert manager.strategy.thoughts == [0]
    assert_idle(manager)


def test_a_repair_leaves_the_operator_around_an_error_what_it_holds(manage):
    """Within an operator's call another one fails, and is caught; then another thread repairs."""
    manager = manage("lru")
    ref, other = manager.adopt(torch.ones(4)), manager.adopt(torch.ones(4))
    residency = manager.residency
    inside, repaired = threading.Event(), threading.Event()

    @holds_operands
    def around() -> list[int]:
        residency.holds.begin_operator()
        replicas = residency.acquire(residency.books.main, [ref._ttr_block], [], 0)
        try:
            callback()
            return [replica.pins for replica in replicas]
        finally:
            residency.release(replicas)
            residency.holds.end_operator()

    def callback() -> None:
        with pytest.raises(RuntimeError):
            _ = other @ torch.ones(3)
        inside.set()
        assert repaired.wait(20)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(contextvars.copy_context().run, around)
        assert inside.wait(20)
        residency.repair()
        repaired.set()
        assert result.result(20) == [1]
    assert_same(torch.ones(4) + 1, other + 1)
    assert_idle(manager)


@pytest.mark.parametrize("is_write_back", [True, False], ids=["write back", "evict"])
def test_what_is_written_while_it_is_copied_home_is_not_lost(manage, monkeypatch, is_write_back):
    """An evictor has chosen a replica: an operator that writes it waits for the copy."""
    manager = manage("lru")
    residency = manager.residency
    ref, plain = manager.adopt(torch.rand(40)) + 1, torch.zeros(40)
    replica = ref._ttr_block.replicas[residency.books.main]
    evictor, copier = residency.evictor, residency.copier
    issue, end_write_back = copier.leaving.issue, copier.end_write_back
    has_chosen = threading.Event()
    order = []

    def late(replica: Any, home: Any) -> bool:
        has_chosen.set()
        time.sleep(0.1)  # the operator comes
        order.append("copy")
        return issue(replica, home)

    def waits(block: Any) -> None:
        order.append("operator")
        end_write_back(block)
        order.append("kernel")

    monkeypatch.setattr(copier.leaving, "issue", late)
    monkeypatch.setattr(copier, "end_write_back", waits)
    act = evictor.try_write_back if is_write_back else lambda r: evictor.evict(r, "a test")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(contextvars.copy_context().run, act, replica)
        assert has_chosen.wait(20)
        ref.zero_()
        other.result(20)
    assert order == ["operator", "copy", "kernel"]
    monkeypatch.undo()
    manager.bring_all_home()
    assert_same(plain, ref)
    assert_idle(manager)


def test_a_result_that_goes_home_while_another_one_of_its_operator_is_wrapped(manage, monkeypatch):
    """What an evictor begins to copy home gets a replica there, at any moment."""
    manager = manage("lru", 1 << 16)
    x = manager.adopt(torch.rand(4, 4)).toGPU()
    born, residency = [], manager.residency
    bear, storage_of = residency.born, results.storage_of

    def noted(*args: Any) -> Any:
        born.append(bear(*args))
        return born[-1]

    def moving(base: torch.Tensor) -> Any:
        for block in born:
            residency.copier.leaving.home_of(block)
        return storage_of(base)

    monkeypatch.setattr(residency, "born", noted)
    monkeypatch.setattr(results, "storage_of", moving)
    plan = plan_of(torch.ops.aten.sort.default)
    values, indices = SlowPath(plan, (x,), {}, manager).run()
    monkeypatch.undo()
    assert len(born) == 2
    expected = torch.sort(torch.tensor(x.tolist()))
    assert_same(expected.values, values)
    assert_same(expected.indices, indices)
