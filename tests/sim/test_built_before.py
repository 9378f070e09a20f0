"""A model that was there before torchTensorRef: adopted when it is called, or said to be plain."""

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import TensorRef, injectTo
from torchTensorRef.inject import hooks
from torchTensorRef.inject.built_before import PATIENCE, BuiltBefore

from ..support.injection import kind_of


@pytest.fixture
def build(manager, caplog):
    """Build something while torch is plain, then have it patched: `build(make)`."""

    def before_the_import(make):
        hooks.uninstall()
        try:
            return make()
        finally:
            hooks.install()

    logged = caplog.at_level(logging.WARNING, "torchTensorRef")
    with hooks.is_disabled.entered(False), logged:
        yield before_the_import
    injectTo.clear()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def with_optimizer():
    built = model()
    return built, torch.optim.AdamW(built.parameters(), lr=0.1)


def train(built, optimizer):
    losses = []
    for step in range(3):
        loss = built(torch.arange(12.0).view(3, 4) * step).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.tolist() for name, value in built.state_dict().items()}


def kinds(built):
    return {kind_of(tensor) for tensor in built.state_dict(keep_vars=True).values()}


def test_its_parameters_and_buffers_are_adopted_as_the_same_objects(build, manager, caplog):
    with torchTensorRef.disabled():
        expected = train(*with_optimizer())
    built, optimizer = build(with_optimizer)
    before = list(built.parameters())
    assert train(built, optimizer) == expected
    assert kinds(built) == {TensorRef}
    assert all(now is then for now, then in zip(built.parameters(), before, strict=True))
    assert all(
        now is then for now, then in zip(optimizer.param_groups[0]["params"], before, strict=True)
    )
    assert caplog.text == ""
    with torch.no_grad():
        built(torch.ones(3, 4))
        manager.reset_stats()
        for _ in range(5):
            built(torch.ones(3, 4))
    weights_nbytes = sum(p.nbytes for p in before)
    assert manager.stats()["fetched_nbytes"] < weights_nbytes, "they are fetched anew"


def test_nobody_looks_at_modules_any_more_when_all_are_adopted(build):
    def looking():
        hooks_now = nn.modules.module._global_forward_pre_hooks.values()
        return [hook for hook in hooks_now if isinstance(hook.__self__, BuiltBefore)]

    others = build(lambda: nn.Identity())  # what earlier tests have left behind is not meant
    assert others(1) == 1
    gc.collect()
    if looking():
        # Something outside holds a model of an earlier test; alone, this test always runs.
        pytest.skip("this process has other models that were built before")
    built = build(lambda: nn.Linear(4, 4))
    assert len(looking()) == 1
    with torchTensorRef.disabled():
        assert built(torch.ones(1, 4)).shape == (1, 4)
    assert kinds(built) == {nn.Parameter}, "plain tensors in a plain world"
    built(torch.ones(1, 4))
    assert kinds(built) == {TensorRef}
    assert looking() == []


def test_who_shares_its_memory_goes_on_sharing_it(build):
    def make():
        built = nn.Linear(2, 2)
        return built, built.weight.detach(), built.bias.detach().numpy()

    built, weight, bias = build(make)
    x = torch.ones(1, 2)
    for value in (1.0, 2.0):
        weight.fill_(value)
        bias[:] = value
        assert built(x).tolist() == [[3 * value] * 2]
    assert kinds(built) == {TensorRef}
    with torch.no_grad():
        built.weight.fill_(7)
    assert weight.tolist() == [[7, 7], [7, 7]]


def test_what_an_array_over_it_writes_is_seen(build):
    def make():
        built = nn.BatchNorm1d(2).eval().requires_grad_(False)
        return built, built.running_mean.numpy(), np.asarray(built.bias)

    built, mean, bias = build(make)
    for value in (1.0, 2.0):
        mean[:], bias[:] = value, 3.0
        assert built(torch.full((1, 2), value)).tolist() == [[3, 3]]
    assert kinds(built) == {TensorRef}


def test_a_graph_from_before_can_still_be_walked(build):
    def make():
        built = nn.Linear(2, 2)
        return built, built(torch.ones(1, 2)).sum()

    built, loss = build(make)
    built(torch.ones(1, 2)).sum().backward()
    loss.backward()
    assert built.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_gradients_and_hooks_stay(build):
    seen = []

    def make():
        built = nn.Linear(2, 2, bias=False)
        built(torch.ones(1, 2)).sum().backward()
        built.weight.register_hook(lambda gradient: seen.append("hook"))
        built.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("after"))
        return built, built.weight.grad

    built, gradient = build(make)
    built(torch.ones(1, 2)).sum().backward()
    assert isinstance(built.weight, TensorRef)
    assert built.weight.grad.tolist() == [[2, 2], [2, 2]]
    assert seen == ["hook", "after"]
    assert built.weight.grad is gradient


@pytest.mark.parametrize("adopt", [True, False])
def test_what_is_adopted_in_inference_mode_can_still_be_trained(build, manager, adopt):
    built = build(lambda: nn.Linear(2, 2))
    with torch.inference_mode():
        built(torch.ones(1, 2))
        if adopt:
            with torchTensorRef.disabled(), torch.inference_mode(False):
                built = nn.Linear(2, 2)
            manager.adopt(built)
    assert kinds(built) == {TensorRef}
    built(torch.ones(1, 2)).sum().backward()
    assert built.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_adopt_keeps_gradients_and_hooks_too(build, manager):
    seen = []
    with torchTensorRef.disabled():
        built = nn.Linear(2, 2, bias=False)
        built(torch.ones(1, 2)).sum().backward()
        handle = built.weight.register_hook(lambda gradient: seen.append("hook"))
    manager.adopt(built)
    built(torch.ones(1, 2)).sum().backward()
    handle.remove()
    built(torch.ones(1, 2)).sum().backward()
    assert built.weight.grad.tolist() == [[3, 3], [3, 3]]
    assert seen == ["hook"]


def call_often(module):
    for _ in range(5):
        module(torch.ones(1, 3))


def test_what_is_not_certain_is_said_once_with_the_way_out(build, manager, caplog):
    def make():
        built = nn.Linear(3, 5)
        return built, weakref.ref(built.weight)

    built, _reference = build(make)
    with pytest.warns(RuntimeWarning, match="torchTensorRef: a parameter of 15 elements") as told:
        call_often(built)
    assert type(built.weight) is nn.Parameter
    assert isinstance(built.bias, TensorRef)
    assert len(told) == 1
    assert "Call tensorsManager.adopt(model)" in str(told[0].message)
    assert told[0].filename == __file__
    assert caplog.text.count("is plain, so every operator fetches it anew") == 1
    assert "parameter of 15 elements" in caplog.text
    assert "tensorsManager.adopt(model)" in caplog.text
    expected = built(torch.ones(1, 3)).tolist()
    assert manager.adopt(built)(torch.ones(1, 3)).tolist() == expected
    assert isinstance(built.weight, TensorRef)


def test_a_copy_of_it_is_a_model_of_tensor_refs(build):
    built = build(lambda: nn.Linear(3, 5))
    assert kinds(copy.deepcopy(built)) == {TensorRef}
    assert kinds(built) == {nn.Parameter}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rnn = nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rnn(self.second(self.first(x)) * self.scale)[0]
        return found


@pytest.mark.parametrize("way", [pickle.dumps, "torch"])
def test_what_pickle_gives_is_managed_with_its_optimizer(build, manager, way):
    """Each operator fetched an unpickled model's weights anew, and brought an optimizer's back."""
    build(lambda: None)
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        optimizer.zero_grad()  # which no pickle carries
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return [p.tolist() for p in model.parameters()]

    step(model, optimizer)
    if way == "torch":
        file = io.BytesIO()
        torch.save([model, optimizer], file)
        file.seek(0)
        again, other = torch.load(file, weights_only=False)
    else:
        again, other = pickle.loads(way((model, optimizer)))
    assert kinds(again) == {TensorRef}
    assert isinstance(again.scale, TensorRef)
    assert again.first.weight is again.second.weight
    assert again.rnn._flat_weights[0] is again.rnn.weight_ih_l0
    state = other.state[again.first.weight]
    assert all(isinstance(value, TensorRef) for value in state.values())
    exposures = [p._ttr_block.exposure for p in again.parameters()]
    assert not any(exposure is not None and exposure.alive for exposure in exposures)
    assert [step(model, optimizer) for _ in range(2)] == [step(again, other) for _ in range(2)]
    manager.check()


@pytest.mark.parametrize("is_adopted", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_model_is_what_its_optimizer_trains(build, manager, kind, is_adopted):
    """It refers to its parameters weakly: others took their places, and were not trained."""

    def trained(model: Any, optimizer: Any) -> list[Any]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3))[0].square().sum().backward()
            optimizer.step()
        return [model(torch.ones(2, 3))[0].tolist(), *(p.tolist() for p in model.parameters())]

    def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = kind(3, 3)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = build(with_optimizer)
    if is_adopted:
        manager.adopt(model)
    found = trained(model, optimizer)
    assert kinds(model) == {TensorRef}
    with torchTensorRef.disabled():
        assert found == trained(*with_optimizer())


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_a_forecast_writes_nothing_of_it(build, manager, kind):
    """What a program wrote before its first call of the model was written, for real."""

    def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind(3, 3)
        model.register_buffer("scale", torch.ones(3))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = build(with_optimizer)
    held = list(model.parameters())
    before = [p.tolist() for p in held]

    def program() -> None:
        with torch.no_grad():
            for tensor in (*model.parameters(), model.scale):
                tensor.mul_(0.5)
        output = model(torch.ones(2, 3))
        (output[0] if kind is nn.LSTM else output).sum().backward()
        optimizer.step()

    torchTensorRef.forecast(program)
    assert [p.tolist() for p in held] == before
    assert all(mine is p for mine, p in zip(held, model.parameters(), strict=True))
    assert model.scale.tolist() == [1, 1, 1]
    assert kinds(model) == {TensorRef}
    manager.check()


def test_what_is_shared_with_another_process_stays_plain(build):
    build(lambda: None)
    with torchTensorRef.disabled():
        model = nn.Linear(2, 2).share_memory()
        pickled = ForkingPickler.dumps(model)
    assert kinds(pickle.loads(pickled)) == {nn.Parameter}


def test_what_is_unpickled_while_disabled_or_left_out_stays_plain(build):
    build(lambda: None)
    pickled = pickle.dumps(nn.Linear(2, 2))
    with torchTensorRef.disabled():
        assert kinds(pickle.loads(pickled)) == {nn.Parameter}
    injectTo.exclude(__name__)
    assert kinds(pickle.loads(pickled)) == {nn.Parameter}


def test_hooks_that_come_later_to_an_unpickled_parameter_are_called(build):
    """Pickle gives it an empty dictionary of hooks, which torch takes for known to C++ already."""
    build(lambda: None)
    holder = nn.Module()
    holder.weight = pickle.loads(pickle.dumps(nn.Parameter(torch.ones(3))))
    weight = holder.weight
    assert isinstance(weight, TensorRef)
    weight.register_hook(lambda gradient: gradient * 0.5)

    def note_ten(weight: torch.Tensor) -> None:
        weight.grad.add_(10)

    weight.register_post_accumulate_grad_hook(note_ten)
    (weight * 4).sum().backward()
    assert weight.grad.tolist() == [12.0] * 3


def test_parameters_that_come_and_go_in_one_place_are_not_counted_as_one(build):
    """The next one often has the `id` of the one before: then each met TensorRefs once only."""
    build(lambda: None)
    x, counts = torch.ones(1, 3), Counter[int]()
    for _ in range(50_000):
        if max(counts.values(), default=0) > PATIENCE:
            break
        with torchTensorRef.disabled():
            parameter = nn.Parameter(torch.ones(3, 5), requires_grad=False)
        x @ parameter  # a warning would be an error
        counts[id(parameter)] += 1
        del parameter
    assert max(counts.values()) > PATIENCE, "no id came again: the test has shown nothing"


def test_models_that_are_plain_by_choice_stay_so(build):
    with torchTensorRef.disabled():
        chosen = nn.Linear(2, 2)
    for _ in range(2):
        chosen(torch.ones(1, 2))
    assert kinds(chosen) == {nn.Parameter}
    injectTo.exclude(__name__)
    built = build(lambda: nn.Linear(2, 2))
    with torchTensorRef.disabled():
        pass
    built(torchTensorRef.tensorsManager.adopt(torch.ones(1, 2)))
    assert kinds(built) == {nn.Parameter}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this torch can name an accelerator")
def test_it_goes_to_an_accelerator_as_the_same_objects(build):
    built, optimizer = build(with_optimizer)
    before = list(built.parameters())
    built.to("cuda")
    assert all(now is then for now, then in zip(built.parameters(), before, strict=True))
    assert kinds(built) == {TensorRef}
    with torchTensorRef.disabled():
        expected = train(*with_optimizer())
    assert train(built, optimizer) == expected


def test_in_a_program_that_imports_us_last(tmp_path):
    program = (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 3)\n"
        "import torchTensorRef\n"
        "print(len(torch.nn.modules.module._global_forward_pre_hooks))\n"
        "with torch.no_grad():\n"
        "    model(torch.ones(2, 3))\n"
        "print(*(hasattr(p, 'proxyInfo') for p in model.parameters()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["1", "True", "True"]
    assert "is plain" not in done.stderr
