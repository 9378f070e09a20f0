"""A model that is spread over several accelerators: the same bits, each budget obeyed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from torchTensorRef import ConfigError
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.inject import factories
from torchTensorRef.interception import slow_path
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.strategies import venice

from ..support.differential import bits
from ..support.over_host import adapters
from ..support.processes import printed_by_plain_torch
from ..support.several import assert_plain_torchs, on_several, tower
from ..support.sweeps import usual


@pytest.mark.parametrize("budgets", usual([(40 << 10, 60 << 10, 30 << 10)], [(80 << 10, 80 << 10)]))
def test_inference_and_training_are_plain_torchs(manager, budgets):
    manager = on_several(*budgets)
    assert_plain_torchs(manager)
    used = manager.residency.books.accelerators
    assert all(
        0 < device.peak_nbytes <= budget for device, budget in zip(used, budgets, strict=True)
    )
    manager.check()


def test_the_host_computes_too_where_that_ends_sooner(manager):
    host = {
        "h2d_bytes_per_s": 20e6,
        "d2h_bytes_per_s": 20e6,
        "host_memory_bytes_per_s": 150e6,
        "host_kernel_bytes_per_s": 100e6,
        "host_flops_per_s": 1e12,
        "urgent_nbytes": 1024,
    }
    x = torch.rand(1, 64, generator=torch.Generator().manual_seed(1))
    expected, times = tower(12)(x).detach(), []
    for placement in ("accelerator", "auto"):
        manager = on_several(50 << 10, 50 << 10, **host)
        manager.placement = placement
        ours = manager.adopt(tower(12))
        with torch.no_grad():
            for _ in range(8):
                found = ours(manager.adopt(x.clone()))
        assert torch.equal(bits(expected), bits(found))
        stats = manager.stats()
        times.append(stats["time_ns"])
        assert (stats["at_home_count"] > 8) == (placement == "auto")
        manager.check()
    assert times[1] < 0.8 * times[0]


def test_weights_stay_where_they_live_and_activations_cross_once_per_boundary(manager):
    manager = on_several(80 << 10, 80 << 10)
    model, x = manager.adopt(tower()), manager.adopt(torch.rand(1, 64))
    with torch.no_grad():
        for _ in range(3):
            model(x)
        before = manager.stats()
        model(x)
    after = manager.stats()
    # There and back at most: one boundary, and the input lies on the first accelerator.
    assert after["fetch_count"] - before["fetch_count"] <= 2
    assert after["evict_count"] == before["evict_count"]
    where = {p.proxyInfo.device for p in model.parameters()}
    assert where == {"sim:test0", "sim:test1"}


def test_operators_need_no_decision_wherever_their_operands_are(manager):
    manager = on_several(80 << 10, 80 << 10)
    model, x = manager.adopt(tower()), manager.adopt(torch.rand(1, 64))
    with torch.no_grad():
        for _ in range(3):
            model(x)
        manager.reset_stats()
        model(x)
    stats = manager.stats()
    assert stats["ready_op_count"] >= 22
    assert stats["slow_op_count"] <= 2  # there and back


class Told(venice.Venice):
    """Venice that writes down where results were made."""

    def __init__(self):
        super().__init__()
        self.born_on = {}

    def on_birth(self, block_id, nbytes, place, device=""):
        self.born_on[block_id] = device
        return super().on_birth(block_id, nbytes, place, device)


def test_a_strategy_that_spreads_is_told_where_results_were_made(manager):
    strategy = Told()
    manager = on_several(40 << 10, 40 << 10, strategy=strategy)
    model, x = manager.adopt(tower()), manager.adopt(torch.rand(40, 64))
    kept = []
    for layer in model:
        layer.register_forward_hook(lambda *args: kept.append(args[-1]))
    with torch.no_grad():
        model(x)
        model(x)
    numbers = strategy.born_on.keys() & {ref._ttr_block.block_id for ref in kept}
    where = {strategy.born_on[number] for number in numbers}
    assert where == {"sim:test0", "sim:test1"}


def test_several_accelerators_have_a_default_of_their_own(manager):
    assert manager.strategy is not None
    manager._strategy_setting = None
    spec = DeviceSpec(name="test", capacity_nbytes=1 << 20)
    two = [SimDevice(spec, k, name=f"sim:test{k}") for k in (0, 1)]
    manager.device = two
    assert manager.strategy.name == "venice"
    manager.device = two[0]
    assert manager.strategy.name == "flow"
    manager.strategy = "lru"
    manager.device = two
    assert manager.strategy.name == "lru"


def test_names_may_be_separated_by_commas(manager):
    manager.device = "sim:0, sim:1"
    assert manager.device == ["sim:0", "sim:1"]
    with pytest.raises(ConfigError, match="rtx3060"):
        manager.device = "sim:0,sim:rtx306"
    assert manager.device == ["sim:0", "sim:1"]


def test_the_report_counts_the_room_of_all(manager):
    manager = on_several(80 << 10, 80 << 10)
    model, x = manager.adopt(tower()), manager.adopt(torch.rand(1, 64))
    with torch.no_grad():
        model(x)
        manager.reset_stats()
        for _ in range(3):
            model(x)
    assert "all of them fit" in manager.report()
    assert "venice on sim:test0,sim:test1\n" in manager.report()
    assert manager.stats()["advice"].startswith("everything fits")


PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))).eval()
with torch.no_grad():
    for _ in range(3):
        out = model(torch.ones(1, 128))
print(out.double().sum().item().hex())
"""


def test_the_command_line_takes_devices_and_budgets_in_order(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    wanted = tmp_path / "report.json"
    run = [sys.executable, "-m", "torchTensorRef", "run"]
    both = ["--device", "sim:0,sim:1", "--budget", "150KiB,300KiB", f"--report={wanted}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TTR_")}

    def done(*command: Any) -> Any:
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=environment, check=False
        )

    plain, ours = printed_by_plain_torch(str(script)), done(*run, *both, script)
    assert (ours.stdout, ours.returncode) == (plain, 0), ours.stderr
    report = json.loads(wanted.read_text())
    assert report["strategy"] == "venice"
    refused = done(*run, "--device", "sim:0,sim:1", "--budget", "1KiB,2KiB,3KiB", script)
    assert refused.returncode == 2
    assert "3 amounts; devices: 2 (sim:0,sim:1)" in refused.stderr
    refused = done(*run, "--device", "sim:0,sim:rtx306", script)
    assert refused.returncode == 2
    assert "rtx3060" in refused.stderr


def test_budgets_in_the_order_of_the_devices(manager):
    manager = on_several(80 << 10, 80 << 10)
    manager.budget = "8KiB, 25%"
    assert manager.budget == {"sim:test0": 8 << 10, "sim:test1": 20 << 10}
    with pytest.raises(ConfigError, match="3 amounts; devices: 2"):
        manager.budget = "1KiB,2KiB,3KiB"
    assert manager.budget == {"sim:test0": 8 << 10, "sim:test1": 20 << 10}


@pytest.mark.parametrize("strategy", ["venice", "lru"])
def test_each_budget_is_obeyed_when_it_changes_and_bits_stay(manager, strategy):
    plain, x = tower(), torch.rand(1, 64)
    with torch.no_grad():
        expected = plain(x)
    manager = on_several(80 << 10, 80 << 10, strategy=strategy)
    model = manager.adopt(tower())
    for first, second in ((80, 20), (20, 80), (10, 10), (0, 40), (80, 80)):
        budgets = {"sim:test0": first << 10, "sim:test1": second << 10}
        manager.budget = budgets
        devices = manager.residency.books.accelerators
        for device in devices:
            assert device.resident_nbytes <= budgets[device.name]
            device.reset_peak()
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(bits(manager.release(model(manager.adopt(x)))), bits(expected))
        assert all(device.peak_nbytes <= budgets[device.name] for device in devices)
        assert manager.budget == budgets
        manager.check()


@pytest.mark.parametrize("held", [0, 1])
def test_one_that_cannot_hold_its_budget_leaves_the_others_to_theirs(manager, held):
    manager = on_several(80 << 10, 80 << 10, strategy="lru")
    refs = [manager.adopt(torch.rand(1000)) for _ in range(2)]
    for number, ref in enumerate(refs):
        ref.toGPU(f"sim:test{number}")
    target = refs[held].target
    with pytest.raises(torch.OutOfMemoryError, match=f"sim:test{held}"):
        manager.budget = {"sim:test0": 100, "sim:test1": 100}
    devices = manager.residency.books.accelerators
    assert [d.resident_nbytes for d in devices][1 - held] <= 100
    manager.check()
    assert target.sum() == refs[held].sum()


def test_a_factory_finds_room_on_the_card_that_it_names(manage):
    manager = manage("venice")
    manager.device = first, second = adapters(2, 8 << 20)
    for device in (first, second):
        block = manager.adopt(torch.ones(1 << 18))._ttr_block
        manager.residency.release(manager.residency.acquire(device, [block], [], 0))

    def resident_nbytes():
        return [
            manager.residency.books.ledgers[device].resident_nbytes for device in (first, second)
        ]

    def full(*args, **kwargs):
        """Make a tensor on an empty card; else say what mps says, which has no class for it."""
        if resident_nbytes()[1]:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 4.00 MiB)")
        return args

    before = resident_nbytes()
    assert factories._with_room(full, (3,), {"device": second.name}) == (3,)
    assert resident_nbytes() == [before[0], 0]


def test_a_kernel_that_found_no_memory_is_tried_again_however_that_is_said(manage, monkeypatch):
    manager = manage("lru")
    (manager.device,) = adapters(1, 8 << 20)
    kept, x = manager.adopt(torch.ones(1 << 16)), manager.adopt(torch.ones(8))
    kept.sum()
    runs, run_kernel = [], slow_path.run_kernel

    def short_of_memory(staged):
        runs.append(staged.device)
        if kept._ttr_block.is_on(manager.residency.books.main):
            raise RuntimeError("MPS backend out of memory (MPS allocated: 4.00 MiB)")
        return run_kernel(staged)

    monkeypatch.setattr(slow_path, "run_kernel", short_of_memory)
    plan = plan_of(torch.ops.aten.cumsum.default)
    made = slow_path.SlowPath(plan, (x, 0), {}, manager).run()
    assert made.tolist() == list(range(1, 9))
    assert runs == [manager.residency.books.main] * 2
    assert manager.stats()["host_fallback_count"] == 0


def test_an_accelerator_is_named_by_its_index(manager):
    manager = on_several(1 << 20, 1 << 20)
    first, second = manager.residency.books.accelerators
    ref = manager.adopt(torch.ones(4))
    for index, device in ((1, second), (0, first)):
        ref.toCPU().toGPU(index)
        assert ref._ttr_block.replicas[device].readable
    for wrong in (2, -1, True):
        with pytest.raises(ConfigError, match=f"{first.name}, {second.name}"):
            ref.toGPU(wrong)
