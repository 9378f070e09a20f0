"""The benchmark against peers: its bound, its plan, what it does when seats fail, what it says."""

import importlib.util
import json
import os
import subprocess

import pytest
import torch

from benchmarks.baseline import Figure
from benchmarks.small_gpu import __main__ as command
from benchmarks.small_gpu import calls, table, weights, workloads
from benchmarks.small_gpu.bound import Needs, bound, roofline_s
from benchmarks.small_gpu.compare import figures_of_ours
from benchmarks.small_gpu.contestants import CONTESTANTS, reason_not
from benchmarks.small_gpu.machine import Machine
from benchmarks.small_gpu.plan import NO_CAP, Seat, Selection, State, seats, selection_of
from benchmarks.small_gpu.processes import Ending
from benchmarks.small_gpu.scales import CAPS, SCALES, WORKLOADS
from benchmarks.small_gpu.seat import SPOILED, figures

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the models are transformers'"
)

GB = 10**9
LLAMA = Needs(14 * GB, 1, 1 * GB, 0.010)


# -- the bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "cap", "link", "seconds", "streamed"),
    [
        # 14 GB read, 7 - 1 GB of room: 8 GB at 50 GB/s.
        (LLAMA, 7 * GB, 50 * GB, 0.160, 8 * GB),
        # All fits beside the rest: what the all-resident run takes.
        (LLAMA, 15 * GB, 50 * GB, 0.010, 0),
        # There is room for the weights, but not for the rest as well.
        (LLAMA, 14 * GB, 50 * GB, 0.020, 1 * GB),
        # Arithmetic takes longer than the copies.
        (LLAMA._replace(compute_s=0.5), 7 * GB, 50 * GB, 0.5, 8 * GB),
        # Two sweeps per step, each of which keeps the same.
        (LLAMA._replace(passes=2), 7 * GB, 50 * GB, 0.320, 16 * GB),
        # The rest alone is more than the cap: everything is streamed.
        (LLAMA, 1 * GB // 2, 10 * GB, 1.4, 14 * GB),
    ],
)
def test_the_bound_is_what_one_finds_by_hand(needs, cap, link, seconds, streamed):
    found = bound(needs, cap, link)
    assert found.seconds == pytest.approx(seconds)
    assert found.streamed_nbytes == streamed


def test_the_roofline_is_the_slower_of_reading_and_arithmetic():
    # One token: 14 GB at 2000 GB/s. 1000 tokens: 7e9 weights x 2 x 1000 at 100 TFLOP/s.
    assert roofline_s(14 * GB, 1, 1, 2000 * GB, 100e12) == pytest.approx(0.007)
    assert roofline_s(14 * GB, 1, 1000, 2000 * GB, 100e12) == pytest.approx(0.14)


# -- the plan --------------------------------------------------------------------------------------


def test_every_seat_is_visited_once_a_round_after_the_references():
    found = seats(Selection(), 2, ("plain",))
    assert len(found) == len(set(found))
    families = set(WORKLOADS.values())
    assert {s.family for s in found[: len(families)]} == families
    assert all(s.cap == NO_CAP for s in found[: len(families)])
    assert len(found) == len(families) * (1 + 2 * len(CAPS) * len(CONTESTANTS))


def test_the_order_of_contestants_changes_with_the_cap_and_turns_around_with_the_round():
    found = seats(selection_of("decode1"), 2, ())
    orders = [
        [s.contestant for s in found if (s.round, s.cap) == (r, c)] for r in (0, 1) for c in CAPS
    ]
    assert len({order[0] for order in orders[: len(CAPS)]}) == len(CAPS)
    assert orders[len(CAPS)] == list(reversed(orders[1]))


def test_only_refuses_a_name_that_is_none():
    with pytest.raises(ValueError, match="'decode2' is none of decode1, "):
        selection_of("decode2")
    assert selection_of("diffusers").contestants == ("diffusers block", "diffusers leaf")


def measured(*steps_s, **changes):
    memory = dict.fromkeys(("allocated", "reserved", "page_locked", "rss", "in_steps"), 100)
    return {
        "status": "measured",
        **figures(list(steps_s)),
        "first_s": steps_s[0],
        "is_comparable": True,
        "is_repeatable": True,
        "headroom_nbytes": 0,
        "memory": {**memory, "between_steps": 0},
        "counts": {},
        "note": "",
        **changes,
    }


def test_a_state_is_found_again_and_only_with_the_same_options(tmp_path):
    path = tmp_path / "state.json"
    state = State.open(path, {"scale": "tiny"}, resume=True)
    seat = Seat(0, "llama", 50, "flow")
    state.put(seat, "decode1", measured(1.0))
    state.save()
    again = State.open(path, {"scale": "tiny"}, resume=True)
    assert again.pending(seat, ["decode1", "prefill"]) == ["prefill"]
    assert State.open(path, {"scale": "tiny"}, resume=False).cells == {}
    with pytest.raises(ValueError, match="run with"):
        State.open(path, {"scale": "full"}, resume=True)


def test_rounds_are_pooled_and_one_failure_is_a_failure(tmp_path):
    state = State(tmp_path / "state.json", {})
    for round_, step_s in enumerate((1.0, 3.0)):
        row = measured(step_s, memory={"rss": round_, "allocated": None})
        state.put(Seat(round_, "llama", 50, "lru"), "decode1", row)
    row = state.row("decode1", 50, "lru")
    assert (row["step_s"], row["memory"]) == (2.0, {"rss": 1, "allocated": None})
    state.put(Seat(2, "llama", 50, "lru"), "decode1", {"status": "failed", "reason": "why"})
    assert state.row("decode1", 50, "lru")["status"] == "failed"


# -- seats that fail -------------------------------------------------------------------------------


class Scripted:
    """Stands for the processes: answers each job from a list of endings, and keeps the jobs."""

    folder = "nowhere"

    def __init__(self, endings):
        self.is_forking = True
        self.endings = list(endings)
        self.jobs = []

    def run(self, name, job, limit_s):
        self.jobs.append(json.loads(json.dumps(job)))
        events, status = self.endings.pop(0)
        return Ending(events, status, 0.1)

    def last_line(self, name):
        return "its last words"


def bench(tmp_path, *endings, minutes="5", resume=False):
    arguments = ["--dry", "--scale", "tiny", "--state", str(tmp_path), "--minutes", minutes]
    made = command.Bench(command.parse([*arguments, *(["--resume"] if resume else [])]))
    made.processes = Scripted(endings)
    return made


def event(name, workload, **more):
    return {"event": name, "workload": workload, **more}


def said(workload):
    row = {k: v for k, v in measured(1.0).items() if k != "status"}
    return event("measured", workload, **row)


NO_ROOM = "OutOfMemoryError: out of memory"
ACCELERATE = Seat(0, "llama", 50, "accelerate")


def test_where_memory_ends_the_next_headroom_is_tried_for_what_is_left(tmp_path):
    full = event("out of memory", "decode16", reason=NO_ROOM)
    rest = [said("decode16"), said("prefill")]
    made = bench(tmp_path, ([said("decode1"), full], f"exit {SPOILED}"), (rest, "ended"))
    made._run_seat(ACCELERATE)
    first, second = made.processes.jobs
    assert first["workloads"] == ["decode1", "decode16", "prefill"]
    assert second["workloads"] == ["decode16", "prefill"]
    assert second["headroom_nbytes"] == 2 * first["headroom_nbytes"] > 0
    assert made.state.row("prefill", 50, "accelerate")["status"] == "measured"


def test_when_no_headroom_is_enough_the_cell_says_so(tmp_path):
    full = ([event("out of memory", "decode1", reason=NO_ROOM)], f"exit {SPOILED}")
    tries = len(CONTESTANTS["accelerate"].headrooms(459840, 919680))
    rest = ([said("decode16"), said("prefill")], "ended")
    made = bench(tmp_path, *[full] * tries, rest)
    made._run_seat(ACCELERATE)
    row = made.state.row("decode1", 50, "accelerate")
    assert row == {"status": "failed", "reason": f"with every headroom tried, {NO_ROOM}"}


def test_a_process_that_dies_fails_the_cell_it_was_at_and_no_other(tmp_path):
    died = ([event("started", None), event("started", "decode1")], "ended by signal 9")
    rest = ([said("decode16"), said("prefill")], "ended")
    made = bench(tmp_path, died, rest)
    made._run_seat(Seat(0, "llama", 50, "flow"))
    row = made.state.row("decode1", 50, "flow")
    assert row["reason"] == "its process ended by signal 9; its last words"
    assert made.processes.jobs[1]["workloads"] == ["decode16", "prefill"]


def test_a_model_that_cannot_be_placed_fails_all_cells_of_its_seat(tmp_path):
    made = bench(tmp_path, ([event("failed", None, reason="TypeError: no")], f"exit {SPOILED}"))
    made._run_seat(Seat(0, "llama", 50, "flow"))
    for workload in ("decode1", "decode16", "prefill"):
        assert made.state.row(workload, 50, "flow")["reason"] == "TypeError: no"


def test_plain_torch_is_skipped_where_the_weights_do_not_fit(tmp_path):
    made = bench(tmp_path)
    made._run_seat(Seat(0, "llama", 75, "plain"))
    row = made.state.row("prefill", 75, "plain")
    assert row["status"] == "skipped"
    assert "0.00092 GB, and the cap is 0.00069 GB" in row["reason"]


def test_what_is_not_installed_is_skipped_with_that_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason_not(CONTESTANTS["accelerate"], "decode1", 1, 1) == "accelerate is not installed"
    assert reason_not(CONTESTANTS["flow"], "training", 1, 1) == "peft is not installed"
    assert reason_not(CONTESTANTS["flow"], "decode1", 1, 1) is None


def test_what_was_measured_before_a_call_ended_is_kept(tmp_path):
    made = bench(tmp_path, ([said("decode1"), event("started", "decode16")], "stopped after 60 s"))
    made.options.seat_seconds = 10**6
    with pytest.raises(command.OutOfTime):
        made._run_seat(Seat(0, "llama", 50, "flow"))
    again = bench(tmp_path, ([said("decode16"), said("prefill")], "ended"), resume=True)
    again._run_seat(Seat(0, "llama", 50, "flow"))
    assert again.processes.jobs[0]["workloads"] == ["decode16", "prefill"]


PROBE = {
    "event": "probe",
    "probe": {
        "link": {"h2d": {"4": 1e6}},
        "h2d_bytes_per_s": 1e6,
        "d2h_bytes_per_s": 1e6,
        "memory_bytes_per_s": 1e7,
        "flops_per_s": 1e9,
    },
    "digest": "0",
    "hardware": {"device": "one"},
    "total_nbytes": 0,
}


def test_a_call_ends_with_its_minutes_and_the_next_one_goes_on(tmp_path):
    made = bench(tmp_path, minutes="0")
    assert made.run() is False
    assert made.processes.jobs == []
    done = [said("decode1"), said("decode16"), said("prefill")]
    made = bench(tmp_path, *[([PROBE], "ended")] * 3, (done, "ended"), minutes="5")
    made._prepare()
    made._run_seat(Seat(0, "llama", 50, "flow"))
    again = bench(tmp_path, (done, "ended"), resume=True)
    again._prepare()
    again._run_seat(Seat(0, "llama", 50, "flow"))
    assert again.processes.jobs == [], "what was measured is not measured again"
    again._run_seat(Seat(0, "llama", 25, "flow"))
    assert [job["cap_nbytes"] for job in again.processes.jobs] == [919680 // 4]


def test_where_a_forked_process_cannot_use_the_accelerator_others_are_started_afresh(tmp_path):
    arguments = ["--device", "cpu", "--scale", "tiny", "--state", str(tmp_path)]
    made = command.Bench(command.parse([*arguments, "--only", "decode1"]))
    made.processes = Scripted([([], "exit 1"), ([PROBE], "ended")])
    made._prepare()
    assert made.state.probes["llama"] == PROBE
    again = command.Bench(command.parse([*arguments, "--resume"]))
    assert not again.processes.is_forking
    made = bench(tmp_path / "dry", ([], "exit 1"))
    with pytest.raises(RuntimeError, match="the probe exit 1"):
        made._prepare()


class Module:
    """The names of torch's module of a kind of accelerator that a machine asks for."""

    def __init__(self):
        self.calls, self.peak, self.held = [], 0, 0

    def mem_get_info(self, index):
        return 700, 1000

    def set_per_process_memory_fraction(self, fraction, index):
        self.calls.append((fraction, index))

    def reset_peak_memory_stats(self, index):
        self.peak = self.held

    def max_memory_allocated(self, index):
        return self.peak

    def max_memory_reserved(self, index):
        return self.peak + 1

    def memory_allocated(self, index):
        return self.held

    def use(self, peak, held):
        self.peak, self.held = max(self.peak, peak), held


def test_the_cap_and_the_peaks_are_those_of_torchs_allocator():
    machine = Machine("cpu")
    module = machine.module = Module()
    assert machine.cap(250)
    assert module.calls == [(0.25, 0)]
    machine.reset_peaks()
    module.use(peak=50, held=10)  # loading, a prompt
    machine.begin_steps()
    module.use(peak=30, held=12)
    machine.end_step()
    module.use(peak=20, held=14)
    machine.end_step()
    memory = machine.memory()
    assert (memory["allocated"], memory["reserved"]) == (50, 51)
    assert (memory["in_steps"], memory["between_steps"]) == (30, 12)
    assert memory["driver"] == 300
    assert memory["rss"] > 10**7


# -- the page --------------------------------------------------------------------------------------


def test_a_cell_without_figures_and_without_a_reason_is_found():
    place = {"workload": "prefill", "cap": 50, "contestant": "flow"}
    good = {**place, **measured(1.0)}
    skipped = {**place, "status": "skipped", "reason": "no room"}
    assert table.unexplained([good, skipped]) == []
    silent = {**place, "status": "failed", "reason": " "}
    empty = {**place, **measured(0.0)}
    assert table.unexplained([silent, empty]) == ["prefill/50/flow"] * 2
    assert table.cells_of(skipped)[-1] == "skipped: no room"
    assert len(table.cells_of(skipped)) == len(table.HEADINGS)


def test_times_that_say_nothing_are_in_parentheses_and_have_no_share():
    place = {"workload": "prefill", "cap": 50, "contestant": "flow", "cap_nbytes": 200, "same": {}}
    texts = table.cells_of({**place, **measured(0.25, is_comparable=False)})
    assert texts[3] == "(250 ms)"
    assert texts[table.HEADINGS.index("of bound")] == "-"
    assert texts[table.HEADINGS.index("allocated")] == "100 B (50%)"
    assert texts[table.HEADINGS.index("same")] == "no reference"
    assert len(texts) == len(table.HEADINGS)


def test_the_page_of_a_run_that_is_not_finished_says_so(tmp_path):
    made = bench(tmp_path, *[([PROBE], "ended")] * 3)
    made._prepare()
    page = table.page(made.comparison, Selection(), "the command")
    cells = len(WORKLOADS) * len(CAPS) * len(CONTESTANTS)
    assert page.count("not run: the run is not finished") == cells
    assert "(roofline)" in page


def test_in_a_folder_the_page_has_the_name_of_the_device(tmp_path):
    state = State(tmp_path / "state.json", {"scale": "full"})
    state.probes["llama"] = {"hardware": {"device": "cuda:0 (NVIDIA H200)"}}
    assert command.page_path(tmp_path, state).name == "small_gpu_cuda_0_nvidia_h200_full.md"
    assert command.page_path(tmp_path / "mine.md", state).name == "mine.md"


# -- make gpu --------------------------------------------------------------------------------------


@pytest.fixture
def calls_made(tmp_path, monkeypatch):
    """In an empty tree: give `answer(statuses)`, and the commands that were run."""
    monkeypatch.chdir(tmp_path)
    for folder in calls.TESTED:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "some.py").touch()
    made, statuses = [], []

    def run(arguments, **options):
        made.append(" ".join(arguments[1:]))
        return subprocess.CompletedProcess(arguments, statuses.pop(0))

    monkeypatch.setattr(calls.subprocess, "run", run)
    return statuses, made


def test_calls_go_on_until_all_is_done(calls_made):
    statuses, made = calls_made
    statuses += [0, 0, command.UNFINISHED, *[0] * (len(calls.CALLS) - 2)]
    assert calls.main(["--scale", "tiny"]) == 0
    assert made[0].startswith("-m pytest -q -W default -m device ")
    assert all(text.startswith("-m benchmarks.small_gpu --resume ") for text in made[1:])
    chosen = [text.partition(" --only ")[2].partition(" ")[0] for text in made[1:]]
    wanted = [call.only for call in calls.CALLS[1:]]
    assert chosen == [wanted[0], wanted[1], *wanted[1:]], "the one not finished is gone on with"
    assert wanted[0] == "decode1,50,flow,plain,accelerate,diffusers,flextensor"


def test_one_call_is_one_and_tests_that_passed_are_not_run_again(calls_made, tmp_path):
    statuses, made = calls_made
    statuses += [0, command.UNFINISHED, command.UNFINISHED, 1]
    assert calls.main(["--one"]) == command.UNFINISHED
    assert calls.main(["--one"]) == command.UNFINISHED
    assert [text.partition(" --")[0] for text in made] == [
        "-m pytest -q -W default -m device -p no:cacheprovider tests/device",
        "-m benchmarks.small_gpu",
        "-m benchmarks.small_gpu",
    ]
    os.utime(tmp_path / "torchtensorref" / "some.py", (2**32, 2**32))
    statuses[:] = [command.UNFINISHED]
    assert calls.main(["--one"]) == command.UNFINISHED, "a carried tree has other times"
    (tmp_path / "torchtensorref" / "some.py").write_text("changed = True")
    statuses[:] = [1, *[0] * len(calls.CALLS)]
    assert calls.main(["--one"]) == 1, "tests that failed are not forgotten over the benchmark"


# -- the baseline of a dry run ---------------------------------------------------------------------


def test_only_cells_of_ours_have_a_baseline():
    where = {"workload": "decode1", "cap": 50, "cap_nbytes": 100}
    measured = {
        **where,
        "status": "measured",
        "step_s": 0.5,
        "first_s": 0.6,
        "memory": {"allocated": 90},
        "same": {"bits": True},
    }
    rows = [
        {**measured, "contestant": "flow"},
        {**measured, "contestant": "accelerate"},
        {**where, "contestant": "lru", "status": "failed", "reason": "it did"},
        {**where, "contestant": "plain", "status": "skipped", "reason": "too large"},
    ]
    assert figures_of_ours(rows) == {
        "decode1/50/flow/failed": Figure(False, "yes or no", False),
        "decode1/50/flow/step": Figure(0.5, "s"),
        "decode1/50/flow/first": Figure(0.6, "s"),
        "decode1/50/flow/allocated": Figure(90, "bytes", 100),
        "decode1/50/flow/differs": Figure(False, "yes or no", False),
        "decode1/50/lru/failed": Figure(True, "yes or no", False),
    }


def test_a_baseline_is_of_a_whole_dry_run(capsys):
    assert command.parse(["--dry", "--write-baseline"]).write == command.KEEPER.path.with_suffix(
        ".md"
    )
    for arguments in (["--dry", "--only", "decode1"], ["--dry", "--scale", "tiny"], []):
        with pytest.raises(SystemExit):
            command.parse([*arguments, "--write-baseline"])


# -- weights and programs --------------------------------------------------------------------------


def test_weights_are_the_same_whenever_they_are_made_and_no_others_are_used(tmp_path):
    scale = SCALES["tiny"]
    one = weights.prepare(tmp_path / "one", scale, "llama")
    two = weights.prepare(tmp_path / "two", scale, "llama")
    assert weights.verify(one) == weights.verify(two)
    shards = sorted(one.glob("*.safetensors"))
    assert len(shards) > 1
    model = weights.load(one, "llama")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert nbytes == weights.sizes_of(scale, "llama").nbytes
    broken = bytearray(shards[0].read_bytes())
    broken[900] ^= 1
    shards[0].write_bytes(broken)
    with pytest.raises(RuntimeError, match="is not what was made"):
        weights.prepare(tmp_path / "one", scale, "llama")


def test_the_full_scale_is_the_model_of_the_protocol():
    sizes = weights.sizes_of(SCALES["full"], "llama")
    assert sizes.nbytes == 14_483_464_192
    assert sizes.nbytes - sizes.read_nbytes == 32000 * 4096 * 2


def test_a_step_without_gradients_is_refused():
    some = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    some[0].grad = torch.zeros(1)
    with pytest.raises(workloads.NoGradients, match="1 of 2 adapter weights got no gradient"):
        workloads._check_gradients(some)
