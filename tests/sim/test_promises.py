"""Promises: no bytes, the right shapes, and when they are fulfilled plain torch's values."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import PromisedError
from torchTensorRef.inject import hooks
from torchTensorRef.promises import graph, kernel_settings
from torchTensorRef.promises.promising import promises

from ..support.differential import differences
from ..support.programs import Scatter, assert_right, assert_same, mlp
from ..support.promised import asked_on_both
from ..support.sweeps import WHOLE, one_in
from ..support.turns import taking_turns_every

COUNT = 200 if WHOLE else 100


@pytest.fixture(autouse=True)
def injected(manage):
    with hooks.is_disabled.entered(False):
        yield


def on_both(program: Any) -> tuple[Any, Any]:
    """Run a program with plain torch and on promises, which are then fulfilled."""
    plain, ours = asked_on_both(program)
    for ref in ours:
        assert ref.proxyInfo.promised
        ref.fulfil()
        assert not ref.proxyInfo.promised
    return plain, ours


# -- random programs ------------------------------------------------------------------------------

STEPS: tuple[Any, ...] = (
    lambda x, y: x + 1,
    lambda x, y: x @ y.t(),
    lambda x, y: (x.t()[1:5].mul_(0.5).add_(y[:4].sin()), None)[1],
    lambda x, y: x.clone().add_(y),
    lambda x, y: torch.cat([x[:4], y[4:]]),
    lambda x, y: x.sort(dim=1)[0],
    lambda x, y: (x.view(-1)[::3].copy_(y.view(-1)[:22]), None)[1],
    lambda x, y: (torch.mul(x, y, out=x), None)[1],
    lambda x, y: (x.masked_fill_(x > y, 0.25), None)[1],
    lambda x, y: torch.rand_like(x) * y,
    lambda x, y: torch.rand(8, 8) - x,
    lambda x, y: (torch._foreach_add_([x, y], 1), None)[1],
    lambda x, y: nn.functional.dropout(x, 0.5),
    lambda x, y: x.softmax(-1).contiguous(),
    lambda x, y: torch.zeros(8, 8).index_copy_(0, torch.tensor([1, 3]), x[:2]),
    lambda x, y: x.chunk(2, dim=1)[1].repeat(1, 2),
    lambda x, y: torch.where(y > 0.5, x, y),
    lambda x, y: x.double().float(),
    lambda x, y: x.unsqueeze(0).expand(2, 8, 8).sum(0),
    lambda x, y: torch.linalg.qr(x)[0].contiguous(),
)


def a_program(seed: int) -> Any:
    """Make a program of some twenty operators: views, writes, aliases, random numbers."""

    def program() -> list[torch.Tensor]:
        chance = random.Random(seed)
        xs = [torch.arange(64.0).view(8, 8).sin(), torch.rand(8, 8), torch.ones(8, 8)]
        for _ in range(20):
            at, other = chance.randrange(3), chance.randrange(3)
            made = chance.choice(STEPS)(xs[at], xs[other])
            if made is not None:
                xs[at] = made
        chance.shuffle(xs)  # they are fulfilled in another order
        return xs

    return program


@pytest.mark.parametrize("part", one_in(2, range(8)))
def test_random_programs_are_bit_equal_when_fulfilled(manage, part):
    manage("lru", nbytes=3_000)
    for seed in range(part, COUNT, 8):
        plain, ours = on_both(a_program(seed))
        assert differences(plain, ours) == [], f"seed {seed}"


def test_random_programs_are_bit_equal_when_fulfilled_on_two_accelerators(manage):
    manager = manage(Scatter(1), nbytes=3_000, count=2)
    for seed in range(0, COUNT, 8):
        plain, ours = on_both(a_program(seed))
        assert differences(plain, ours) == [], f"seed {seed}"
    assert all(device.clocks().compute_ns for device in manager.residency.books.accelerators)


def test_what_real_tensors_were_counts_and_not_what_they_become(manage):
    manager = manage("lru")
    x = manager.adopt(torch.arange(40.0))
    with torchTensorRef.promising():
        doubled = x * 2
    x.add_(100)
    assert_same(torch.arange(40.0) * 2, doubled.fulfil())
    assert_same(torch.arange(40.0) + 100, x)


def test_a_real_tensor_that_is_written_is_promised_from_then_on(manage):
    manager = manage("lru")
    x = manager.adopt(torch.ones(8))
    part = x[2:4]
    with torchTensorRef.promising():
        part.mul_(5)
        before = x + 0
        part.zero_()
    assert x.proxyInfo.promised
    assert part.proxyInfo.promised
    expected = torch.ones(8)
    expected[2:4] = 0
    assert_same(expected, x.fulfil())
    assert_same(expected[2:4], part)
    expected[2:4] = 5
    assert_same(expected, before.fulfil())


def test_training_on_promises_gives_plain_torchs_gradients(manage):
    manage("flow", nbytes=4_000)

    def program() -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 8)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    plain, ours = on_both(program)
    assert differences(plain, ours) == []


def _gradient(function: Any) -> Any:
    def program(x: torch.Tensor) -> list[torch.Tensor | None]:
        x.requires_grad_()
        function(x).abs().square().sum().backward()
        return [x.grad]

    return program


OTHERWISE_LAID_OUT = {
    "rfft2": lambda x: [torch.fft.rfft2(x)],
    "views of rfftn": lambda x: [(y := torch.fft.rfftn(x))[1], y.real.mT.sum(0), y.imag + 1],
    "eigenvalues": _gradient(torch.linalg.eigvals),
    "singular values": _gradient(torch.linalg.svdvals),
    "condition": _gradient(torch.linalg.cond),
    "out=": lambda x: [torch.fft.rfft2(x, out=torch.empty(0, dtype=torch.complex64))],
    "a number that is resized": lambda x: [torch.linalg.matrix_rank(x, x.detach().abs())],
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program", OTHERWISE_LAID_OUT.values(), ids=OTHERWISE_LAID_OUT)
def test_kernels_may_lay_out_their_results_otherwise(manage, program):
    """Shape functions say other strides than the kernels have; the values are the same ones."""
    manager = manage("lru")
    plain, ours = on_both(lambda: program(torch.rand(4, 4)))
    assert [one.tolist() for one in ours] == [one.tolist() for one in plain]
    manager.check()


def test_what_only_looks_runs_once(manage):
    def program():
        layer = nn.GRU(16, 32)
        loss = layer(torch.randn(5, 3, 16))[0].square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in layer.parameters())]

    manage(nbytes=1 << 20)
    plain, ours = on_both(program)
    assert not differences(plain, ours)


@pytest.mark.parametrize(
    "function",
    [torch.linalg.cholesky, torch.linalg.inv, lambda x: torch.linalg.solve(x, x) + 1],
    ids=["cholesky", "inv", "solve"],
)
def test_what_a_kernel_refuses_is_refused_when_it_runs(manage, function):
    manager = manage("lru")
    x = manager.adopt(-torch.ones(3, 3))
    with torchTensorRef.promising():
        promise = function(x)
        unwanted = function(x)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            promise.fulfil()
    del unwanted
    manager.check()


def test_an_assertion_runs_with_what_it_looks_at(manage):
    manage("lru")
    x = torch.ones(3)
    with torchTensorRef.promising():
        right, wrong = x * 2, x * 0
        torch._assert_async(right.sum() + right.max() > 0)
        torch._assert_async(wrong.any())
    assert right.fulfil().tolist() == [2, 2, 2]
    assert wrong.fulfil().tolist() == [0, 0, 0]  # nobody wants what is asserted


@pytest.mark.parametrize("is_real", [True, False])
def test_an_assertion_about_what_is_there_runs_at_once(manage, is_real):
    """It waited for what had been computed already, and so was never run."""
    manage("lru")
    x = torch.ones(3)
    with torchTensorRef.promising():
        flag = x.sum() > 5
    flag.fulfil()
    if is_real:
        with torchTensorRef.disabled():
            flag = torch.tensor(False)
    with torchTensorRef.promising():
        torch._assert_async(torch.tensor(True))
        with pytest.raises(RuntimeError, match="must be true"):
            torch._assert_async(flag, "it must be true")


def test_many_writes_of_one_tensor_take_no_more_each(manage):
    manage("lru")
    x, count = torch.zeros(2), 300
    with torchTensorRef.promising():
        for _ in range(count):
            x.add_(1)
    looked = []
    before = graph.Cell.users_before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph.Cell, "users_before", lambda *args: looked.append(1) or before(*args))
        assert x.fulfil().tolist() == [count] * 2
    assert len(looked) < 5


def test_what_nobody_wants_is_not_computed(manage, monkeypatch):
    manager = manage("lru")
    with torchTensorRef.promising():
        x = torch.ones(4)
        wanted, unwanted = x + 1, torch.ones(1 << 40).sin()
    assert_same(torch.ones(4) + 1, wanted.fulfil())
    assert unwanted.proxyInfo.nbytes == 4 << 40
    manager.check()


# -- values ---------------------------------------------------------------------------------------

QUESTIONS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "repeated": lambda x: torch.repeat_interleave((x > 0).long()),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_for_a_value_says_who_asks_and_where(manage, question):
    manage("lru")
    with torchTensorRef.promising():
        x = torch.ones(4) + 1
        with pytest.raises(PromisedError, match=r"test_promises\.py:\d+ needs a value") as asked:
            QUESTIONS[question](x)
        # What reads bytes and is no operator cannot be answered by a name.
        assert ("a read" in str(asked.value)) == ("with 'zeros'" in str(asked.value))
    assert x.proxyInfo.promised
    assert_same(torch.full((4,), 2.0), x.fulfil())


@pytest.mark.parametrize("size", [(), (3,)])
def test_what_plain_tensors_were_counts_and_not_what_they_become(manage, size):
    """A plain number was read when the promise was fulfilled, and not when it was made."""
    manager = manage("lru")
    with torchTensorRef.disabled():
        x, plain = manager.adopt(torch.ones(3)), torch.full(size, 2.0)
    with torchTensorRef.promising():
        first = x * plain
        plain.add_(5)
        second = x * plain
    plain.add_(1)
    assert [a.fulfil().tolist() for a in (first, second)] == [[2] * 3, [7] * 3]


def test_promises_of_numbers_meet_plain_ones(manage):
    """Gradients of an unbound vector are: the one that is a promise, and zeros that are plain."""
    manager = manage("lru")
    x = manager.adopt(torch.ones(3)).requires_grad_()
    with torchTensorRef.promising():
        (x.unbind()[1] * 2).backward()
    assert x.grad.fulfil().tolist() == [0, 2, 0]


@pytest.mark.parametrize("is_inside", [True, False])
def test_what_is_set_to_a_promise_shares_it_and_its_own_memory_is_not_written(manage, is_inside):
    """It was noted as a write of the memory that it left: whatever was over that was lost."""
    manager = manage("lru")
    x = manager.adopt(torch.arange(4.0))
    view, twin, beside = x[1:], manager.adopt(torch.zeros(3)), manager.adopt(torch.zeros(3))
    with torchTensorRef.promising():
        y = manager.adopt(torch.ones(3)) * 2
        if is_inside:
            x.set_(y)
            twin.set_(y, 1, (2,), (1,))
            y.set_(beside)
    if not is_inside:
        x.set_(y)
        twin.set_(y, 1, (2,), (1,))
        y.set_(beside)
    x.add_(1)
    beside.sub_(1)
    assert [a.fulfil().tolist() for a in (x, twin)] == [[3, 3, 3], [3, 3]]
    assert [a.fulfil().tolist() for a in (y, beside, view)] == [[-1, -1, -1]] * 2 + [[1, 2, 3]]


def test_forward_gradients_ask_a_promise_for_its_sizes_only(manage):
    """They ask whether a gradient is of the size of its tensor, which no value is needed for."""
    manager = manage("lru")
    x, along = torch.rand(3), torch.rand(3)
    expected = torch.func.jvp(torch.sin, (x * 2,), (along * 2,))
    with torchTensorRef.promising():
        found = torch.func.jvp(torch.sin, (manager.adopt(x) * 2,), (manager.adopt(along) * 2,))
    assert_same(expected, tuple(promise.fulfil() for promise in found))


@pytest.mark.parametrize("question", QUESTIONS)
def test_values_are_computed_where_that_is_asked_for(manage, question):
    manage("lru")
    with torchTensorRef.disabled():
        expected = QUESTIONS[question](torch.ones(4) + 1)
    with torchTensorRef.promising(values="compute"):
        found = QUESTIONS[question](torch.ones(4) + 1)
    assert differences([expected], [found]) == [] if question != "numpy" else True
    assert (found == expected).all() if question == "numpy" else True


def test_given_answers(manage):
    manage("lru")
    answers = {"item": 3, "nonzero": lambda x: torch.zeros(1, x.dim(), dtype=torch.int64)}
    with torchTensorRef.promising(values=answers):
        x = torch.ones(4)
        assert x.sum().item() == 3
        assert x.nonzero().shape == (1, 1)
        with pytest.raises(PromisedError):
            x.tolist()
    with torchTensorRef.promising(values="zeros"):
        assert torch.ones(4).sum().item() == 0
        assert torch.ones(2).tolist() == [0, 0]
        assert torch.ones(3).nonzero().shape == (0, 1)
    with torchTensorRef.promising(values=7):
        first = torch.ones(4).sum().item()
    with torchTensorRef.promising(values=7):
        assert torch.ones(4).sum().item() == first != 4


def test_an_unknown_policy_names_the_nearest(manage):
    manage("lru")
    with (
        pytest.raises(torchTensorRef.ConfigError, match="Did you mean 'zeros'"),
        torchTensorRef.promising(values="zeroes"),
    ):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8).dequantize(),
        lambda x: torch.nested.as_nested_tensor([x, x]).unbind()[1],
        lambda x: x.to_mkldnn().to_dense(),
    ],
    ids=["quantized", "nested", "mkldnn"],
)
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", r"ignore:torch\.quantize_per_tensor"
)
def test_what_no_promise_can_be_is_asked_for(manage, make):
    """Torch had no shape function, or a wrong one."""
    manage("lru")
    with torchTensorRef.promising(), pytest.raises(PromisedError, match="needs a value"):
        make(torch.ones(4))
    with torchTensorRef.promising(values="compute"):
        assert make(torch.ones(4)).tolist() == [1, 1, 1, 1]


def test_a_promise_prints_as_one(manage):
    manage("lru")
    with torchTensorRef.promising():
        x = torch.ones(2, 3)
    assert repr(x) == "tensor(promised, size=(2, 3), dtype=torch.float32)"
    assert "fulfilled" not in repr(x.fulfil())


def test_what_is_outside_cannot_see_a_promise(manage):
    manager = manage("lru")
    x = manager.adopt(torch.ones(4))
    array = x.numpy()
    with torchTensorRef.promising(), pytest.raises(PromisedError, match="held outside") as asked:
        x.add_(1)
    assert "write a clone() of it instead, or have it computed" in str(asked.value)
    assert array.tolist() == [1, 1, 1, 1]
    with torchTensorRef.promising(values="compute"):
        x.add_(torch.ones(4) * 2)
    assert array.tolist() == [3, 3, 3, 3]


def test_a_deep_copy_of_a_promise_is_one(manage):
    """It was refused: `nn.TransformerEncoder` and whatever else copies its layers."""

    def program() -> list[torch.Tensor]:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        copies = copy.deepcopy(nn.Sequential(layer, nn.BatchNorm1d(3)))
        seen = [x := torch.rand(3, 4), x[1:], x.to(torch.complex64).t().conj()]
        twins = copy.deepcopy(seen)
        twins[1].mul_(2)
        seen[1].add_(1)
        return [*copies.state_dict().values(), seen[0], seen[2], twins[1], twins[2]]

    manager = manage("lru")
    plain, ours = on_both(program)
    assert differences(plain, ours) == []
    manager.check()


def test_scopes_are_of_one_thread(manage):
    manage("lru")
    seen: list[Any] = []
    with torchTensorRef.promising():
        thread = threading.Thread(target=lambda: seen.append((torch.ones(3) + 1).tolist()))
        thread.start()
        thread.join()
    assert seen == [[2, 2, 2]]


def test_threads_fulfil_the_same_promises(manage):
    """Each operator runs once, whoever asks first: what is written in place would be twice."""
    manager = manage("lru")

    def program() -> list[torch.Tensor]:
        x, found = torch.ones(100), []
        for number in range(6):
            x = x * 2 - 1
            x.add_(number)
            x[10:].mul_(1.5)
            found.append(x + 1)
        return found

    with torchTensorRef.disabled():
        expected = [values.tolist() for values in program()]
    with taking_turns_every(1e-6), ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            with torchTensorRef.promising():
                promised = program()
            together = threading.Barrier(3)

            def fulfil(first: int, promised: Any = promised, together: Any = together) -> Any:
                together.wait()
                places = [(first + step) % 6 for step in range(6)]
                return {place: promised[place].fulfil().tolist() for place in places}

            for found in pool.map(fulfil, (0, 3, 5)):
                assert [found[place] for place in range(6)] == expected
    manager.check()


def test_what_is_promised_to_be_written_while_it_is_fulfilled_is_written(manage):
    manager = manage("lru")
    with torchTensorRef.promising():
        x = torch.zeros(100)
    is_over = threading.Event()

    def fulfil() -> None:
        while not is_over.is_set():
            x.fulfil()

    with taking_turns_every(1e-6), ThreadPoolExecutor(1) as pool:
        done = pool.submit(fulfil)
        try:
            with torchTensorRef.promising():
                for _ in range(200):
                    x.add_(1)
        finally:
            is_over.set()
        done.result()
    assert_same(torch.full((100,), 200.0), x.fulfil())
    manager.check()


def test_an_interrupted_fulfilment_can_go_on(manage, monkeypatch):
    """What was computed stays computed; the rest is computed the next time, once."""
    manage("lru")
    with torchTensorRef.promising():
        x = torch.zeros(4)
        for _ in range(6):
            x.add_(1)
        y = x * 3
    run, calls = graph.Node.fulfil, []

    def failing(node: Any) -> None:
        calls.append(node)
        if len(calls) == 4:
            raise KeyboardInterrupt
        run(node)

    monkeypatch.setattr(graph.Node, "fulfil", failing)
    with pytest.raises(KeyboardInterrupt):
        y.fulfil()
    assert y.proxyInfo.promised
    assert_same(torch.full((4,), 18.0), y.fulfil())
    assert len(calls) == 9


def test_real_programs_go_on_as_ever_after_a_scope(manage):
    manager = manage("lru", nbytes=4_000)
    with torchTensorRef.promising():
        _ = torch.ones(3) + 1
    with torchTensorRef.disabled():
        assert_right(mlp, manager)


def test_a_real_tensor_written_inside_forgets_where_it_was(manager):
    """Its bytes come from elsewhere; a view that was kept ended in a segmentation fault."""
    y = manager.adopt(torch.arange(16.0))
    y.add_(1)  # on the accelerator, where a view of it is kept
    with torchTensorRef.promising():
        y.index_add_(0, torch.tensor([0]), y[:1].clone())
    y.fulfil()
    manager.bring_all_home()
    y[0] = 3
    assert y.add_(1).tolist() == [4, *range(3, 18)]


def test_what_a_forecast_has_written_takes_the_ready_path_again(manager):
    y = manager.adopt(torch.zeros(4))
    y.add_(1)
    torchTensorRef.forecast(lambda: y.add_(1))
    y.add_(1)
    before = manager.stats()["ready_op_count"]
    assert y.add_(1).tolist() == [3] * 4
    assert manager.stats()["ready_op_count"] == before + 1


def test_autocast_where_it_is_fulfilled_does_not_count():
    x = torch.rand(4, 4)
    with torchTensorRef.promising():
        y = x @ x
    with torch.autocast("cpu"):
        y.fulfil()
    assert y.dtype == torch.float32
    assert_same((x @ x).cpu(), y)


@contextlib.contextmanager
def a_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def convolved():
    torch.manual_seed(0)
    return torch.nn.functional.conv2d(torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3))


@pytest.mark.parametrize(
    ("setting", "program"),
    [
        (a_default_dtype, lambda: torch.arange(4) / 3),
        (a_default_dtype, lambda: torch.div(torch.arange(4), 3, out=torch.empty(4))),
        (deterministic, lambda: torch.empty(3)),
        (lambda: torch.backends.mkldnn.flags(enabled=False), convolved),
    ],
)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_torchs_settings_where_it_was_asked_for_count(setting, program):
    """Those where the promise was fulfilled counted: other numbers, and an InvariantError."""

    def asked():
        with setting():
            return [program()]

    plain, ours = asked_on_both(asked)
    before = kernel_settings.settings_now()
    assert differences(plain, [ours[0].fulfil()]) == []
    with setting():
        assert kernel_settings.settings_now() != before
    assert kernel_settings.settings_now() == before


@pytest.mark.parametrize("is_other", [True, False])
def test_what_the_program_sets_while_a_promise_is_fulfilled_stays(is_other):
    """Another thread's default dtype was taken back for good when the promise had its bytes."""
    with deterministic() if is_other else contextlib.nullcontext():
        asked = (*kernel_settings.settings_now(),)
    with a_default_dtype():
        dtype = torch.get_default_dtype()
    try:
        with kernel_settings.as_asked(asked):
            assert torch.are_deterministic_algorithms_enabled() == is_other
            torch.set_default_dtype(dtype)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.are_deterministic_algorithms_enabled()


def test_nothing_is_left_of_promises_that_read_a_tensor_and_have_died():
    """A weak reference for each, as long as the tensor lived."""
    x = torch.ones(3)
    with torchTensorRef.promising():
        kept = [x + 1 for _ in range(40)]
        cell = promises.cell_of(x._ttr_block)
        for _ in range(500):
            x + 1
        assert 40 <= len(cell.users) < 120
        x.zero_()
    assert all(one.fulfil().tolist() == [2, 2, 2] for one in kept)
    assert x.fulfil().tolist() == [0, 0, 0]


def test_lists_that_are_written_count_their_versions_at_once():
    x = torch.ones(3)
    with torchTensorRef.promising():
        torch._foreach_add_([x], 1)
    assert x._version == 1
    assert x.fulfil().tolist() == [2, 2, 2]
    assert x._version == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda v: torch.full((2,), v),
        lambda v: torch.linspace(v, 5, 3),
        lambda v: torch.arange(0, v),
        lambda v: torch.zeros([v.long(), 2]),
        lambda v: torch.normal(v.expand(2), 1.0),
        lambda v: torch.normal(v.expand(2), v.expand(2)) + torch.rand(2),
        lambda v: torch.ones_like(v) + torch.full_like(v, 2),
    ],
)
def test_factories_are_given_plain_tensors_as_they_are(make):
    """What was written into them until the promise was fulfilled counted, or was an error."""

    def program():
        value = torch.Tensor([3.0])[0]
        made = make(value)
        value.add_(1)
        return [made]

    plain, ours = asked_on_both(program)
    assert differences(plain, [ours[0].fulfil()]) == []


def test_what_is_made_like_a_tensor_without_bytes_is_one():
    meta = torch.empty(2, device="meta")
    with torchTensorRef.promising():
        assert torch.zeros_like(meta).device.type == torch.rand_like(meta).device.type == "meta"


def test_promises_are_computed_inside_a_transform():
    """What was computed there became the transform's own tensors, which have no block."""

    def program():
        numbers, drawn = torch.arange(3.0) * 2, torch.rand(2)

        def fulfilling(t):
            return (t * getattr(numbers, "fulfil", lambda: numbers)()).sum()

        yield torch.func.grad(fulfilling)(torch.ones(3))
        yield numbers
        yield torch.vmap(lambda t: t + torch.randn(2), randomness="different")(torch.zeros(3, 2))
        yield drawn

    plain, ours = asked_on_both(lambda: list(program()))
    for one in ours:
        one.fulfil()
    assert differences(plain, ours) == []


@torch.library.custom_op("promised::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("values", [None, "compute"])
def test_a_shape_function_of_the_program_calls_factories(values):
    x = torch.ones(3)
    with torchTensorRef.promising(values=values):
        y = sine(x)
    assert y.fulfil().tolist() == x.sin().tolist()
    assert [op.name for op in torchTensorRef.forecast(sine, x).record.ops] == [
        "promised.sine.default"
    ]


def test_a_factory_makes_what_was_asked_for():
    size, before = [2, 3], torch.get_default_dtype()
    with torchTensorRef.promising():
        made = torch.zeros(size), torch.full((2,), 1.5), torch.randn(size=size)
    size.append(4)
    torch.set_default_dtype(torch.float64)
    try:
        for one in made:
            one.fulfil()
    finally:
        torch.set_default_dtype(before)
    assert [(one.shape, one.dtype) for one in made] == [
        ((2, 3), torch.float32),
        ((2,), torch.float32),
        ((2, 3), torch.float32),
    ]
    assert [one.numel() for one in made] == [len(one.flatten().tolist()) for one in made]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_is_ready_is_only_promised_too(manager, mode):
    """Composite operators whose operands are on the accelerator ran where nothing was noted."""
    layer, norm, x = nn.Linear(8, 8), nn.LayerNorm(8), torch.rand(4, 8)

    def program() -> list[torch.Tensor]:
        seen = [layer(x), norm(x), x @ layer.weight, x + 1, x.softmax(-1), torch.cat([x, x])]
        seen.append(nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]))
        return [one.detach() for one in seen]

    with mode():
        for _ in range(2):
            expected = program()
        with torchTensorRef.promising():
            ours = program()
    assert [one.proxyInfo.promised for one in ours] == [True] * len(ours)
    for one in ours:
        one.fulfil()
    assert_same(expected, ours)


def test_classes_are_looked_at_also_once_there_were_promises():
    with torchTensorRef.promising():
        kept = torch.ones(2)
    assert nn.functional.one_hot(torch.tensor([1, 0])).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        nn.functional.one_hot(torch.tensor([1, 3]), 2)
    assert kept.proxyInfo.promised


# -- what kernels do that shape functions do not tell ---------------------------------------------


def lstm_trained() -> list[Any]:
    """An LSTM's gradients, clipped as they are, and what a step makes of its weights."""
    model, x = nn.LSTM(4, 4, batch_first=True), torch.rand(3, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x)[0].pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.005)
    optimizer.step()
    return [*model.parameters(), *(weight.grad for weight in model.parameters())]


def test_an_lstm_trains_on_promises_as_on_tensors():
    """Its kernel looks at whether gradients are wanted, and gives one of them to two biases.

    Autograd copies that, else it is clipped twice. And it keeps scratch memory of a size that no
    shape function knows.
    """
    plain, ours = on_both(lstm_trained)
    assert differences(plain, ours) == []


def test_an_lstm_that_was_run_on_promises_goes_back_outside_of_them():
    """All of the scratch memory is handed on, whatever size it was promised."""

    def program() -> Any:
        torch.manual_seed(3)
        model = nn.LSTM(4, 4)
        return model, model(torch.rand(2, 3, 4))[0]

    with torchTensorRef.disabled():
        plain, out = program()
        out.sum().backward()
    with torchTensorRef.promising():
        ours, out = program()
    out.sum().backward()
    gradients = [x.grad.fulfil() for x in ours.parameters()]
    assert differences([x.grad for x in plain.parameters()], gradients) == []


WRITES: dict[str, Callable[[Any], Any]] = {
    "to elements that share memory": lambda x: x[:1].expand(3, 4).mul_(2),
    "to more dimensions than there are": lambda x: x.sum().index_put_(
        (torch.tensor([0]),), x.sum()
    ),
    "of values of another shape": lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(3, 4)),
    "of values of another shape, elsewhere": lambda x: x.index_put(
        (torch.tensor([0, 1]),), torch.ones(3, 4)
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_a_kernel_refuses_is_refused_when_it_is_asked_for(write):
    """Else what was to be written could not be read any more."""
    with torchTensorRef.disabled(), pytest.raises((RuntimeError, IndexError)) as expected:
        write(torch.ones(3, 4))
    x = torch.ones(3, 4)
    with (
        torchTensorRef.promising(values="compute"),
        pytest.raises(expected.type),
    ):
        write(x)
    assert torch.equal(x, torch.ones(3, 4))


def test_writes_at_indices_are_promised():
    def program() -> list[Any]:
        x, rows = torch.rand(4, 3), torch.tensor([2, 0])
        x[rows] = torch.rand(3)
        x[:, rows] = 0.5
        x[rows[:, None], torch.tensor([1])] += 1
        x.index_put_((rows,), torch.rand(()), accumulate=True)
        return [x, x.index_put((rows,), torch.rand(2, 1))]

    plain, ours = on_both(program)
    assert differences(plain, ours) == []


def test_single_numbers_go_back_twice():
    """Torch takes such an operator apart, and leaves single numbers on the host as they are."""
    x = torch.tensor(0.7)
    function = torch.func.hessian(lambda x: (x.sin() * x).sum())
    expected = function(x)
    with torchTensorRef.promising():
        found = function(x)
    assert found.proxyInfo.promised
    assert torch.equal(found.fulfil(), expected)


def test_a_promise_is_set_to_a_storage():
    x = torch.rand(4)
    with torchTensorRef.promising(values="compute"):
        y = torch.empty(0).set_(x.untyped_storage(), 1, (2,))
        y.add_(1)
    assert torch.equal(x.fulfil()[1:3], y.fulfil())
    with torchTensorRef.promising(), pytest.raises(PromisedError, match="set_"):
        torch.empty(0).set_(x.untyped_storage(), 1, (2,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.zeros(3, dtype=torch.complex32),
        lambda: torch.zeros(3).to(torch.float8_e4m3fn),
        lambda: torch.zeros(3).to(torch.float8_e5m2),
        lambda: torch.zeros(3, dtype=torch.uint16),
        lambda: torch.zeros(3, dtype=torch.bool),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_random_values_are_made_up_of_all_dtypes(manager, make):
    with torchTensorRef.promising(values="random"):
        first = make()[0].item()
    with torchTensorRef.promising(values=0):
        assert make()[0].item() == first


def test_random_values_are_made_up_of_elements_that_share_memory(manager):
    with torchTensorRef.promising(values="random"):
        assert torch.zeros(1).expand(3).nonzero().tolist() == [[0], [1], [2]]
        assert torch.zeros(()).expand(2, 2).nonzero().shape == (4, 2)
        assert torch.zeros(3, 0).t().nonzero().shape == (0, 2)
