"""`tensorsManager.report()`: what it says, that it fits a screen, that looking moves nothing."""

import time
import weakref

import pytest
import torch

from ..support.device_double import LateDevice


@pytest.fixture(autouse=True)
def nobody_elses(manager, monkeypatch):
    """What earlier tests of this process keep (a library's own tensors) is not in the reports."""
    monkeypatch.setattr(manager.residency.books, "known", weakref.WeakValueDictionary())


def test_an_empty_report_has_every_part(manager):
    text = manager.report()
    assert "lru on sim:test" in text
    assert "host fallbacks: none" in text
    assert "held: none" in text


def test_the_largest_blocks_come_first(manager):
    small, large = manager.adopt(torch.rand(10)), manager.adopt(torch.rand(300, 300))
    text = manager.report()
    places = [text.index(f" {ref.proxyInfo.block} ") for ref in (large, small)]
    assert places == sorted(places)
    assert "cpu clean" in text


def test_what_is_held_is_named_with_who_holds_it(manager):
    ref, other = manager.adopt(torch.rand(100)), manager.adopt(torch.rand(100))
    array = ref.numpy()
    other.data_ptr()
    text = manager.report()
    assert "held: 2 blocks, 800 B" in text
    assert "exposed on cpu by numpy, while that lives" in text
    assert "exposed on cpu by data_ptr, for good" in text
    del array
    assert "by numpy" not in manager.report()


def test_fallbacks_are_counted_with_their_reason(manage):
    manager = manage(nbytes=1000)
    ref = manager.adopt(torch.rand(30, 30))
    for _ in range(3):
        ref = ref @ ref
    text = manager.report()
    assert "host fallbacks: 3" in text
    assert "3  the operator needs more than the budget" in text


def test_what_is_counted_is_counted_on_every_path_or_named(manage):
    manager = manage("lru", nbytes=100_000)
    a, b, c = (manager.adopt(torch.rand(100, 100), sole=True) for _ in range(3))  # two of them fit
    with torch.no_grad():
        for _ in range(300):
            for result in torch.add, torch.mul, torch.Tensor.view_as:
                result(a, a)
        for x in (b, c, a):
            torch.exp(x)
    stats = manager.stats()
    assert stats["op_count"] == 603
    by_path = [stats[f"{path}_op_count"] for path in ("ready", "slow", "native")]
    assert sum(by_path) == 603
    assert by_path[0] >= 590
    assert stats["miss_count"] == stats["fetch_count"] == 4
    assert "hit_count" not in stats
    text = manager.report()
    assert "operators  603 (views not counted): {} ready, {} slow, {} in 0".format(*by_path) in text
    assert f"4 misses; {stats['slow_hit_count']} hits on the slow path" in text


def test_it_fits_a_screen(manager):
    refs = [manager.adopt(torch.rand(50)) for _ in range(60)]
    arrays = [ref.numpy() for ref in refs]
    fallbacks = manager.residency.books.counts.host_fallbacks
    fallbacks.update({f"reason {number}": number for number in range(20)})
    lines = manager.report().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "  ... and 55 more" in lines
    assert len(arrays) == 60


def test_looking_moves_nothing(manager):
    ref = manager.adopt(torch.rand(50, 50))
    result = ref @ ref
    before = manager.stats(), result.proxyInfo, manager.log.tail(1)
    manager.report()
    assert (manager.stats(), result.proxyInfo, manager.log.tail(1)) == before


def test_time_and_stalls_begin_with_the_counts(manage):
    manager = manage("genoa")
    x = manager.adopt(torch.rand(1000))
    for _ in range(3):
        x + 1
    before = manager.stats()
    assert before["time_ns"] >= before["stall_ns"] > 0
    manager.reset_stats()
    assert (manager.stats()["time_ns"], manager.stats()["stall_ns"]) == (0, 0)
    for _ in range(3):
        x + 1
    again = manager.stats()
    assert again["time_ns"] >= again["stall_ns"] > 0
    assert again["time_ns"] < 2 * before["time_ns"]


def test_on_a_clock_on_the_wall_time_begins_with_the_device(manage):
    """The clock counts from the start of the machine."""
    manager = manage("lru")
    manager.device = LateDevice()
    began_ns = time.perf_counter_ns()
    manager.device = LateDevice()
    assert 0 <= manager.stats()["time_ns"] <= time.perf_counter_ns() - began_ns


@pytest.mark.parametrize("method", ["describe", "story"])
def test_what_is_no_ref_is_named(manager, method):
    ask = getattr(manager, method)
    with pytest.raises(TypeError, match=f"tensorsManager.{method}.. tells of one TensorRef"):
        ask(3)
    with pytest.raises(TypeError, match=r"this is a torch.Tensor. It is not managed.*adopt"):
        ask(torch.rand(3))
    with pytest.raises(
        TypeError, match=r"this is a torch.nn.modules.linear.Linear. Give it one of"
    ):
        ask(torch.nn.Linear(3, 3))
    assert ask(manager.adopt(torch.rand(3))) is not None
