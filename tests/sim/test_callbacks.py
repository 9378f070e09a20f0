"""Callbacks: each kind is told with names and bytes; errors are not swallowed; no lock is held."""

import threading

import pytest
import torch
from torch import nn

from torchTensorRef.base.activation import watch
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.listeners import KINDS, listeners
from torchTensorRef.memory.budget import OutOfBudgetError


@pytest.fixture
def told(manage):
    """Give `told(manager, *kinds)`: a list of what is told from then on."""
    callbacks = []

    def begin(manager, *kinds):
        found = []
        for kind in kinds:
            manager.on(kind, found.append)
            callbacks.append((manager, kind, found.append))
        return found

    yield begin
    for manager, kind, callback in callbacks:
        manager.off(kind, callback)
    assert not (listeners.any)
    assert not (watch.on)
    assert not (listeners.waiting)


def test_each_kind_is_told_and_its_bytes_are_those_of_the_counts(manage, told):
    manager = manage("lru", nbytes=100_000)
    found = told(manager, *KINDS)
    a, b, c = (manager.adopt(torch.rand(100, 100), sole=True) for _ in range(3))
    with torch.no_grad():
        for x in (a, b, c, a):
            x.mul_(2)
    stats = manager.stats()

    def nbytes(kind):
        return sum(one.nbytes for one in found if one.kind == kind)

    assert nbytes("fetch") == stats["fetched_nbytes"] + stats["prefetched_nbytes"] > 0
    assert nbytes("write_back") == stats["written_back_nbytes"] > 0
    assert nbytes("evict") == stats["dropped_nbytes"] > 0
    assert len([one for one in found if one.kind == "evict"]) == stats["evict_count"]
    ops = [one for one in found if one.kind == "op"]
    assert [one.name for one in ops] == ["aten.mul_.Tensor"] * 4
    stalls = [one for one in found if one.kind == "stall"]
    assert sum(one.end_ns - one.start_ns for one in stalls) == stats["stall_ns"] > 0
    assert a.proxyInfo.block in {one.name for one in stalls}
    assert "aten.mul_.Tensor waited for 1 blocks" in {one.cause for one in stalls}


def test_a_clean_one_is_dropped_without_a_copy(manage, told):
    manager = manage("lru", nbytes=100_000)
    found = told(manager, "drop", "evict", "write_back")
    refs = [manager.adopt(torch.rand(100, 100), sole=True) for _ in range(4)]
    for ref in refs:
        ref.sum()
    assert {one.kind for one in found} >= {"drop", "evict"}
    assert "lru: operands" in {one.cause.partition(",")[0] for one in found}


def test_parameters_go_by_their_names(manager, told):
    found = told(manager, "fetch")
    model = manager.adopt(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))))
    with torch.no_grad():
        model(torch.rand(1, 8))
    assert {"0.weight", "1.0.weight", "1.0.bias"} <= {one.name for one in found}


def test_lack_of_budget_is_told(manage, told):
    manager = manage("lru", nbytes=1000)
    found = told(manager, "out_of_budget")
    ref = manager.adopt(torch.rand(30, 30))
    ref @ ref
    with pytest.raises(OutOfBudgetError):
        ref.toGPU()
    assert [one.name for one in found] == ["aten.mm.default", ref.proxyInfo.block]
    assert found[0].cause == "the operator needs more than the budget"


def test_a_callback_may_run_operators_and_is_not_told_of_them(manager):
    seen = []

    def look(happening):
        total = x + x
        seen.append((happening.kind, happening.name, float(total.sum())))
        y.toGPU()
        manager.report()

    x, y = (manager.adopt(torch.ones(4)) for _ in range(2))
    for kind in ("fetch", "op"):
        manager.on(kind, look)
    try:
        x * x
    finally:
        for kind in ("fetch", "op"):
            manager.off(kind, look)
    assert [(kind, name) for kind, name, _ in seen] == [
        ("fetch", x.proxyInfo.block),
        ("op", "aten.mul.Tensor"),
    ]
    assert {total for *_, total in seen} == {8.0}


def test_no_lock_is_held_while_one_runs(manage):
    manager = manage("lru", nbytes=100_000)
    answers = []
    mine = threading.get_ident()

    def others_get_on(happening):
        if threading.get_ident() != mine:
            return  # told of what the other thread does

        def use():
            z = manager.adopt(torch.rand(50, 50))
            with manager.residency.feed.lock, manager.residency.books.lock:
                pass
            answers.append(float((z @ z).sum()))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()

    refs = [manager.adopt(torch.rand(100, 100), sole=True) for _ in range(4)]
    for kind in ("fetch", "drop", "write_back", "op", "out_of_budget"):
        manager.on(kind, others_get_on)
    try:
        for ref in refs:
            ref.mul_(2)
        refs[0].toCPU()
    finally:
        for kind in ("fetch", "drop", "write_back", "op", "out_of_budget"):
            manager.off(kind, others_get_on)
    assert len(answers) >= 8


@pytest.mark.timeout(60)
def test_callbacks_may_wait_for_others_while_devices_are_exchanged(manager):
    """They are called when that is over: others may run operators, and devices be exchanged."""
    x, y = (manager.adopt(torch.ones(1000)).toGPU().mul_(2) for _ in range(2))
    device, seen, mine = manager.residency.books.main, [], threading.get_ident()

    def others_get_on(happening):
        if threading.get_ident() != mine or seen:
            return
        seen.append(happening.name)
        thread = threading.Thread(target=lambda: seen.append(float(y.sum())), daemon=True)
        thread.start()
        thread.join(timeout=20)
        manager.device = device

    manager.on("evict", others_get_on)
    try:
        manager.device = "cpu"
    finally:
        manager.off("evict", others_get_on)
    assert seen[1:] == [2000.0]
    assert manager.device == device.name
    assert x.tolist() == [2.0] * 1000


def test_what_is_said_in_a_callback_or_beside_an_error_is_not_lost(manager):
    x, said = manager.adopt(torch.ones(4)), []

    def says(happening):
        listeners.later(lambda: said.append(happening.name))
        x + 1

    def warn():
        raise RuntimeWarning("said")

    manager.on("op", says)
    try:
        x + 1
    finally:
        manager.off("op", says)
    x.toGPU()
    listeners.later(warn)
    with pytest.raises(ConfigError) as caught:
        x.toGPU("nowhere")
    assert len(said) == 1
    assert caught.value.__notes__ == ["And RuntimeWarning: said"]


def test_an_error_is_told_with_the_name_and_the_others_are_called(manager):
    def broken(happening):
        raise ZeroDivisionError("in my own code")

    others = []
    x = manager.adopt(torch.ones(4))
    manager.on("fetch", broken)
    manager.on("fetch", others.append)
    try:
        with pytest.raises(ZeroDivisionError, match="in my own code") as caught:
            x + x
    finally:
        manager.off("fetch", broken)
        manager.off("fetch", others.append)
    note = caught.value.__notes__[0]
    assert "broken" in note
    assert "'fetch'" in note
    assert x.proxyInfo.block in note
    assert len(others) == 1
    assert (x + x).tolist() == [2.0] * 4


def test_an_error_after_a_write_counts_its_version(manager):
    def broken(happening):
        raise ValueError("no")

    leaf = manager.adopt(torch.rand(8)).requires_grad_()
    x = leaf * 1
    squared = x * x
    manager.on("op", broken)
    try:
        with pytest.raises(ValueError, match="no"), torch.no_grad():
            x.add_(1)
    finally:
        manager.off("op", broken)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_what_is_misspelt_is_refused(manager):
    with pytest.raises(ConfigError, match="Did you mean 'fetch'"):
        manager.on("fetsch", print)
    with pytest.raises(ConfigError, match="A callback is a function"):
        manager.on("fetch", 3)
    with pytest.raises(ConfigError, match="is not called for 'fetch'"):
        manager.off("fetch", print)
    with pytest.raises(ConfigError, match=r"kind None is told\. Known: drop"):
        manager.on(None, print)
    with pytest.raises(ConfigError, match="<lambda> takes other arguments: a callback is called"):
        manager.on("fetch", lambda: None)


def test_what_is_new_is_not_taken_for_what_stays(manage):
    """After a thousand operators each input was, at its second use."""
    manager = manage("flow")
    weight = manager.adopt(torch.rand(8, 8))
    manager.residency.books.tick = 5000
    x = manager.adopt(torch.rand(3, 8))
    manager.residency.books.is_pressed = True
    x @ weight
    x @ weight
    assert not x._ttr_block.is_persistent
    assert not x.clone()._ttr_block.is_persistent
    manager.residency.books.tick = 7000
    x._ttr_block.ready = None  # it is told of
    x @ weight
    assert x._ttr_block.is_persistent


def test_looking_on_changes_no_decision(manage):
    """The same operators take the same paths, and the same bytes move."""
    outcomes = []
    for is_looked_on in (False, False, True):  # at first nobody knows what results take
        manager = manage("flow", nbytes=60_000)
        torch.manual_seed(1)
        model = manager.adopt(nn.Sequential(*(nn.Linear(50, 50) for _ in range(8))))
        x = manager.adopt(torch.rand(3, 50))
        found = []
        if is_looked_on:
            manager.on("op", found.append)
        with torch.no_grad():
            for _ in range(6):
                y = model(x)
                y = (y * 2).exp().mean(-1) + 1
        stats = manager.stats()
        names = ("fetched_nbytes", "prefetched_nbytes", "dropped_nbytes", "op_count",
                 "ready_op_count", "stall_ns", "time_ns")  # fmt: skip
        outcomes.append([stats[name] for name in names])
        if is_looked_on:
            manager.off("op", found.append)
            assert len(found) == stats["op_count"]
    assert outcomes[1] == outcomes[2]
