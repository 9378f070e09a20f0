"""A recorded decode replayed by a strategy moves the bytes that running it with that one moves."""

import pytest
import torch
from torch import nn

from torchTensorRef.__main__ import main
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.devices.sim.host_costs import HostCosts
from torchTensorRef.diagnostics.traces.recording import read
from torchTensorRef.diagnostics.traces.replay import replay

from ..support.sweeps import usual

#: Of the weights, about 400 KB, half fits.
BUDGET = 220_000
COSTS = HostCosts(ready_ns=3_000, decided_ns=41_000, fetched_ns=52_000, evicted_ns=37_000)


class Decoder(nn.Module):
    """Layers with a cache that grows, as a decode has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 128) for _ in range(6))
        self.backs = nn.ModuleList(nn.Linear(128, 64) for _ in range(6))

    def forward(self, token, caches):
        x = self.embed(token)
        for place, (layer, back) in enumerate(zip(self.layers, self.backs, strict=True)):
            y = torch.nn.functional.gelu(layer(x))
            caches[place] = y if caches[place] is None else torch.cat([caches[place], y])
            x = x + back(caches[place].mean(0, keepdim=True))
        return x @ self.embed.weight.T


def decode(manager, model, count=10):
    caches = [None] * 6
    token = manager.adopt(torch.tensor([3]))
    found = []
    with torch.no_grad():
        for _ in range(count):
            token = model(token, caches).argmax(-1)
            found.append(token)
    return found


def run(manage, strategy, path, **spec):
    """Record a decode; return what it has moved, by the counts."""
    manager = manage(strategy, nbytes=BUDGET, **spec)
    torch.manual_seed(0)
    model = manager.adopt(Decoder())
    manager.reset_stats()
    with manager.trace(str(path)):
        decode(manager, model)
        stats = manager.stats()
    return [stats[f"{name}_nbytes"] for name in ("fetched", "prefetched", "written_back")]


@pytest.mark.parametrize("recorded_with", ["lru", "flow"])
def test_replay_moves_the_bytes_that_running_moves(manage, tmp_path, recorded_with):
    moved = {name: run(manage, name, tmp_path / f"{name}.json") for name in ("lru", "flow")}
    assert moved["lru"] != moved["flow"]
    recording = read(tmp_path / f"{recorded_with}.json")
    for strategy, expected in moved.items():
        _, replayer = replay(recording, strategy=strategy)
        counts = replayer.residency.copier.transfer.counts
        found = [counts.fetched_nbytes, counts.prefetched_nbytes, counts.written_back_nbytes]
        assert found == expected, strategy


@pytest.mark.parametrize("strategy", usual(["flow"], ["lru"]))
def test_replay_takes_the_time_that_management_took(manage, tmp_path, strategy):
    path = tmp_path / "run.json"
    apart_ns = []
    for costs in (HostCosts(), COSTS):
        run(manage, strategy, path, host_costs=costs)
        recording = read(path)
        cost, _ = replay(recording)
        assert cost.host_ns == recording.stats["host_ns"]
        assert (cost.host_ns > 0) == (costs == COSTS)
        apart_ns.append(cost.time_ns - recording.stats["time_ns"])
    # What the host copied when the first token was adopted, before the timeline begins.
    assert apart_ns[0] == apart_ns[1]
    assert abs(apart_ns[0]) < 20


@pytest.mark.parametrize("is_set", [True, False])
def test_replay_waits_for_room_as_the_run_did(manage, tmp_path, is_set):
    """Without a budget a tenth is left to others, and what is freed and still read may be there."""
    path = tmp_path / "run.json"
    manager = manage("lru", nbytes=BUDGET)
    manager.budget = BUDGET * 9 // 10 if is_set else None
    model = manager.adopt(Decoder())
    manager.reset_stats()
    with manager.trace(str(path)), torch.no_grad():
        for weight in [*model.parameters()] * 3:
            weight.mul_(0.5)
    recording = read(path)
    cost, _ = replay(recording)
    assert abs(cost.time_ns - recording.stats["time_ns"]) < 20


def test_the_command_compares(manage, tmp_path, capsys):
    path = tmp_path / "run.json"
    run(manage, "lru", path)
    assert main(["trace", "replay", str(path), "--strategy", "flow", "--budget", "150KiB"]) == 0
    text = capsys.readouterr().out
    assert "flow" in text
    assert "150.00 KiB" in text
    assert main(["trace", "replay", str(path), "--strategy", "flwo"]) == 2
    assert "flow" in capsys.readouterr().err
    assert main(["trace", "replay", str(path), "--device", "rtx306"]) == 2
    assert "Did you mean 'rtx3060'?" in capsys.readouterr().err
    assert main(["trace", "replay", str(path), "--device", "sim:rtx3060"]) == 0


def test_a_real_device_has_to_be_named_again(manage, tmp_path):
    path = tmp_path / "run.json"
    run(manage, "lru", path)
    recording = read(path)
    recording.about["spec"] = None
    with pytest.raises(ConfigError, match="Name a simulated one like it"):
        replay(recording)
    cost, _ = replay(recording, device="rtx3060")
    assert cost.op_count == recording.stats["op_count"]
