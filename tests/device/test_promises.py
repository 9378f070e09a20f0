"""Residency changes time and nothing else, on the same device with the same kernels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.memory.ref import TensorRef

from ..support.device_double import LateDevice, LateEvent, LateModule
from ..support.programs import RandomEviction, assert_same
from ..support.sweeps import usual

MIB = 1 << 20
STRATEGIES = {
    "lru": lambda: "lru",
    "genoa": lambda: "genoa",
    "flow": lambda: "flow",
    "random": lambda: RandomEviction(7),
}


@pytest.fixture(params=usual(["flow", "random"], ["lru", "genoa"]))
def strategy(request: pytest.FixtureRequest) -> Any:
    return STRATEGIES[request.param]()


def layers(width: int, depth: int) -> nn.Module:
    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*parts)


def on(device: Any, value: Any) -> Any:
    """A plain tensor or module on the device: what plain torch would compute with."""
    return value.to(device.torch_device)


def home(value: Any) -> Any:
    return value.detach().cpu()


def inference_of(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(x) for x in batches]


def ours(manager: Any, results: Any) -> list[torch.Tensor]:
    assert all(isinstance(result, TensorRef) for result in results)
    return [manager.release(result.detach()).clone() for result in results]


def assert_same_at_home(expected: Any, results: Any) -> None:
    assert_same(expected, results, plain_because="`ours` has brought them home")


# 25 MB of weights for a budget of 10 MB, and batches that need little.
WIDTH, DEPTH = 1024, 6
SMALL = 10 * MIB


def test_inference_is_plain_torchs_to_the_bit(manage, device, scale, strategy):
    width = scale.width(WIDTH)
    batches = [torch.rand(n, width) for n in (4, 4, 1, 16, 4)]
    plain = on(device, layers(width, DEPTH))
    expected = [home(y) for y in inference_of(plain, [on(device, x) for x in batches])]
    del plain
    manager = manage(strategy, scale.nbytes(SMALL))
    model = manager.adopt(layers(width, DEPTH))
    results = []
    for _ in range(3):  # the first time around, with the flow known, with memory page-locked
        results.append(ours(manager, inference_of(model, [manager.adopt(x) for x in batches])))
        settle(device)
    for result in results:
        assert_same_at_home(expected, result)
    assert manager.stats()["evict_count"] > 0
    assert manager.stats()["host_fallback_count"] == 0


def settle(device: Any) -> None:
    """Let what is page-locked in the background be so."""
    assert device.page_locks.settle(30)


def train(model: nn.Module, batches: list[torch.Tensor], *, foreach: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("foreach", [True, False])
def test_training_is_plain_torchs_to_the_bit(manage, device, scale, strategy, foreach):
    width = scale.width(256)
    batches = [torch.rand(4, width) for _ in range(4)]
    plain = on(device, layers(width, 4))
    expected = [home(y) for y in train(plain, [on(device, x) for x in batches], foreach=foreach)]
    del plain
    # Three lists have to fit: what does not runs on the host, whose kernels round otherwise.
    manager = manage(strategy, scale.nbytes((4 if foreach else 2) * MIB))
    model = manager.adopt(layers(width, 4))
    result = ours(manager, train(model, [manager.adopt(x) for x in batches], foreach=foreach))
    assert manager.stats()["host_fallback_reasons"] == {}
    assert_same_at_home(expected, result)


def test_what_is_written_in_place_is_not_lost(manage, device, scale, strategy):
    """Dirty replicas go home and come back, again and again."""
    starts = [torch.rand(scale.count(300_000)) for _ in range(6)]

    def written(group: list[torch.Tensor]) -> list[torch.Tensor]:
        for turn in range(5):
            for x in group:
                x.mul_(0.9).add_(turn)
            group[turn].copy_(group[0])
        return group

    expected = [home(x) for x in written([on(device, x.clone()) for x in starts])]
    manager = manage(strategy, scale.nbytes(3 * MIB))
    managed = [manager.adopt(x.clone()) for x in starts]
    assert_same_at_home(expected, ours(manager, written(managed)))


def test_a_source_that_the_host_writes_next_was_read_before(manage, device, scale):
    """The copy to the device may start late; what the program writes at home comes after it."""
    manager = manage("lru", scale.nbytes(64 * MIB))
    for turn in range(6):
        x = manager.adopt(torch.full((scale.count(400_000),), float(turn)), sole=True)
        for _ in range(3):  # recurs, so that its memory is page-locked and the copy starts late
            total = x + 1
            settle(device)
            x.fill_(float(turn))
            manager.ownership.to_host(x)
        total = x + 1
        view = x.numpy()
        view[:] = -5
        assert manager.release(total).unique().tolist() == [turn + 1.0]
        del view


def test_an_array_over_the_bytes_is_followed(manage, scale):
    manager = manage("lru", scale.nbytes(64 * MIB))
    x = manager.adopt(torch.zeros(scale.count(300_000)))
    array = x.numpy()
    for turn in range(1, 5):
        array[:] = turn
        y = x * 2
        array[:] = -1
        assert manager.release(y).unique().tolist() == [2.0 * turn]


def test_weights_in_a_mapped_file(manage, device, scale, tmp_path, strategy):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(2)
    width = scale.width(600)
    weights = {f"w{n}": torch.rand(width, width) for n in range(8)}
    safetensors.save_file(weights, tmp_path / "weights.safetensors")
    x = torch.rand(3, width)

    def run(there: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        for name in sorted(there):
            y = torch.tanh(y @ there[name])
        return y

    expected = home(run({n: on(device, w) for n, w in weights.items()}, on(device, x)))
    manager = manage(strategy, scale.nbytes(5 * MIB))
    loaded = safetensors.load_file(tmp_path / "weights.safetensors")
    managed = {name: manager.adopt(tensor, sole=True) for name, tensor in loaded.items()}
    del loaded
    for _ in range(5):
        assert_same_at_home([expected], ours(manager, [run(managed, manager.adopt(x))]))
        settle(device)
    managed["w0"].mul_(0)  # what is copied from must not be an old mirror,
    manager.bring_all_home()
    assert manager.release(run(managed, manager.adopt(x))).abs().max() == 0
    managed["w0"].fill_(1)
    manager.bring_all_home()
    before = manager.release(run(managed, manager.adopt(x)))
    manager.bring_all_home()
    managed["w7"].uniform_(-1, 1)  # also where the host writes: random, and without a label
    assert not torch.equal(manager.release(run(managed, manager.adopt(x))), before)


def test_clean_weights_are_never_copied_back(manage, scale):
    width = scale.width(WIDTH)
    manager = manage("lru", scale.nbytes(SMALL))
    model = manager.adopt(layers(width, DEPTH))
    for _ in range(3):
        inference_of(model, [manager.adopt(torch.rand(2, width))])
    stats = manager.stats()
    assert stats["evict_count"] > DEPTH
    assert stats["written_back_nbytes"] < MIB, "activations at most"


def test_two_threads(manage, device, scale, strategy):
    width = scale.width(WIDTH)
    batches = [[torch.rand(3, width) for _ in range(4)] for _ in range(2)]
    plain = on(device, layers(width, DEPTH))
    expected = [
        [home(y) for y in inference_of(plain, [on(device, x) for x in mine])] for mine in batches
    ]
    del plain
    manager = manage(strategy, scale.nbytes(14 * MIB))
    model = manager.adopt(layers(width, DEPTH))
    results: list[Any] = [None, None]

    def work(number: int) -> None:
        import torchTensorRef

        with torchTensorRef.disabled():
            mine = [manager.adopt(x) for x in batches[number]]
            results[number] = ours(manager, inference_of(model, mine))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert_same_at_home(expected, results)


def test_numbers_drawn_on_the_device_are_those_of_its_generator(manage, device, scale):
    manager = manage("lru", scale.nbytes(64 * MIB))
    if device.torch_device.type == "cpu":
        pytest.skip("this double of a device has the host's generator")
    torch.manual_seed(3)
    expected = [home(torch.rand(1000, device=device.torch_device)) for _ in range(3)]
    torch.manual_seed(3)
    label = manager.adopt(torch.empty(1000)).to(device.torch_device)
    assert_same_at_home(expected, ours(manager, [torch.rand_like(label) for _ in range(3)]))
    assert manager.stats()["host_fallback_reasons"] == {}


def test_a_number_that_is_read_is_waited_for_once(manage, device, monkeypatch):
    """The kernel that gives the number has waited already."""
    if not isinstance(device, LateDevice):
        pytest.skip("the double counts the waits")
    manager = manage("lru", 64 * MIB)
    total = (manager.adopt(torch.ones(1000)) * 2).sum()
    waits: list[Any] = []
    monkeypatch.setattr(LateEvent, "synchronize", lambda *_: waits.append("one"))
    monkeypatch.setattr(LateModule, "synchronize", lambda *_: waits.append("all"))
    assert total.item() == 2000.0
    assert float(total) == 2000.0
    assert bool(total > 1)
    assert waits == []
    monkeypatch.undo()
