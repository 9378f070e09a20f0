"""Native regions while gradients are noted: torch's own graph, held, counted, and let go of."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchTensorRef import options, tensorsManager

from ..support.programs import RandomEviction, assert_right, assert_same, plain_result, unchanged
from ..support.programs import managed_result as run_managed

AMPLE_NBYTES = 1 << 24
#: Of so many calls two are needed to find a module and to learn it.
FOUND, LEARNED = 1, 1
ALL_NATIVE = 4 - FOUND - LEARNED


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """A simulated device counts every operator, so regions have to be forced there."""
    with options(regions="forced"):
        yield
    assert not tensorsManager.residency.native_blocks, "a pass is over and still holds something"


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Any:
    return manage("lru", AMPLE_NBYTES)


def natively(program: Callable[..., Any], manager: Any) -> int:
    """Run a program both ways; return how many calls of modules ran natively."""
    before = manager.native.native_count
    assert_right(program, manager)
    return int(manager.native.native_count - before)


def doubts(model: Any) -> set[str]:
    """What has been found to speak against running a module natively."""
    regions = [r for r in tensorsManager.native.all_regions() if r.module() is model]
    return {s.doubt for region in regions for s in region.structures.values() if s.doubt}


def doubted(program: Any, manager: Any) -> set[str]:
    """Run a program of `trained` both ways; return what speaks against its model."""
    assert_right(program, manager)
    return doubts(program.model)


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.drop, self.second = nn.Dropout(0.2), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.first(x)))
        return self.second(self.drop(y)) + x.mean()


def trained(
    make: Callable[[], Any],
    *,
    steps: int = 5,
    loss_of: Callable[[Any, Any], Any] = lambda model, x: model(x).square().mean(),
    make_input: Callable[[], Any] = lambda: torch.rand(3, 16),
) -> Callable[[Any], Any]:
    """A program: some steps of training, and all that is left of them."""

    def program(bring: Any) -> Any:
        program.model = model = bring(make())  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen: list[Any] = []
        for _ in range(steps):
            loss = loss_of(model, bring(make_input()))
            optimizer.zero_grad()
            loss.backward()
            used = [p for p in model.parameters() if p.grad is not None]
            seen.append([loss.detach(), *(p.grad.clone() for p in used)])
            optimizer.step()
        return [seen, list(model.parameters())]

    return program


# -- the same numbers ------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.last.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        y = self.attention(x, x, x, need_weights=False)[0]
        return {"logits": self.last(x + y), "hidden": y}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Any) -> Any:
        return self.up(
            nn.functional.silu(self.norm(self.down(x[:, None, None] + x[:, None, :, None])))
        )


def _loss_of_tied(model: Any, ids: Any) -> Any:
    out = model(ids)
    return out["logits"].logsumexp(-1).mean() + out["hidden"].square().sum()


PROGRAMS = {
    "perceptron": trained(Mlp),
    "tied": trained(Tied, loss_of=_loss_of_tied, make_input=lambda: torch.randint(11, (2, 5))),
    "convolutions": trained(Convolutions, make_input=lambda: torch.rand(2, 8)),
    "encoder": trained(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        make_input=lambda: torch.rand(2, 3, 16),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_that_of_plain_torch(ample: Any, name: str) -> None:
    assert natively(PROGRAMS[name], ample) == 3, doubts(PROGRAMS[name].model)


@pytest.mark.parametrize("strategy", ["lru", "flow"])
@pytest.mark.parametrize("nbytes", [5_000, 9_000, 20_000])
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_that_is_short(
    manage: Callable[..., Any], strategy: str, nbytes: int, name: str
) -> None:
    natively(PROGRAMS[name], manage(strategy, nbytes))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_saved_is_evicted_at_random(
    manage: Callable[..., Any], name: str, seed: int
) -> None:
    manager = manage(RandomEviction(seed), AMPLE_NBYTES)
    assert natively(PROGRAMS[name], manager) == 3


def test_what_is_saved_goes_home_and_comes_back(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(Mlp()), bring(torch.rand(3, 16))
        for _ in range(4):
            loss = model(x).sum()
            ample.bring_all_home()
            loss.backward()
        return [p.grad for p in model.parameters()]

    evicted = ample.stats()["evict_count"]
    assert natively(program, ample) == ALL_NATIVE
    assert ample.stats()["evict_count"] > evicted


def test_what_no_longer_fits_is_copied_for_each_node(manage: Callable[..., Any]) -> None:
    manager = manage("lru", 40_000)

    def program(bring: Any) -> Any:
        model, x = bring(Mlp()), bring(torch.rand(3, 16))
        for _ in range(3):
            loss = model(x).sum()
            if bring is not tensorsManager.adopt:
                loss.backward()
                continue
            manager.bring_all_home()
            manager.budget = 5_000  # the largest weight takes 2,048 bytes
            loss.backward()
            manager.budget = 40_000
        return [p.grad for p in model.parameters()]

    plain = plain_result(program)
    torch.manual_seed(0)
    assert_same(plain, program(tensorsManager.adopt))


# -- gradients of many kinds -----------------------------------------------------------------------


def test_gradients_of_inputs_and_of_an_outer_graph(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, outer = bring(Mlp()), bring(nn.Linear(16, 16))
        x = bring(torch.rand(3, 16)).requires_grad_()
        for _ in range(4):
            model(outer(x)).exp().sum().backward()
        # `Mlp` uses its input in two places.
        many = "it uses what it is given more than once, and gradients are noted"
        assert bring is not tensorsManager.adopt or doubts(model) == {many}
        return [x.grad, *(p.grad for p in (*model.parameters(), *outer.parameters()))]

    assert natively(program, ample) > 0


def test_a_layer_inside_a_graph(ample: Any) -> None:
    def program(bring: Any) -> Any:
        first, last = bring(nn.Linear(16, 16)), bring(nn.Linear(16, 16))
        x = bring(torch.rand(3, 16)).requires_grad_()
        for _ in range(4):
            y = first(x).tanh()
            (last(y) + y).square().sum().backward()
        return [x.grad, *(p.grad for p in (*first.parameters(), *last.parameters()))]

    assert natively(program, ample) == 2 * ALL_NATIVE


def test_a_graph_that_is_kept_and_gone_through_again(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(Mlp()), bring(torch.rand(3, 16))
        for _ in range(4):
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        return [p.grad for p in model.parameters()]

    assert natively(program, ample) == ALL_NATIVE


def test_two_graphs_in_one_pass(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(Mlp()), bring(torch.rand(3, 16))
        for _ in range(3):
            weight_decay = sum(p.square().sum() for p in model.parameters())
            (model(x).sum() + weight_decay + model(x + 1).exp().sum()).backward()
        return [p.grad for p in model.parameters()]

    assert natively(program, ample) == 4


def test_second_derivatives(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model = bring(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)))
        x = bring(torch.rand(3, 16)).requires_grad_()
        for _ in range(4):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            ((slope.norm(2, 1) - 1) ** 2).mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert natively(program, ample) == ALL_NATIVE


def test_gradients_taken_inside(ample: Any) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Any) -> Any:
            place = x.detach().requires_grad_()
            energy = self.net(place).sum()
            return torch.autograd.grad(energy, place, create_graph=True)[0]

    assert doubted(trained(Force, make_input=lambda: torch.rand(4, 3)), ample) == set()


def test_gradients_of_chosen_tensors(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x, seen = bring(Mlp()), bring(torch.rand(3, 16)), []
        for _ in range(4):
            seen += torch.autograd.grad(model(x).sum(), [model.first.bias, model.second.weight])
        return seen

    assert natively(program, ample) == ALL_NATIVE


def test_several_gradients_at_once(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x, seen = bring(nn.Linear(4, 3)), bring(torch.rand(2, 4)), []
        for _ in range(4):
            out = model(x).tanh()
            seen += torch.autograd.grad(
                out, model.weight, bring(torch.eye(6).view(6, 2, 3)), is_grads_batched=True
            )
        return seen

    assert natively(program, ample) == ALL_NATIVE


def test_frozen_parameters(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(Mlp()), bring(torch.rand(3, 16))
        for step in range(8):
            model.first.requires_grad_(step % 4 < 2)
            model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    assert natively(program, ample) == 6


def test_nothing_requires_a_gradient(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(Mlp().requires_grad_(False)), bring(torch.rand(3, 16))
        return [model(x) for _ in range(4)]

    assert natively(program, ample) == ALL_NATIVE


def test_a_sparse_gradient(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, ids = bring(nn.Embedding(7, 4, sparse=True)), bring(torch.tensor([1, 3, 1]))
        for _ in range(3):
            model.zero_grad()
            model(ids).sum().backward()
        return model.weight.grad.to_dense()

    natively(program, ample)


# -- what looks on ---------------------------------------------------------------------------------


def test_names_in_the_graph(ample: Any) -> None:
    model, x = ample.adopt(Mlp()), ample.adopt(torch.rand(3, 16))
    names = [model(x).grad_fn.name() for _ in range(3)]
    assert names == ["AddBackward0"] * 3
    assert "grad_fn=<AddBackward0>" in repr(model(x))
    assert model(x).requires_grad
    assert not model(x).is_leaf


def test_hooks_of_parameters_and_inputs(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x, seen = bring(Mlp()), bring(torch.rand(3, 16)), []
        model.first.weight.register_hook(lambda grad: seen.append(grad.sum()) or grad * 2)
        model.second.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for _ in range(4):
            out = model(x)
            out.register_hook(lambda grad: seen.append(grad.sum()))
            out.retain_grad()
            out.square().sum().backward()
            seen.append(out.grad)
        return [seen, *(p.grad for p in model.parameters())]

    assert natively(program, ample) == ALL_NATIVE


@pytest.mark.parametrize(
    "register",
    [
        lambda model, note: model.register_full_backward_hook(lambda *_: note()),
        lambda model, note: model.register_full_backward_pre_hook(lambda *_: note()),
        lambda model, note: nn.modules.module.register_module_full_backward_hook(lambda *_: note()),
    ],
)
def test_hooks_of_modules_are_called(ample: Any, register: Any) -> None:
    model, x = ample.adopt(nn.Linear(16, 16)), ample.adopt(torch.rand(3, 16)).requires_grad_()
    calls: list[int] = []
    for _ in range(3):
        model(x).sum().backward()
    before, handle = ample.native.native_count, register(model, lambda: calls.append(1))
    try:
        model(x).sum().backward()
    finally:
        handle.remove()
    assert calls
    assert ample.native.native_count == before > 0


def test_a_hook_on_a_tensor_inside(ample: Any) -> None:
    class Hooked(Mlp):
        def forward(self, x: Any) -> Any:
            y = self.first(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return self.second(y)

    assert doubted(trained(Hooked), ample) == {"it hooks a gradient"}


def test_hooks_on_saved_tensors(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x, count = bring(Mlp()), bring(torch.rand(3, 16)), []
        for step in range(5):
            if step == 3:
                with torch.autograd.graph.save_on_cpu():
                    model(x).sum().backward()
            elif step == 4:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: count.append(1) or t, lambda t: t
                ):
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        return [len(count), *(p.grad for p in model.parameters())]

    assert natively(program, ample) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_outside", [True, False])
def test_checkpoints(ample: Any, use_reentrant: bool, is_outside: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mlp(), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            x = x + self.second.bias
            if is_outside:
                return self.second(self.first(x))
            return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant))

    def loss_of(model: Any, x: Any) -> Any:
        if is_outside:
            return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant).sum()
        return model(x).sum()

    natively(trained(Checkpointed, loss_of=loss_of), ample)


def test_autocast(ample: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.lin(self.lin(x))

    def loss_of(model: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    assert natively(trained(Twice, loss_of=loss_of), ample) == 0


def test_anomalies_are_found(ample: Any) -> None:
    model, x = ample.adopt(Mlp()), ample.adopt(torch.rand(3, 16))
    for _ in range(3):
        model(x).sum().backward()
    before = ample.native.native_count
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        model(x).sum().backward()
    assert ample.native.native_count == before


def test_a_function_in_python(ample: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    class Doubling(Mlp):
        def forward(self, x: Any) -> Any:
            return Double.apply(super().forward(x))

    assert doubted(trained(Doubling), ample) == {"DoubleBackward is in Python"}


# -- what is written, kept, let go of --------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda model, x, out: model.second.weight.add_(1),
        lambda model, x, out: x.mul_(2),
        lambda model, x, out: out.detach().mul_(2),
    ],
)
def test_what_was_saved_and_is_written_is_an_error(ample: Any, write: Any) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)).sigmoid()

    for bring in (lambda x: x, ample.adopt):
        model, x = bring(Saving()), bring(torch.rand(3, 16))
        for _ in range(3):
            out = model(x)
            with torch.no_grad():
                write(model, x, out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_what_was_not_saved_may_be_written(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x = bring(nn.Linear(16, 16)), bring(torch.rand(3, 16))
        for _ in range(3):
            out = model(x)
            with torch.no_grad():
                model.bias.add_(1)
                out.mul_(2)
            out.sum().backward()
        return [out, model.weight.grad, model.bias.grad]

    assert natively(program, ample) == 1


def test_an_input_that_is_written_inside(ample: Any) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Any, flag: str) -> Any:
            y = self.lin(x * 1)
            if flag == "write":
                x.add_(y)
            return y.tanh()

    def program(bring: Any) -> Any:
        model, seen = bring(Writing()), []
        for step in range(5):
            x = bring(torch.rand(3, 16)).requires_grad_()
            y = x * 1
            out = model(y, "write" if step == 3 else "")
            (out.sum() + y.exp().sum()).backward()
            seen.append([x.grad, y.detach(), out.detach()])
        return [seen, *(p.grad for p in model.parameters())]

    assert natively(program, ample) >= 2


def test_a_requires_grad_that_is_set_inside(ample: Any) -> None:
    class Setting(Mlp):
        def forward(self, x: Any) -> Any:
            return super().forward(x.requires_grad_())

    def program(bring: Any) -> Any:
        model, seen = bring(Setting()), []
        for _ in range(3):
            x = bring(torch.rand(3, 16))
            model(x).sum().backward()
            seen.append(x.grad)
        return seen

    natively(program, ample)


def test_nothing_is_held_when_the_graph_is_gone(ample: Any) -> None:
    model, x = ample.adopt(Mlp()), ample.adopt(torch.rand(3, 16))
    for _ in range(3):
        model(x).sum().backward()
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        ledger = ample.residency.ledgers[ample.residency.main]
        ample.check()
        before = ledger.resident_nbytes
        model(x).sum().backward()
        model.zero_grad()
        out = model(x)
        assert ledger.resident_nbytes > before + 2 * out.nbytes, "what is saved is counted"
        del out
        ample.check()
        assert ledger.resident_nbytes == before
    finally:
        gc.enable()


def test_a_model_that_is_let_go_of_is_gone(ample: Any) -> None:
    model, x = ample.adopt(Mlp()), ample.adopt(torch.rand(3, 16))
    for _ in range(3):
        model(x).sum().backward()
    gone = weakref.ref(model), weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_an_error_in_a_pass_lets_go_of_everything(ample: Any) -> None:
    model, x = ample.adopt(Mlp()), ample.adopt(torch.rand(3, 16))
    for _ in range(3):
        model(x).sum().backward()

    def fail(grad: Any) -> Any:
        raise ValueError("on purpose")

    handle = model.first.bias.register_hook(fail)
    loss = model(x).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=True)
    assert not ample.residency.native_blocks
    handle.remove()
    loss.backward()


def test_an_error_inside_a_module(ample: Any) -> None:
    class Failing(Mlp):
        def forward(self, x: Any, fails: Any = None) -> Any:
            y = super().forward(x)
            if fails == "yes":
                raise ValueError("on purpose")
            return y

    def program(bring: Any) -> Any:
        model, x = bring(Failing()), bring(torch.rand(3, 16))
        for step in range(5):
            if step == 3:
                with pytest.raises(ValueError, match="on purpose"):
                    model(x, "yes")
            model(x, "").sum().backward()
        return [p.grad for p in model.parameters()]

    natively(program, ample)


def test_memory_error_inside(ample: Any) -> None:
    fails = False

    class Full(Mlp):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if fails and type(x) is torch.Tensor and bring_is_ours:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return y

    def program(bring: Any) -> Any:
        nonlocal bring_is_ours, fails
        bring_is_ours = bring is not plain_bring
        model, x = bring(Full()), bring(torch.rand(3, 16))
        for step in range(6):
            fails = step > 3
            model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    bring_is_ours, plain_bring = False, unchanged
    natively(program, ample)


def test_tensors_kept_by_the_program(ample: Any) -> None:
    kept: list[Any] = []

    class Keeping(Mlp):
        def forward(self, x: Any) -> Any:
            y = self.first(x)
            kept.append(y)
            return self.second(y.exp())

    assert doubted(trained(Keeping), ample) == {
        "it leaves tensors behind where neither its arguments nor its result lead"
    }
    kept.clear()


def test_results_that_share_memory(ample: Any) -> None:
    class Sharing(Mlp):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y, y[0]

    def loss_of(model: Any, x: Any) -> Any:
        y, first = model(x)
        first.mul_(2)
        return y.square().sum()

    assert doubted(trained(Sharing, loss_of=loss_of), ample) == {"its results share memory"}


class Chain(nn.Module):
    """Returns what its last result is made of, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        y = self.first(x).tanh()
        return self.second(y), y


@pytest.mark.parametrize("way", ["grad", "retain_grad", "hook"])
def test_a_result_that_another_is_made_of(ample: Any, way: str) -> None:
    def program(bring: Any) -> Any:
        model, x, seen = bring(Chain()), bring(torch.rand(3, 16)), []
        for _ in range(4):
            z, y = model(x)
            if way == "grad":
                seen += torch.autograd.grad(z.sum(), y)
                continue
            y.retain_grad() if way == "retain_grad" else y.register_hook(lambda grad: grad * 2)
            (z.sum() + y.sum()).backward()
            seen.append(y.grad if way == "retain_grad" else y)
        made = "one of its results is made of another, and gradients are noted"
        assert bring is unchanged or doubts(model) == {made}
        return [seen, *(p.grad for p in model.parameters())]

    natively(program, ample)


def test_an_input_that_is_used_twice_and_returned(ample: Any) -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return x, self.lin(x).tanh() + x.sin()

    def program(bring: Any) -> Any:
        model, x = bring(Skip()), bring(torch.rand(3, 16)).requires_grad_()
        for _ in range(4):
            same, y = model(x * 1.5)
            (same.exp().sum() + y.square().sum()).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    natively(program, ample)


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_function_that_is_transformed_inside(ample: Any, is_foreseen: bool) -> None:
    class Slope(Mlp):
        def forward(self, x: Any, flag: str) -> Any:
            y = super().forward(x)
            if is_foreseen or flag == "slope":
                y = y + torch.func.grad(lambda t: t.square().sum())(x)
            return y

    def program(bring: Any) -> Any:
        model, x, seen = bring(Slope()), bring(torch.rand(3, 16)), []
        for step in range(6):
            model(x, "slope" if step == 4 else "").sum().backward()
        return [seen, *(p.grad for p in model.parameters())]

    natively(program, ample)


@pytest.mark.parametrize("is_saved_first", [True, False])
def test_an_input_that_an_unseen_branch_writes(ample: Any, is_saved_first: bool) -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Any, flag: str) -> Any:
            y = self.lin(x) if is_saved_first else None
            if flag == "write":
                with torch.no_grad():
                    x.clamp_(0, 0.5)
            return self.lin(x) if y is None else y

    for bring in (unchanged, ample.adopt):
        torch.manual_seed(0)
        model = bring(Clamping())
        for step in range(5):
            x = bring(torch.rand(3, 16)).requires_grad_()
            loss = model(x, "write" if step == 3 else "").sum()
            if step == 3 and is_saved_first:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
    ample.check()


def test_parameters_that_share_their_memory(ample: Any) -> None:
    def program(bring: Any) -> Any:
        flat = bring(torch.rand(16 * 16 + 16))
        model, x = bring(nn.Linear(16, 16)), bring(torch.rand(3, 16, requires_grad=True))
        model.weight.data, model.bias.data = flat[:256].view(16, 16), flat[256:]
        for step in range(6):
            loss = model(x).sum()
            with torch.no_grad():
                (model.weight if step % 2 else model.bias).add_(0.1)
            if step % 2:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
        return [flat, x.grad, *(p.grad for p in model.parameters())]

    assert natively(program, ample) == 4


def test_a_scripted_part(ample: Any) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.trace(nn.Linear(16, 16), torch.rand(2, 16))

        def forward(self, x: Any) -> Any:
            return self.part(x).tanh()

    natively(trained(Scripted), ample)


def test_shared_modules(ample: Any) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.lin(self.lin(self.lin(x)).tanh())

    def loss_of(model: Any, x: Any) -> Any:
        return model(x).sum() + model.lin.weight.exp().sum() + model(x.cos()).sum()

    natively(trained(Shared, loss_of=loss_of), ample)


def test_a_recurrent_network(ample: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.rnn(x)[0])

    natively(trained(Recurrent, make_input=lambda: torch.rand(2, 3, 4)), ample)


def test_batch_norm_counts_its_batches(ample: Any) -> None:
    make = lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
    natively(trained(make), ample)


def test_threads_train_their_own_models(ample: Any) -> None:
    def program(bring: Any) -> Any:
        models = [bring(nn.Linear(16, 16)) for _ in range(3)]
        xs = [bring(torch.rand(3, 16)) for _ in models]
        errors: list[BaseException] = []

        def train(model: Any, x: Any) -> None:
            try:
                with options(regions="forced"):
                    for _ in range(6):
                        model(x).tanh().sum().backward()
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=train, args=pair) for pair in zip(models, xs, strict=True)
        ]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert not errors
        return [p.grad for model in models for p in model.parameters()]

    natively(program, ample)


def test_gradients_on_and_off_by_turns(ample: Any) -> None:
    def program(bring: Any) -> Any:
        model, x, seen = bring(Mlp()), bring(torch.rand(3, 16)), []
        for step in range(8):
            with torch.set_grad_enabled(step % 2 == 0):
                out = model(x)
            if step % 2 == 0:
                out.sum().backward()
            seen.append(out)
        return [seen, *(p.grad for p in model.parameters())]

    assert natively(program, ample) == 5


def test_another_device_between_forward_and_backward(manage: Callable[..., Any]) -> None:
    model, x = None, torch.rand(3, 16)
    manager = manage("lru", AMPLE_NBYTES)
    plain = Mlp().eval()
    model = manager.adopt(Mlp().eval())
    model.load_state_dict(plain.state_dict())
    for step in range(3):
        loss = model(manager.adopt(x.clone())).sum()
        if step == 2:
            manager = manage("lru", AMPLE_NBYTES)
        loss.backward()
    for _ in range(3):
        plain(x).sum().backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_it_can_be_switched_off(ample: Any) -> None:
    ample.regions = False
    try:
        assert natively(PROGRAMS["perceptron"], ample) == 0
    finally:
        ample.regions = True


def test_a_simulated_device_counts_every_operator(ample: Any) -> None:
    with options(regions="on"):
        assert natively(PROGRAMS["perceptron"], ample) == 0
    run_managed(PROGRAMS["perceptron"], ample)
