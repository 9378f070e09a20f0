"""A forecast leaves real tensors as they were: their sizes, memory, versions, graphs, gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import PromisedError, disabled, forecast, promising, tensorsManager
from torchTensorRef.inject import hooks
from torchTensorRef.middlewares import Place
from torchTensorRef.promises import before


@pytest.fixture(autouse=True)
def injected(manage):
    manage()
    with hooks.is_disabled.entered(False):
        yield


def facts(x: torch.Tensor) -> Any:
    return (x.shape, x.stride(), x.requires_grad, x.is_leaf, x._version, x.tolist())


CHANGES = [
    lambda x: x.unsqueeze_(0),
    lambda x: x.t_(),
    lambda x: x.resize_(9),
    lambda x: x.set_(torch.zeros(2)),
    lambda x: x.requires_grad_(),
    lambda x: x.mul_(torch.ones(2, requires_grad=True)),
    lambda x: x[0].copy_(torch.zeros(2, requires_grad=True)),
    lambda x: setattr(x, "data", torch.zeros(5)),
    lambda x: torch.add(torch.ones(7), 1, out=x),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_tensor_is_as_it_was(change):
    x = torch.arange(4.0).view(2, 2).clone()
    view = x[1]
    before, seen = facts(x), facts(view)
    forecast(lambda: change(x))
    assert facts(x) == before
    assert facts(view) == seen
    x.zero_()
    assert view.tolist() == [0.0, 0.0]  # they still share memory
    tensorsManager.check()


@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        lambda x: forecast(lambda: x.resize_(9).zero_()),
        lambda x: forecast(lambda: x[0].t_().add_(1)),
        lambda x: (x.add_(1), x.sum().item(), x.add_(1)),
        lambda x: x.numpy(),
    ],
)
@pytest.mark.parametrize("values", ["compute", "zeros"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_promise_is_what_it_was(change, values):
    """What a forecast wrote into a promise that it was given stayed written, and so did sizes."""
    with promising():
        x = torch.arange(4.0).view(2, 2).clone()
    view, kept = x[1], []
    forecast(lambda: (change(x), kept.append(x * 2)), values=values)
    x.add_(1)
    assert facts(x.fulfil()) == ((2, 2), (2, 1), False, True, 1, [[1, 2], [3, 4]])
    assert view.fulfil().tolist() == [3, 4]
    x.zero_()
    assert view.tolist() == [0, 0]  # they still share memory
    tensorsManager.check()


def test_promises_inside_a_forecast_are_of_it():
    """What was written inside `promising()` inside a forecast stayed written."""
    x, y = torch.ones(3), torch.rand(2)
    state = torch.get_rng_state()

    def program():
        with promising({"item": 3}):
            y.resize_(x.mul_(2).sum().item()).normal_()
        return x.sum().item()  # by what the forecast answers

    seen = forecast(program)
    assert (x.tolist(), x._version, y.shape) == ([1, 1, 1], 0, (2,))
    assert torch.equal(torch.get_rng_state(), state)
    assert seen.record.ops[0].name == "aten.mul_.Tensor"


@pytest.mark.parametrize("make", [lambda: torch.ones(4, 2), lambda: torch.ones(2, 4).t()])
@pytest.mark.parametrize("scope", [promising, nullcontext])
def test_a_promise_or_a_view_that_was_exchanged_is_of_its_size(make, scope):
    with scope():
        x = make()
    forecast(lambda: torch.utils.swap_tensors(x, torch.zeros(3)))
    assert x.fulfil().tolist() == [[1, 1]] * 4


def test_views_of_a_promise_that_is_let_go_of_share_memory_afterwards():
    with promising():
        x = torch.zeros(4)
    view = x[:2]

    def program():
        for one in (x, view):
            one.data = torch.ones(3)
            one.add_(1)

    forecast(program)
    x.add_(1)
    assert view.fulfil().tolist() == [1, 1]
    assert x.fulfil().tolist() == [1, 1, 1, 1]
    x.zero_()
    assert view.tolist() == [0, 0]
    tensorsManager.check()


def test_what_a_forecast_makes_computes_and_writes_is_a_promise_afterwards():
    kept = []

    def program():
        kept.append(torch.zeros(1))
        kept[0].item()
        kept[0].add_(1)

    forecast(program)
    with pytest.raises(PromisedError):
        kept[0].tolist()


def test_gradients_go_where_they_went():
    """The graph of a tensor that a forecast had written ended in what the forecast had done."""
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 3
    part = x[1:]
    forecast(lambda: x.mul_(7))
    back = {"retain_graph": True}
    forecast(lambda: (part.mul_(5).sum().backward(**back), leaf))  # named, so that it is found
    assert leaf.grad is None
    (x.sum() + part.sum()).backward()
    assert leaf.grad.tolist() == [3.0, 6.0, 6.0]


def test_gradients_that_are_there_stay():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    given = x.grad

    def program():
        (x * y).sum().backward()

    forecast(program)
    assert x.grad is given
    assert (given.tolist(), y.grad) == ([2.0, 2.0], None)


def test_a_model_that_is_given_other_weights_has_its_own_afterwards():
    """As in a training loop written by hand: `p.data = p.data - lr * p.grad`."""
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]

    def step():
        model(torch.ones(1, 3)).sum().backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
        model.zero_grad()

    seen = forecast(step, steps=3)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert seen.steps[2].peak_nbytes == seen.steps[1].peak_nbytes  # what was replaced has died
    step()
    weight, bias = (b - 0.1 * torch.ones_like(b) for b in before)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)


@pytest.mark.parametrize("is_module", [True, False])
def test_what_was_exchanged_for_another_is_what_it_was(is_module, monkeypatch):
    """Torch exchanges what an object is, and tells nobody: a weight was a promise afterwards."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, called = nn.Linear(2, 2), []
    weight = model.weight
    model(torch.ones(1, 2)).sum().backward()
    weight.mark = "ours"
    weight.register_hook(lambda gradient: called.append("hook"))
    before, gradient = facts(weight), weight.grad

    def program():
        if is_module:
            model.half()(torch.ones(1, 2).half())
        else:
            torch.utils.swap_tensors(model.weight, torch.zeros(3, 3))
            model.weight.add_(1)

    for _ in range(2):
        forecast(program)
        assert facts(weight) == before
        assert (type(weight), weight.mark) == (type(model.bias), "ours")
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is gradient
    model(torch.ones(1, 2)).sum().backward()
    assert (weight.grad.tolist(), called) == ([[2, 2], [2, 2]], ["hook"])
    tensorsManager.check()


def before_it_is_written(x, y):
    torch.utils.swap_tensors(x, y)
    (x if y.is_inference() else y).add_(1)


def after_it_was_written(x, y):
    x.add_(1)
    torch.utils.swap_tensors(x, y)


def with_what_is_gone(x, y):
    with torch.inference_mode():
        other = y * 2
    torch.utils.swap_tensors(x, other)


def in_a_ring(x, y):
    other = torch.zeros(2)
    for one in (y, other, y):
        torch.utils.swap_tensors(x, one)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    "swap", [before_it_is_written, after_it_was_written, with_what_is_gone, in_a_ring]
)
def test_what_was_exchanged_for_one_of_inference_mode_is_what_it_was(swap, is_inference):
    """It ended in an error of ours, since those have no versions, and left the rest as it was."""
    x, last = torch.ones(3), torch.ones(3)
    with torch.inference_mode(is_inference):
        y = torch.ones(2) * 2
    x.mark, y.mark = "x", "y"

    def program():
        last.add_(5).requires_grad_()
        swap(x, y)

    for _ in range(2):
        forecast(program)
        assert facts(x) == facts(last) == (x.shape, (1,), False, True, 0, [1.0] * 3)
        assert (x.is_inference(), y.is_inference()) == (False, is_inference)
        assert (y.tolist(), x.mark, y.mark) == ([2.0, 2.0], "x", "y")
    w = torch.ones(3, requires_grad=True)
    (w * x).sum().backward()
    assert w.grad.tolist() == [1.0] * 3
    assert x.add_(1)._version == 1
    tensorsManager.check()


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_what_an_array_holds_of_a_weight_it_holds_afterwards(is_exchanged):
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    array = model.weight.detach().numpy()
    model.weight._ttr_block.is_persistent = True

    def program():
        other = nn.Parameter(torch.zeros(2, 2))
        if is_exchanged:
            torch.utils.swap_tensors(model.weight, other)
        else:
            model.weight.data = other.data
        model(x)

    forecast(program)
    for value in (1.0, 2.0):
        array[:] = value
        assert model(x).tolist() == [[2 * value] * 2]
    model.weight.data.fill_(3)
    assert array.tolist() == [[3, 3], [3, 3]]
    assert model.weight._ttr_block.is_persistent
    tensorsManager.check()


@pytest.mark.parametrize("made_so", [False, True])
@pytest.mark.parametrize("foretold_so", [False, True])
def test_a_weight_stays_of_the_mode_in_which_it_was_made(made_so, foretold_so):
    """A forecast in inference mode made all weights of that mode, and one outside lost it them."""
    with torch.inference_mode(made_so):
        model = nn.Linear(3, 2)
    weight, x = model.weight, torch.ones(1, 3)
    before = model(x).tolist()

    def program():
        weight.requires_grad_(False)
        return model(x)

    with torch.inference_mode(foretold_so):
        forecast(program)
    assert weight.is_inference() == made_so
    assert (x.is_inference(), weight.requires_grad) == (False, True)
    assert model(x).tolist() == before
    if not made_so:
        model(x).sum().backward()
        assert weight.grad.tolist() == [[1.0] * 3] * 2
    tensorsManager.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2).weight,
        lambda: nn.Embedding(3, 2).weight,
        lambda: nn.BatchNorm1d(2).running_var,
        lambda: nn.LSTM(2, 2).weight_hh_l0,
        lambda: torch.tensor([1.0, 2.0]).mul_(3),
    ],
)
def test_what_is_made_and_filled_inside_is_a_promise_afterwards(make):
    """It had what was in its memory before it was filled: whatever was left there."""
    kept = []
    forecast(lambda x: kept.append(make()), torch.ones(1))
    assert kept[0].proxyInfo.promised
    with pytest.raises(PromisedError):
        kept[0].tolist()
    with pytest.raises(PromisedError):
        kept[0].fulfil()
    tensorsManager.check()


def test_what_was_plain_before_and_is_written_inside_has_its_bytes():
    kept = {}
    with disabled():
        kept["old"], kept["shown"] = torch.ones(2), torch.ones(2)

    def program(x):
        kept["module"] = module = nn.Module()
        module.register_buffer("old", kept.pop("old"))
        module.register_buffer("shown", kept["shown"])
        module.old.add_(x)
        module.shown.add_(x)

    forecast(program, torch.ones(2))
    assert kept["module"].old.tolist() == [1, 1]
    assert kept["module"].shown.tolist() == kept["shown"].tolist() == [1, 1]
    tensorsManager.check()


class Decaying(torch.optim.Optimizer):
    """Counts in a number, as SparseAdam does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        """Take a step that is smaller than the last one."""
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.add_(p.grad, alpha=-0.1 / self.state[p]["step"])


OPTIMIZERS = {
    "decaying": Decaying,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_inside_counts_for_no_later_one(name):
    """Torch counts steps in plain tensors, of which nobody tells."""

    def trained(*, is_foretold: bool) -> Any:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        optimizer = OPTIMIZERS[name](model.parameters())

        def loss_of() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(loss_of)
        for _ in range(2 * is_foretold):
            _ = forecast(lambda: optimizer.step(loss_of), device="rtx4060").steps
        optimizer.step(loss_of)
        counts = [int(state["step"]) for state in optimizer.state.values()]
        return model.weight.tolist(), counts

    assert trained(is_foretold=True) == trained(is_foretold=False)


WITHOUT_SHAPES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adam, a rate in a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.1), fused=True),
}


def bytes_of(optimizer: Any) -> Any:
    state = optimizer.state_dict()["state"]
    return [p.tolist() for p in optimizer.param_groups[0]["params"]], repr(state)


@pytest.mark.parametrize("name", WITHOUT_SHAPES)
@pytest.mark.parametrize("values", ["compute", "compute or zeros", "zeros"])
def test_a_step_that_only_a_kernel_can_take_is_taken_back(name, values):
    """Torch has no shape function for these: they ran for real, on the real weights."""

    def trained(*, is_foretold: bool) -> Any:
        p = nn.Parameter(torch.ones(4))
        optimizer, inside = WITHOUT_SHAPES[name]([p]), []

        def step() -> None:
            p.grad = torch.arange(4.0)
            optimizer.step()
            inside.append(p.tolist())

        step()
        before, versions = bytes_of(optimizer), p._version
        if is_foretold:
            _ = forecast(lambda: (p, step(), step()), values=values).steps
            assert (bytes_of(optimizer), p._version) == (before, versions)
            assert p.grad.tolist() == [0, 1, 2, 3]
            if values != "zeros":  # inside, the copies are what was written
                assert inside[2] != inside[1] != inside[0]
        step()
        return bytes_of(optimizer)

    with disabled():
        plain = trained(is_foretold=False)
    assert trained(is_foretold=True) == plain
    tensorsManager.check()


@pytest.mark.parametrize("values", ["compute", "compute or zeros", "zeros"])
@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(3), lambda: torch.zeros(0), lambda: torch.zeros(6)[::2]]
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_only_a_kernel_can_fill_is_as_it_was(make, values):
    x, y = make(), torch.tensor([1.0, -1.0, 2.0, 3.0])
    asked, seen = x * 2, []
    before = facts(x)

    def program():
        twice = x * 2
        torch.masked_select(y, y > 0, out=x)
        seen.extend([x.tolist(), twice.tolist(), (x + 1).tolist()])

    forecast(program, values=values)
    assert facts(x) == before
    assert asked.tolist() == [0.0] * len(x)
    if values != "zeros":
        assert seen == [[1, 2, 3], [0.0] * len(x), [2, 3, 4]]
    assert torch.masked_select(y, y > 0, out=x).tolist() == x.tolist() == [1, 2, 3]
    tensorsManager.check()


def test_what_is_written_for_real_is_not_made_by_it():
    """A record had it as made by the operator, which asked for room for two."""
    x, y = torch.zeros(4), torch.ones(4)
    op = forecast(lambda: torch.masked_select(y, y > 0, out=x), values="compute").record.ops[-1]
    assert (op.name, len(op.writes), op.births) == ("aten.masked_select.out", 1, ())


def test_a_plain_tensor_that_only_a_kernel_can_fill_is_as_it_was():
    with disabled():
        plain = torch.zeros(2)
    y = torch.ones(2)
    forecast(lambda: torch.masked_select(y, y > 0, out=plain), values="compute")
    assert plain.tolist() == [0, 0]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_an_array_goes_on_sharing_what_only_a_kernel_can_write(is_sparse, on_host):
    x, y = torch.zeros(2), torch.ones(2)
    sparse, seen = y.to_sparse(), []
    array = x.numpy()

    def program():
        if is_sparse:
            x.add_(sparse)
        else:
            torch.masked_select(y, y > 0, out=x)
        seen.append((x.tolist(), array.tolist()))

    place = [Place("aten", "cpu")] if on_host else []
    with tensorsManager.middlewares.scoped(*place):
        forecast(program, values="compute")
    assert seen == [([1, 1], [0, 0])]
    assert x.tolist() == [0, 0]
    array[:] = 5
    assert (x.tolist(), (x + 1).tolist()) == ([5, 5], [6, 6])
    x.fill_(2)
    assert array.tolist() == [2, 2]
    tensorsManager.check()


def eye() -> Any:
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: torch.ones(3, 3), lambda x, s: x.add_(s)),
        (lambda: torch.ones(3, 3), lambda x, s: torch.mm(s, s.to_dense() * 2, out=x)),
        (eye, lambda x, s: torch.sspaddmm(x, s, torch.ones(3, 3), out=x)),
        (eye, lambda x, s: x.mul_(2)),
        (eye, lambda x, s: x.add_(s)),
        (eye, lambda x, s: x.sparse_resize_((5, 5), 2, 0)),
        (eye, lambda x, s: x.values().mul_(3)),
    ],
)
@pytest.mark.parametrize("values", ["compute", "zeros"])
def test_what_is_written_beside_a_sparse_tensor_is_as_it_was(make, write, values):
    """What has sparse operands runs for real in a forecast."""
    x, s = make(), eye()

    def sparse_facts() -> Any:
        return x.to_dense().tolist(), x._version, x.is_sparse and x.is_coalesced()

    before = sparse_facts()
    for _ in range(2):
        forecast(lambda: (write(x, s), x + 1 if not x.is_sparse else x.to_dense()), values=values)
        assert sparse_facts() == before
        tensorsManager.check()
    write(x, s)
    assert sparse_facts() != before
    tensorsManager.check()


def test_what_a_forecast_leaves_alone_is_not_put_back(monkeypatch):
    """Other threads may be using it: a moment later it would be the same, and now it is nothing."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.rand(4, 8)
    put: list[Any] = []
    real = before.replace_metadata

    def noting(ref: Any, other: Any) -> None:
        put.append(ref)
        real(ref, other)

    monkeypatch.setattr(before, "replace_metadata", noting)
    forecast(model, x)
    assert not {id(p) for p in model.parameters()} & {id(ref) for ref in put}
    assert any(ref is model[1].running_mean for ref in put)
