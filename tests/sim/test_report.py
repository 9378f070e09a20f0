"""`tensorsManager.report()`: what it says, that it fits a screen, that looking moves nothing."""

import gc
import json
import re
import time

import pytest
import torch

from torchTensorRef import tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.host_costs import HostCosts
from torchTensorRef.memory import report
from torchTensorRef.memory.known import KnownBlocks
from torchTensorRef.operators.blocked import probe

from ..support.device_double import LateDevice
from ..support.injection import injected
from ..support.programs import linears, sweep


@pytest.fixture(autouse=True)
def nobody_elses(manager, monkeypatch):
    """What earlier tests of this process keep (a library's own tensors) is not in the reports."""
    monkeypatch.setattr(manager.residency.books, "known", KnownBlocks())


def oneline(text):
    return " ".join(text.split())


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


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("UNet:conv_in.weight", "UNet:conv_in.weight"),
        ("model.layers.10.self_attn.q_proj.weight", "model.layers.10.self...q_proj.weight"),
        (
            "Qwen3ForCausalLM:model.layers.0.mlp.gate_proj.weight",
            "Qw..:layers.0.mlp.gate_proj.weight",
        ),
        (
            "Qwen3ForCausalLM#2:model.layers.10.self_attn.q_proj.weight",
            "Qw..#2:layers.10.self..q_proj.weight",
        ),
    ],
)
def test_a_long_name_keeps_the_layer_and_what_it_is_of_it(name, short):
    """With the class in front rows read `Qwen3ForCausalLM:mo..e_proj.weight`, one like another."""
    assert report.shortened(name, report.NAME) == short


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_processor_whose_tiles_have_other_bits_is_named(manage, monkeypatch, are_alike):
    """A product ran on the host "for want of room", and nothing said why it was not cut."""
    monkeypatch.setattr(probe, "_is_alike", lambda *_: are_alike)
    monkeypatch.setattr(probe, "unlike", set[object]())
    monkeypatch.setattr(report, "unlike", probe.unlike)
    probe._are_alike.cache_clear()
    try:
        manager = manage(nbytes=6 << 20)
        a, b = (manager.adopt(torch.rand(1024, 1024)) for _ in range(2))
        assert (a @ b).shape == (1024, 1024)
        assert ("MKL_CBWR=COMPATIBLE" in manager.report()) is not are_alike
        assert manager.stats()["host_fallback_count"] == (not are_alike)
    finally:
        probe._are_alike.cache_clear()


def test_fallbacks_are_counted_with_their_reason(manage):
    manager = manage(nbytes=1000)
    ref = manager.adopt(torch.rand(30, 30))
    for _ in range(3):
        ref = ref @ ref
    text = manager.report()
    assert "host fallbacks: 3" in text
    assert "3  the operator needs more than the budget" in text
    assert "mm.default 3x" in text


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
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
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


def test_a_run_that_the_hosts_own_time_bounds_says_so(manage):
    costs = HostCosts(ready_ns=0, decided_ns=100_000, fetched_ns=200_000, evicted_ns=300_000)
    manager = manage("lru", nbytes=10_000, host_costs=costs)
    weights = [manager.adopt(torch.rand(500)) for _ in range(10)]
    manager.reset_stats()
    for _ in range(3):
        for weight in weights:
            weight + 1
    stats = manager.stats()
    assert stats["host_ns"] > stats["compute_ns"] + stats["stall_ns"]
    assert stats["host_stall_ns"] > stats["host_ns"] / 2
    assert stats["bound_by"] == "host"
    assert "the host's own time bounds this run" in stats["advice"]
    assert "a larger budget" in stats["advice"]
    text = manager.report()
    assert "bound by   the host's time" in text
    assert "of its own time for management" in text
    assert max(map(len, text.splitlines())) <= 80
    manager.reset_stats()
    assert (manager.stats()["host_ns"], manager.stats()["host_stall_ns"]) == (0, 0)


def test_a_host_that_waits_itself_is_not_late(manage):
    costs = HostCosts(ready_ns=100, decided_ns=100, fetched_ns=100, evicted_ns=100)
    manage("lru", host_costs=costs)
    manager = tensorsManager
    device = manager.residency.books.main
    manager.device = SimDevice(device.spec, name="sim:pageable", page_locked=False)
    weights = [manager.adopt(torch.rand(20_000)) for _ in range(10)]
    manager.reset_stats()
    for weight in weights:
        weight + 1
    stats = manager.stats()
    assert stats["bound_by"] == "host"  # it has waited for each copy
    assert stats["host_ns"] > 0
    assert "the host's own time" not in stats["advice"]
    assert "bound by   the host and interception" in manager.report()


def test_without_costs_the_host_is_not_told_of(manage):
    manager = manage("lru")
    manager.adopt(torch.rand(500)) + 1
    assert manager.stats()["host_ns"] == 0
    assert "for management" not in manager.report()
    assert "the host's own time" not in manager.report()


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


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_what_cost_most_is_named_with_why_it_went(manage, strategy):
    manager = manage(strategy, nbytes=4 * 64 * 64 * 4)
    model = linears(manager)
    sweep(model, manager.adopt(torch.rand(2, 64)), 5)
    text = manager.report()
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if "those fetched most" in line) + 1
    assert "layers." in lines[first]
    assert re.search(r"\dx, \w", lines[first])
    assert max(map(len, lines)) <= 80
    stats = manager.stats()
    assert sum(stats["evicted_nbytes_by_cause"].values()) == stats["dropped_nbytes"]
    by_block = manager.residency.books.counts.costs.by_block.values()
    moved = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    assert sum(cost.fetched_nbytes for cost in by_block) == moved


def test_it_says_how_much_is_needed_and_what_more_would_buy(manage):
    layer_nbytes = 64 * 64 * 4
    manager = manage("lru", nbytes=4 * layer_nbytes)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    sweep(model, x, 10)
    text = manager.report()
    # Another test's last traceback may hold a small weight.
    assert re.search(r"128\.\d\d KiB of tensors that stay, 50% of them fit", text)
    need = manager.stats()["largest_op_nbytes"]
    assert layer_nbytes < need < 2 * layer_nbytes
    assert f"largest operator seen: {need / 1024:.2f} KiB, aten." in text
    told = re.search(
        r"budget \+(\d+\.\d\d) KiB would save up to [89]\d% of the copies", oneline(text)
    )
    assert 64 + 16 <= float(told[1]) < 64 + 20, "the weights, and one operator"
    assert "strategy = 'flow' fetches ahead of need. With it, " in oneline(text)
    # What it says is so: with that much more nothing comes and goes any longer.
    before = manager.stats()["fetched_nbytes"]
    manager = manage("lru", nbytes=4 * layer_nbytes + int(float(told[1]) * 1024))
    sweep(linears(manager), manager.adopt(torch.rand(2, 64)), 10)
    assert manager.stats()["fetched_nbytes"] < before / 4
    assert "everything fits" in manager.report()


def test_the_smallest_budget_that_it_names_is_enough(manage):
    manager = manage("lru", nbytes=4 * 64 * 64 * 4)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    sweep(model, x, 2)
    need = manager.stats()["largest_op_nbytes"]
    for nbytes, is_enough in ((need, True), (need - 600, False)):
        manager = manage("lru", nbytes=nbytes)
        sweep(linears(manager), manager.adopt(torch.rand(2, 64)), 2)
        assert (manager.stats()["host_fallback_count"] == 0) is is_enough


def test_what_bounds_a_run_is_said(manage):
    manager = manage("lru", nbytes=4 << 20)
    sweep(linears(manager, width=512), manager.adopt(torch.rand(2, 512)), 3)
    assert "bound by   the link" in manager.report()
    manager = manage("lru")
    x = manager.adopt(torch.rand(300, 300))
    for _ in range(50):
        x = x @ x
    assert "bound by   compute" in manager.report()


@pytest.mark.parametrize("strategy", ["venice", "lru"])
def test_the_waits_of_several_accelerators_are_not_added_up(manage, strategy):
    manager = manage(strategy, nbytes=3 << 20, count=2)
    sweep(linears(manager, count=16, width=512), manager.adopt(torch.rand(4, 512)), 8)
    stats = manager.stats()
    by_device = stats["by_device"]
    assert list(by_device) == ["sim:test", "sim:test1"]
    for name in "compute_ns", "stall_ns":
        assert stats[name] == by_device[stats["busiest"]][name]
    worked = [row["compute_ns"] + row["stall_ns"] for row in by_device.values()]
    assert max(worked) <= stats["time_ns"]
    moved = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    assert sum(row["fetched_nbytes"] for row in by_device.values()) == moved
    assert stats["times_floor"] >= 1, "nothing is done sooner than its copies alone"
    text = manager.report()
    shares = [int(n) for n in re.findall(r"(\d+)% on sim:test", text)]
    assert len(shares) == 2
    assert 40 < max(shares) <= 100
    assert re.search(rf"bound by   the link of {stats['busiest']}: operators", text)
    manager.reset_stats()
    assert [manager.stats()[name] for name in ("stall_ns", "compute_ns", "time_ns")] == [0, 0, 0]


def test_fallbacks_are_told_by_operator_and_once_in_words(manage, monkeypatch):
    from torchTensorRef.memory import once

    manager = manage(nbytes=1000)
    monkeypatch.setattr(once, "said", set())
    ref = manager.adopt(torch.rand(30, 30))
    with pytest.warns(RuntimeWarning, match=r"aten.mm.default does not fit the budget") as caught:
        ref @ ref
    assert caught[0].filename == __file__
    ref @ ref  # once is enough: warnings are errors here
    stats = manager.stats()
    assert stats["host_fallback_operators"] == {"aten.mm.default": 2}
    assert stats["out_of_budget_count"] == 2
    assert "2 operators ran on the host for want of room" in manager.report()


def test_thrash_is_counted_and_told_once(manage, monkeypatch):
    from torchTensorRef.memory import once

    manager = manage("lru", nbytes=4 * 64 * 64 * 4)
    model, x = linears(manager), manager.adopt(torch.rand(2, 64))
    monkeypatch.setattr(once, "said", set())
    with pytest.warns(RuntimeWarning, match="were fetched again soon after") as caught:
        sweep(model, x, 8)
    said = str(caught[0].message)
    assert "Set strategy = 'flow', or a larger budget" in said
    assert len(said) <= 164, "two lines"
    assert manager.stats()["thrash_nbytes"] > 4 * manager.stats()["budget_nbytes"]
    manager = manage("genoa")
    sweep(linears(manager), manager.adopt(torch.rand(2, 64)), 8)
    assert manager.stats()["thrash_count"] == 0  # it gives back on purpose


def test_what_is_fetched_ahead_is_no_thrash(manage, monkeypatch):
    from torchTensorRef.memory import once

    manager = manage("flow", nbytes=4 * 64 * 64 * 4)
    model, x = linears(manager), manager.adopt(torch.rand(2, 64))
    monkeypatch.setattr(once, "said", set())
    sweep(model, x, 30)  # warnings are errors here
    stats = manager.stats()
    assert stats["prefetched_nbytes"] > 8 * stats["budget_nbytes"]
    assert stats["thrash_nbytes"] < stats["prefetched_nbytes"] / 4


def test_who_looks_ahead_is_not_advised_to(manage, monkeypatch):
    from torchTensorRef.memory import once

    manager = manage("flow", nbytes=4 * 64 * 64 * 4)
    manager.strategy.prefetch = lambda *_: []  # it foresees nothing
    model, x = linears(manager), manager.adopt(torch.rand(2, 64))
    monkeypatch.setattr(once, "said", set())
    with pytest.warns(RuntimeWarning, match="Set a larger budget; ") as caught:
        sweep(model, x, 30)
    assert "flow" not in str(caught[0].message)


def test_the_statistics_have_the_judgement_of_the_report(manage):
    manager = manage("lru", nbytes=4 * 512 * 512 * 4)
    gc.collect()
    before_nbytes = manager.stats()["weights_nbytes"]  # another test's last traceback may hold some
    model, x = linears(manager, width=512), manager.adopt(torch.rand(2, 512))
    sweep(model, x, 4)
    stats, report = manager.stats(), manager.report()
    others_nbytes = stats["weights_nbytes"] - sum(p.nbytes for p in model.parameters())
    assert 0 <= others_nbytes <= before_nbytes
    assert stats["advice"] in oneline(report)
    assert stats["bound_by"] == "link"
    assert "bound by   the link" in report
    assert f"{stats['times_floor']:.2f} times the longer" in oneline(report)
    first = stats["dearest_blocks"][0]
    assert first["name"].startswith("layers.")
    assert first["name"] in report
    assert f" {first['fetch_count']}x, operands" in report
    assert first["fetch_count"] > 1 <= first["evict_count"]
    assert first["evicted_for"].startswith("lru: ")
    assert len(stats["dearest_blocks"]) <= 10
    json.dumps(stats)  # it is data


def test_the_value_of_an_expression_is_the_text_itself(manager):
    text = manager.report()
    assert repr(text) == str(text) == text
    assert json.loads(json.dumps({"report": text}))["report"] == text


def test_a_notebook_shows_it_as_html(manager):
    model = linears(manager, count=1)
    weight = model.layers[0].weight
    html = weight._repr_html_()
    assert html.startswith("<pre>Parameter containing:")
    assert "layers.0.weight" in html
    assert "on cpu" in html
    weight.toGPU()
    assert "on sim:test" in weight._repr_html_()
    page = manager._repr_html_()
    assert "<pre" in page
    assert "resident" in page
    assert "&lt;" not in manager.adopt(torch.rand(2))._repr_html_()


def test_what_crosses_in_parts_counts_as_copied_for_its_block(manage):
    """An operator larger than the budget runs in blocks: more room would save most of that."""

    def passes(nbytes):
        manager = manage("lru", nbytes=nbytes)
        model = manager.adopt(torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(2))))
        x = manager.adopt(torch.rand(300, 400))
        with torch.no_grad():
            for _ in range(6):
                model(x)
        return manager, model

    gc.collect()  # what earlier tests have left counts as weights
    manager, _model = passes(1 << 20)
    stats, report = manager.stats(), manager.report()
    assert stats["blocked_op_count"] == 12
    costs = manager.residency.books.counts.costs
    assert sum(cost.fetched_nbytes for cost in costs.by_block.values()) == stats["fetched_nbytes"]
    assert costs._whole_of == {}
    assert stats["dearest_blocks"][0]["parts_nbytes"] > 5 * 400 * 400 * 4
    assert re.search(r"0.weight +\d+.\dx in parts", report)
    assert re.search(r"budget \+\S+ MiB would save up to [2-9]\d% of the copies", oneline(report))
    assert passes(3 << 20)[0].stats()["fetched_nbytes"] < stats["fetched_nbytes"] / 4  # it is so


def test_weights_that_fit_alone_lack_room_for_what_is_computed(manage):
    gc.collect()  # what earlier tests have left counts as weights
    width, count = 64, 4
    manager = manage("lru", nbytes=count * width * width * 4 + 4096)
    model, x = linears(manager, count=count, width=width), manager.adopt(torch.rand(48, width))
    sweep(model, x, 10)
    report = " ".join(manager.report().split())
    assert "all of them fit" in report
    assert re.search(r"budget \+\S+ KiB would save up to [1-9]\d% of the copies", report)
    assert "first time" not in report


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_what_more_room_is_said_to_save_is_what_it_saves(manage, share):
    count, width = 16, 256
    layer_nbytes = width * width * 4 + width * 4

    def fetched(nbytes):
        gc.collect()  # what earlier tests have left counts as weights
        manager = manage("flow", nbytes=nbytes)
        model = linears(manager, count=count, width=width)
        sweep(model, manager.adopt(torch.rand(2, width)), 10)
        stats = manager.stats()
        return stats["fetched_nbytes"] + stats["prefetched_nbytes"], stats["advice"]

    nbytes = int(share * count * layer_nbytes)
    before, advice = fetched(nbytes)
    more, said = re.match(r"budget \+([\d.]+) MiB would save up to (\d+)% of", advice).groups()
    after, advice = fetched(nbytes + int(float(more) * (1 << 20)) + 5000)
    saved = 100 * (1 - after / before)
    assert saved - 1 <= int(said) <= saved + 15
    assert advice.startswith("everything fits")


def test_what_is_given_back_on_purpose_would_be_given_back_with_more_room(manage):
    manager = manage("genoa", nbytes=6 * 64 * 64 * 4)
    sweep(linears(manager), manager.adopt(torch.rand(2, 64)), 10)
    assert "budget +" not in manager.report()
    assert manager.stats()["advice"].endswith("strategy = 'flow' fetches ahead of need.")


def test_what_the_host_writes_comes_again_for_no_want_of_room(manage):
    manager = manage("flow")
    x = manager.adopt(torch.rand(20_000))
    for _ in range(10):
        x + 1
        x.numpy()[0] = 1
    assert manager.stats()["fetch_count"] > 1
    assert "budget +" not in manager.report()
    advice = manager.stats()["advice"]
    assert advice.startswith("everything fits; stalls take ")
    assert advice.endswith(" of the time, for what is new, or was written on the host.")


def test_a_story_tells_who_asked_for_a_fetch(manager):
    asked, read = manager.adopt(torch.rand(2)), manager.adopt(torch.rand(2))
    asked.toGPU()
    read + 1
    assert str(manager.story(asked)).endswith("fetch sim:test (toGPU)")
    assert str(manager.story(read)).endswith("fetch sim:test (an operator reads)")
    asked.toCPU()
    assert len(str(manager.story(asked)).splitlines()) == len(manager.story(asked)) == 2


def test_what_an_optimizer_keeps_is_named_and_no_weight(manage):
    gc.collect()  # what earlier tests have left counts as weights
    manager = manage("flow", nbytes=100_000)
    before_nbytes = manager.stats()["weights_nbytes"]
    model = linears(manager, count=4, width=64)
    optimizer = torch.optim.AdamW(model.parameters())
    x = manager.adopt(torch.rand(4, 64))
    for _ in range(4):
        y = x
        for layer in model.layers:
            y = layer(y)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    text = manager.report()
    stats, weights_nbytes = manager.stats(), sum(p.nbytes for p in model.parameters())
    assert stats["optimizer_nbytes"] == 2 * weights_nbytes
    assert stats["weights_nbytes"] <= weights_nbytes + before_nbytes
    assert "of tensors that stay and 128.00 KiB of optimizer state" in oneline(text)
    assert "layers.0.weight: exp_avg_sq" in text
    state = optimizer.state[model.layers[1].weight]["exp_avg"]
    assert manager.name_of(state) == "layers.1.weight: exp_avg"
    assert not manager.names.of_operand(state._ttr_block), "a pattern of modules is not for it"


def test_a_refused_optimizer_that_is_still_there_is_no_hindrance(manage):
    """Its error holds it, as a notebook holds the last one; torch has given it no state yet."""
    manager = manage("lru")
    with injected(), pytest.raises(TypeError, match="iterable of Tensors") as refused:
        torch.optim.SGD(torch.ones(3))
    assert manager.report()
    del refused


def test_an_optimizer_may_keep_its_state_in_a_way_of_its_own(manage):
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.state = [1, 2]

    manager = manage("lru")
    with injected():
        kept = Own([torch.nn.Parameter(torch.ones(3))])
    assert manager.report()
    del kept
