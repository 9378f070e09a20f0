"""What models and the soak found, each as the few lines that show it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.memory.block import Block
from torchTensorRef.memory.budget import Budget
from torchTensorRef.memory.ledger import Ledger
from torchTensorRef.tensor.tensor_ref import TensorRef

from ..support.injection import assert_same_injected, injected


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_packed_sequences_through_recurrent_layers(manager, kind):
    def program() -> Any:
        layer = kind(4, 5, batch_first=True, bidirectional=True)
        x, lengths = torch.randn(2, 7, 4, requires_grad=True), torch.tensor([7, 5])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        result, counts = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        result.sum().backward()
        return [result.detach(), counts, x.grad, *(p.grad for p in layer.parameters())]

    assert_same_injected(program, manager, plain_because="C++ makes what is padded")


def test_operators_that_read_lengths_by_their_address(manager):
    def program() -> Any:
        scores = torch.randn(10, 2, 5, requires_grad=True)
        targets = torch.randint(1, 5, (2, 3))
        lengths, target_lengths = torch.tensor([10, 9]), torch.tensor([3, 2])
        loss = nn.functional.ctc_loss(scores.log_softmax(-1), targets, lengths, target_lengths)
        loss.backward()
        with torch.no_grad():
            pooled = nn.functional.max_pool1d(scores, 2)
        parts = torch.tensor_split(scores.detach(), torch.tensor([3, 4]))
        return [loss.detach(), scores.grad, pooled, *parts]

    assert_same_injected(program, manager, on_host_because="the lengths are read there")


@pytest.mark.parametrize("wants_gradients", [True, False])
def test_lengths_in_lists_that_c_puts_into_memory(manager, wants_gradients):
    """The mean of `ctc_loss` makes a tensor of them, and writes it by its address."""

    def program() -> Any:
        scores = torch.randn(10, 2, 5, requires_grad=wants_gradients)
        targets = torch.randint(1, 5, (2, 3))
        loss = nn.CTCLoss(zero_infinity=True)(scores.log_softmax(-1), targets, [10, 9], [3, 2])
        if wants_gradients:
            loss.backward()
        return [loss.detach(), scores.grad if wants_gradients else loss]

    assert_same_injected(program, manager, on_host_because="a small loss")


def test_kernels_in_python_that_call_factories(manager):
    """What bitsandbytes registers for the host: its results are TensorRefs before we wrap them."""
    library = torch.library.Library("ttr_factories", "FRAGMENT")
    library.define("pair(Tensor x) -> (Tensor, Tensor)")
    library.define("one(Tensor x) -> Tensor")

    def pair(x: Any) -> Any:
        packed = torch.empty(x.shape, dtype=torch.uint8)
        assert packed.data_ptr()  # as C would fill it
        packed.copy_(x > 0.5)
        return packed, torch.full((2,), 3.0)

    library.impl("pair", pair, "CPU")
    library.impl("one", lambda x: torch.zeros(x.shape).add_(x.sum()), "CPU")

    def program() -> Any:
        x = torch.rand(8, 8)
        one = torch.ops.ttr_factories.one(x + 1)
        return [*torch.ops.ttr_factories.pair(x), one, one * 2, torch.ops.ttr_factories.one(x)]

    assert_same_injected(program, manager, on_host_because="its kernels are the host's")
    with injected():
        made = (
            torch.ops.ttr_factories.one(torch.rand(2)),
            *torch.ops.ttr_factories.pair(torch.rand(2)),
        )
        assert not any(isinstance(one._ttr_plain, TensorRef) for one in made)
    library._destroy()


def test_new_tensors_are_made_of_numbers_lists_and_tensors(manager):
    def program() -> Any:
        x = torch.rand(3, dtype=torch.float64)
        return [
            x.new_tensor([1, 2]),
            x.new_tensor([x[0], x[1]]),
            x.new_tensor(2.5, dtype=torch.float32),
            x.new_tensor([1.0], requires_grad=True).detach(),
            x.new([4.0, 5.0]),
            x.new(2, 3).size(),
        ]

    assert_same_injected(program, manager, on_host_because="it computes nothing")
    with injected():
        assert isinstance(torch.rand(2).new_tensor([1]), TensorRef)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_without_bytes_of_their_own_stay_plain(manager):
    def program() -> Any:
        x = torch.rand(3, 4)
        y = x + 1  # fresh, and ready for the ready path
        quantized = torch.quantize_per_tensor(y, 0.1, 0, torch.quint8)
        return [y.to_sparse().to_dense(), y.to_sparse_csr().to_dense(), quantized.dequantize()]

    assert_same_injected(
        program, manager, plain_because="so does what is made of sparse and quantized tensors"
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["genoa", "lru"])
def test_what_a_quantizer_keeps_outlives_the_eviction_of_what_it_was_made_of(manage, strategy):
    """Scales of the right dtype are kept as they are: torch read a replica that was emptied."""

    def quantized(scales: torch.Tensor, points: torch.Tensor) -> Any:
        values, numbers = torch.ones(16, 3), torch.ones(16, 3, dtype=torch.int8)
        yield torch.quantize_per_channel(values, scales, points, 0, torch.qint8)
        yield torch._make_per_channel_quantized_tensor(numbers, scales, points, 0)
        yield torch._empty_per_channel_affine_quantized(
            [16, 3], scales=scales, zero_points=points, axis=0, dtype=torch.qint8
        )

    def program() -> Any:
        given, kept = [], []
        for _ in range(3):  # the first time all of them take the slow path
            given.append((torch.rand(16, dtype=torch.float64) * 1, torch.arange(16) + 1))
            kept += quantized(*given[-1])
            for _ in range(4):
                torch.ones(64, 48).mul(2).sum()
        return [q.q_per_channel_scales().sum() for q in kept]

    assert_same_injected(
        program,
        manage(strategy, 1 << 14),
        plain_because="so is what is made of a quantizer's parts",
    )


def test_a_parameter_is_made_anew_on_the_meta_device_from_what_it_notes(manager):
    with injected():
        parameter = nn.Linear(3, 4).weight
    # As accelerate does for weights that are loaded later.
    empty = type(parameter)(parameter.to("meta"), requires_grad=True, **parameter.__dict__)
    assert isinstance(empty, nn.Parameter)
    assert (empty.device.type, empty.shape, empty.requires_grad) == ("meta", (4, 3), True)
    again = type(parameter)(parameter, requires_grad=False, **parameter.__dict__)
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again, parameter)
    assert not again.requires_grad


def test_two_threads_that_ask_for_the_replicas_of_a_fresh_result_find_the_same(manager):
    device = manager.residency.books.main
    arrived = threading.Event()

    class Slow(Ledger):
        def settle(self, block: Block) -> None:
            arrived.set()
            super().settle(block)

    for _ in range(20):
        ledger = Slow(device, Budget(1 << 20))
        base = torch.empty(64, dtype=torch.uint8)
        block = ledger.bear_if_room(base, 64, 0)
        found = []
        with ledger._lock:
            other = threading.Thread(target=lambda b=block, f=found: f.append(b.replicas))
            arrived.clear()
            other.start()
            arrived.wait(5)
            found.append(block.replicas)
        other.join()
        assert found[0] is found[1] is block.replicas
        assert device in block.replicas


def test_settings_change_while_operators_run(manage):
    manager = manage("flow", nbytes=64_000)
    xs = [manager.adopt(torch.rand(16, 16)) for _ in range(8)]
    stop, failures = threading.Event(), []

    def compute(number: int) -> None:
        try:
            while not stop.is_set():
                (xs[number] @ xs[number + 1]).tanh()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compute, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for i in range(60):
            manager.strategy = ("lru", "flow", "genoa")[i % 3]
            manager.budget = (3_000, 64_000, 9_000)[i % 3]
            manager.check()
    finally:
        stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "two locks are taken in two orders"
    assert failures == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["none", "inference"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_products_see_which_weight_wants_gradients_where_none_are_noted(manager, mode, is_trained):
    """Torch lays rows out anew for a weight that wants gradients; an adapter in diffusers' VAE."""

    def program() -> Any:
        x = torch.randn(2, 32, 64).transpose(1, 2)
        weights = [nn.Parameter(torch.randn(n, 32), requires_grad=is_trained) for n in (3, 6)]
        layer = nn.LSTM(32, 6, batch_first=True).requires_grad_(is_trained)
        convolution = nn.Conv1d(32, 6, 3).requires_grad_(is_trained)
        norm = nn.BatchNorm1d(32).requires_grad_(is_trained)
        shuffled = nn.Parameter(torch.randn(2, 4, 3, 3), requires_grad=is_trained)
        with mode():
            results = [nn.functional.linear(x, weight) for weight in weights]
            results += [x @ weight.t() for weight in weights]
            results += [x @ weights[0][0], layer(x)[0], convolution(x.transpose(1, 2))]
            results += [torch.einsum("bij,kj->bik", x, weights[1]), norm(x.transpose(1, 2))]
            results += [torch.channel_shuffle(shuffled, 2), weights[0].reshape(-1).to(torch.half)]
            results += [norm.running_mean]
        return results

    assert_same_injected(program, manager)
