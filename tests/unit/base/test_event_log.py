"""The event log."""

import json
import threading

import pytest

from torchTensorRef.base.event_log import EventLog


@pytest.fixture
def log():
    log = EventLog(capacity=3)
    log.note("b7", "fetch sim:0", "aten.mm reads it")
    log.note("b8", "fetch sim:0", "aten.mm reads it")
    log.note("b7", "drop sim:0", "lru: 40 bytes needed")
    return log


def test_a_story_is_about_one_block(log):
    assert log.story("b7") == [
        "     1 fetch sim:0 (aten.mm reads it)",
        "     3 drop sim:0 (lru: 40 bytes needed)",
    ]
    assert log.story("b9") == []


def test_it_is_a_list_and_shows_line_by_line(log):
    assert str(log.story("b7")) == (
        "     1 fetch sim:0 (aten.mm reads it)\n     3 drop sim:0 (lru: 40 bytes needed)"
    )
    assert repr(log.tail(1)) == "     3 b7 drop sim:0 (lru: 40 bytes needed)"
    assert repr(log.story("b9")) == "(nothing has happened)"
    assert json.loads(json.dumps(log.story("b7"))) == log.story("b7")


def test_the_oldest_is_forgotten_first(log):
    log.note("b9", "fetch sim:0", "aten.add reads it")
    assert [step for step, *_ in log.records()] == [2, 3, 4]
    assert len(log) == 3


def test_the_tail_names_its_blocks(log):
    assert log.tail(2) == [
        "     2 b8 fetch sim:0 (aten.mm reads it)",
        "     3 b7 drop sim:0 (lru: 40 bytes needed)",
    ]
    assert log.tail(0) == []
    assert len(log.tail(99)) == 3


def test_a_sink_sees_what_is_noted(log):
    seen = []
    log.sink = seen.append
    log.note("b1", "evict sim:0", "asked for")
    assert seen == [(4, "b1", "evict sim:0", "asked for")]


def test_steps_go_on_after_clearing(log):
    log.clear()
    log.note("b1", "fetch sim:0", "again")
    assert log.records() == [(4, "b1", "fetch sim:0", "again")]


def test_threads_write_while_another_reads():
    log = EventLog(capacity=500)
    start = threading.Barrier(5)

    def write(name):
        start.wait()
        for number in range(2000):
            log.note(name, f"event {number}", "test")

    threads = [threading.Thread(target=write, args=(f"b{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        assert len(log.records()) <= 500
    for thread in threads:
        thread.join()
    steps = [step for step, *_ in log.records()]
    assert len(set(steps)) == len(steps) == 500
    assert max(steps) == 8000
