"""The timeline: a valid Chrome trace whose bytes are those of the counts, a table, a picture."""

import json
from collections import deque

import pytest
import torch
from torch import nn

from torchTensorRef.__main__ import main
from torchTensorRef.base.activation import watch
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.listeners import Happening, listeners
from torchTensorRef.base.timeline_tracks import COMPUTE, D2H, H2D, HOST, STALLS, TRACKS
from torchTensorRef.base.units import format_nbytes, format_ns
from torchTensorRef.diagnostics.traces.picture import draw, used_blocks
from torchTensorRef.diagnostics.traces.recording import read
from torchTensorRef.interception.onlookers.passing import recorders

#: A layer of 40,400 bytes, six of them.
WIDTH, DEPTH = 100, 6


def program(manager):
    """Run a model of which half fits, with gradients, so that there are write-backs, too."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
    manager.adopt(model)
    x = manager.adopt(torch.rand(4, WIDTH))
    for _ in range(3):
        y = x
        for layer in model.layers:
            y = torch.tanh(layer(y))
        y.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return model


@pytest.fixture(params=["lru", "flow"])
def recorded(request, manage, tmp_path):
    """The path of a timeline, and the statistics of its time."""
    manager = manage(request.param, nbytes=DEPTH * 40_400 // 2)
    path = tmp_path / "run.json"
    manager.reset_stats()
    with manager.trace(str(path)):
        program(manager)
        stats = manager.stats()
    assert not (watch.on)
    assert not (listeners.any)
    assert not recorders
    return path, stats


def validate(trace):
    """Hold a trace against the format: JSON objects, known phases, pairs, times per track."""
    begun: dict[int, list[str]] = {}
    last: dict[object, float] = {}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in "BECiM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        track = event["pid"], event.get("tid", event["name"])
        assert event["ts"] >= last.get(track, 0.0)
        last[track] = event["ts"]
        if event["ph"] == "B":
            begun.setdefault(track, []).append(event["name"])
            assert len(begun[track]) == 1, "an engine does one thing at a time"
        elif event["ph"] == "E":
            assert begun[track].pop() == event["name"]
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
    assert not any(begun.values()), "something never ended"


def test_it_is_a_chrome_trace_with_the_bytes_of_the_counts(recorded):
    path, stats = recorded
    trace = json.loads(path.read_text())
    validate(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "B"]

    def nbytes(track):
        return sum(e["args"]["nbytes"] for e in slices if e["tid"] == track)

    assert nbytes(H2D) == stats["fetched_nbytes"] + stats["prefetched_nbytes"] > 0
    assert nbytes(D2H) == stats["written_back_nbytes"] > 0
    evicted = [e for e in trace["traceEvents"] if e.get("cat") == "evict"]
    assert sum(e["args"]["nbytes"] for e in evicted) == stats["dropped_nbytes"] > 0
    assert len(evicted) == stats["evict_count"]
    ahead = [e for e in slices if e["cat"] == "prefetch"]
    assert sum(e["args"]["nbytes"] for e in ahead) == stats["prefetched_nbytes"]
    ops = [e for e in slices if e["cat"] == "op"]
    assert len(ops) == stats["op_count"]
    assert trace["torchTensorRef"]["stats"]["fetched_nbytes"] == stats["fetched_nbytes"]
    names = {e["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"process_name", "thread_name"} <= names


def test_it_names_blocks_and_says_what_was_waited_for(recorded):
    path, stats = recorded
    recording = read(path)
    assert "fetch layers.3.weight" in {s.name for s in recording.slices[H2D]}
    assert {"layers.0", "layers.5"} <= {s.args.get("module") for s in recording.slices[1]}
    stalled_us = recording.busy_us(STALLS)
    assert stalled_us == pytest.approx(stats["stall_ns"] / 1000)
    assert any(s.name.startswith("waits for layers.") for s in recording.slices[STALLS])
    budget = recording.about["budget_nbytes"]
    assert max(nbytes for _, nbytes in recording.residency) <= budget
    assert any(s.args["born"] and s.args["flops"] for s in recording.slices[1])
    assert {n for s in recording.slices[1] for n in s.args["dead"]}


def test_the_table_and_the_picture(recorded, capsys, tmp_path):
    path, _ = recorded
    assert main(["trace", "summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert "layers.0.weight" in text
    assert "aten.addmm.default" in text
    assert all(name in text for name in TRACKS.values())
    assert "stalls: waited for" in text
    pytest.importorskip("matplotlib")
    assert main(["trace", "plot", str(path), str(path), "--output", str(tmp_path / "a.png")]) == 0
    from PIL import Image

    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > picture.size[1] > 500


def test_the_title_has_the_figures_and_an_empty_row_says_so(recorded, monkeypatch, tmp_path):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    recording = read(recorded[0])
    number = int(used_blocks(recording)[0])
    recording.about["blocks"][str(number)][:] = ["embedding.weight", 40_000, True]
    recording.slices[H2D] = [s for s in recording.slices[H2D] if s.args["block"] != number]
    draw([recording, recording], str(tmp_path / "a.png"), title="decode")
    copied = recording.nbytes(H2D) + recording.nbytes(D2H)
    figures = f"{recording.about['strategy']} {format_ns(int(recording.end_us * 1000))}"
    title = drawn[0].get_suptitle()
    assert title.startswith("decode\n")
    assert title.count(f"{figures} and {format_nbytes(copied)} copied") == 2
    rows = drawn[0].axes[0]
    place = [label.get_text().split()[0] for label in rows.get_yticklabels()].index("embedding")
    assert [t.get_position()[1] for t in rows.texts if t.get_text() == "never resident"] == [place]


def test_it_is_written_after_an_error_too_and_may_be_cut(manager, tmp_path):
    path = tmp_path / "run.json"
    x = manager.adopt(torch.rand(50))

    def fail():
        with manager.trace(str(path), limit=3):
            for _ in range(5):
                x + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    recording = read(path)
    assert recording.about["is_cut"]
    validate(json.loads(path.read_text()))


def test_what_cannot_be_written_or_read_is_said(manager, tmp_path, capsys):
    with pytest.raises(ConfigError, match="there is no folder"):
        manager.trace(str(tmp_path / "no" / "run.json"))
    (tmp_path / "other.json").write_text("{}")
    assert main(["trace", "summary", str(tmp_path / "other.json")]) == 2
    assert "is no timeline of ours" in capsys.readouterr().err
    assert main(["trace", "summary", str(tmp_path / "none.json")]) == 2


def test_what_is_missing_of_a_timeline_is_said(manager, tmp_path, capsys):
    whole, part = tmp_path / "run.json", str(tmp_path / "part.json")
    x = manager.adopt(torch.rand(50))
    with manager.trace(str(whole)):
        for _ in range(5):
            x + 1
    (tmp_path / "part.json").write_text(whole.read_text()[:900])
    for kind in "summary", "replay", "plot":
        assert main(["trace", kind, part]) == 2
        assert "is not whole: it breaks off at character" in capsys.readouterr().err

    value = json.loads(whole.read_text())
    events = value["traceEvents"]
    last = next(event for event in reversed(events) if event["ph"] == "E")
    lacking = {**value, "traceEvents": [event for event in events if event is not last]}
    (tmp_path / "part.json").write_text(json.dumps(lacking))
    assert main(["trace", "summary", part]) == 2
    assert "1 operators or copies have lost their begin or end" in capsys.readouterr().err

    value["torchTensorRef"]["version"] = 99
    (tmp_path / "part.json").write_text(json.dumps(value))
    assert main(["trace", "summary", part]) == 2
    assert "is a timeline of format 99" in capsys.readouterr().err


def test_a_timeline_that_was_cut_says_so_and_is_not_replayed(manager, tmp_path, capsys):
    path = str(tmp_path / "run.json")
    x = manager.adopt(torch.rand(50))
    with manager.trace(path, limit=3):
        for _ in range(5):
            x + 1
    said = "The timeline was cut: it has 1 of 5 operators. trace(path, limit=...) keeps more"
    for kind in "summary", "plot":
        assert main(["trace", kind, path]) == 0
        assert said in capsys.readouterr().out
    assert main(["trace", "replay", path]) == 2
    assert f"A replay needs the whole run. {said}" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [0, -1, "3", None])
def test_a_limit_is_a_number_of_events(manager, tmp_path, limit):
    with pytest.raises(ConfigError, match="write a whole number of events, from 1 on"):
        manager.trace(tmp_path / "run.json", limit=limit)
    with pytest.raises(ConfigError, match="takes the path of a file to write, not None"):
        manager.trace(None)


def test_a_timeline_changes_no_decision(manage, tmp_path):
    outcomes = []
    for is_traced in (False, False, True):  # at first nobody knows what results take
        manager = manage("flow", nbytes=DEPTH * 40_400 // 2)
        if is_traced:
            with manager.trace(str(tmp_path / "run.json")):
                program(manager)
        else:
            program(manager)
        stats = manager.stats()
        names = ("fetched_nbytes", "prefetched_nbytes", "written_back_nbytes", "op_count",
                 "ready_op_count", "stall_ns", "time_ns")  # fmt: skip
        outcomes.append([stats[name] for name in names])
    assert outcomes[1] == outcomes[2]


def test_each_of_several_accelerators_is_shown(manage, tmp_path, capsys):
    """It showed the first one, and what the other had run as run by the host."""
    manager = manage("venice", nbytes=DEPTH * 40_400 // 2, count=2)
    path, told = tmp_path / "run.json", []
    manager.reset_stats()
    manager.on("op", told.append)
    try:
        with manager.trace(str(path)):
            program(manager)
            stats = manager.stats()
    finally:
        manager.off("op", told.append)
    validate(json.loads(path.read_text()))
    first, second = read(path).each
    assert (first.about["device"], second.about["device"]) == ("sim:test", "sim:test1")
    assert {one.device for one in told} == {"sim:test", "sim:test1"}
    assert len(first.slices[COMPUTE]) + len(second.slices[COMPUTE]) == stats["op_count"]
    assert not first.slices[HOST]
    for one in (first, second):
        found, by_device = one.about["device"], stats["by_device"]
        assert one.nbytes(H2D) == by_device[found]["fetched_nbytes"] > 0
        assert one.busy_us(COMPUTE) * 1000 == pytest.approx(by_device[found]["compute_ns"])
        assert one.busy_us(STALLS) * 1000 == pytest.approx(by_device[found]["stall_ns"])
        assert one.residency
    assert first.evict_count + second.evict_count == stats["evict_count"]
    assert main(["trace", "summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert "venice on sim:test," in text
    assert "venice on sim:test1," in text
    assert "sim:test1 compute" in text
    assert main(["trace", "replay", str(path), "--strategy", "lru"]) == 0
    assert "Recorded on sim:test, sim:test1; the replay has one" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["trace", "plot", str(path)]) == 0
    assert (tmp_path / "run.png").exists()


def test_where_the_host_is_all_there_is(manager, tmp_path):
    """A KeyError of a ledger that the host has not."""
    path = str(tmp_path / "run.json")
    before = manager.residency.books.main
    manager.device = "cpu"
    try:
        with manager.trace(path):
            manager.adopt(torch.rand(50)) + 1
        assert len(read(path).slices[COMPUTE]) == 1
    finally:
        manager.device = before


class Emptied(deque):
    """A deque from which another thread takes all that is left after its first one is taken."""

    def popleft(self):
        found = super().popleft()
        self.clear()
        return found


def test_threads_take_what_has_died_from_each_other(manager, tmp_path):
    """An IndexError in an operator of the program."""
    x = manager.adopt(torch.ones(4))
    with manager.trace(str(tmp_path / "run.json")) as timeline:
        timeline._dead = Emptied([1, 2, 3])
        assert (x + 1).tolist() == [2, 2, 2, 2]


class Copied:
    """A copy that ends when it is looked at; another thread notes the next one meanwhile."""

    def __init__(self, timeline=None):
        self.timeline = timeline

    def is_done(self):
        if self.timeline is not None:
            self.timeline.note(happening("second"), Copied())
        return True


def happening(name):
    return Happening("fetch", name, 8, "sim:test", "", 1, 0)


def test_a_copy_that_is_noted_while_others_are_looked_at_ends_too(manager, tmp_path):
    with manager.trace(str(tmp_path / "run.json")) as timeline:
        manager.adopt(torch.ones(4)) + 1  # and the clock has begun
        timeline.note(happening("first"), Copied(timeline))
        timeline._see_ends()
    fetches = {one.name: one for one, _ in timeline.events if one.name in ("first", "second")}
    assert set(fetches) == {"first", "second"}
    assert all(one.end_ns for one in fetches.values())
