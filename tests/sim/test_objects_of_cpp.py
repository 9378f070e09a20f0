"""Objects of C++ that keep tensors, such as torch's packed weights, see what becomes of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef.memory.exposure import Exposure
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.operators.row import Special

from ..support.injection import assert_same_injected, injected, seed

quantized = torch.ops.quantized
#: Two of the weights here, and little more.
BUDGET_NBYTES = 40_000
STRATEGIES = ["flow", "lru", "genoa"]

pytestmark = [
    pytest.mark.skipif(
        "fbgemm" not in torch.backends.quantized.supported_engines, reason="nothing packs here"
    ),
    # Torch's own: of where this will be, and of parameters that are asked for a number.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(params=STRATEGIES)
def same(request, manage) -> Callable[..., None]:
    manager = manage(request.param, BUDGET_NBYTES)
    return lambda program: assert_same_injected(program, manager)


def in_eight_bits(weight: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Callable[..., Any]]:
    packed = quantized.linear_prepack(torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), bias)
    return packed, lambda x: quantized.linear_dynamic(x, packed, True)


def in_halves(weight: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Callable[..., Any]]:
    packed = quantized.linear_prepack_fp16(weight, bias)
    return packed, lambda x: quantized.linear_dynamic_fp16(x, packed)


@pytest.mark.parametrize("pack", [in_eight_bits, in_halves])
def test_packed_weights_see_what_is_written_to_their_bias(same, pack):
    """It was evicted under them: other memory was read, and none where torch looks, at last."""

    def program() -> Any:
        weight, bias, x = torch.randn(64, 64), torch.randn(64), torch.randn(4, 64)
        bias = bias * 1  # made where operators run
        _, run = pack(weight, bias)
        found = [run(x)]
        for number in range(3):
            bias.add_(number)
            for _ in range(4):  # and out of the accelerator with all that is there
                weight = weight @ weight / 8
            found.append(run(x))
        return [*found, bias, weight]

    same(program)


def test_what_packed_weights_give_back_is_what_they_were_given(same):
    def program() -> Any:
        weight, bias, x = torch.randn(64, 64), torch.randn(64), torch.randn(4, 64)
        packed, run = in_halves(weight, bias)
        bias.mul_(2)
        own = quantized.linear_unpack_fp16(packed)[1]
        own.add_(1)
        return run(x), bias + 0, own.tolist()

    same(program)


def test_a_bias_is_free_when_its_object_is_gone(manage):
    manager = manage("lru", BUDGET_NBYTES)
    bias = manager.adopt(torch.randn(64)).toGPU()
    packed, _ = in_halves(torch.randn(64, 64), bias)
    exposure = bias._ttr_block.exposure
    assert isinstance(exposure, Exposure)
    assert exposure.alive
    del packed, _
    assert not exposure.alive
    assert not manager.ownership.where(bias.toGPU()._ttr_block).is_host


def test_weights_that_are_only_copied_are_held_no_longer_than_the_call(manage):
    manager = manage("lru", BUDGET_NBYTES)
    weight = manager.adopt(torch.randn(64, 64)).toGPU()
    packed, _ = in_halves(weight, torch.randn(64))
    exposure = weight._ttr_block.exposure
    assert exposure is None or not exposure.alive
    assert packed is not None


def of_linears() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 64)


def of_lstm() -> tuple[nn.Module, torch.Tensor]:
    return nn.LSTM(32, 32, num_layers=2), torch.randn(3, 2, 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.qint8], ids=str)
@pytest.mark.parametrize("make", [of_linears, of_lstm])
def test_modules_quantized_as_they_run_give_what_plain_ones_give(same, make, dtype):
    def program() -> Any:
        model, x = make()
        kinds = {nn.Linear, nn.LSTM}
        small = torch.ao.quantization.quantize_dynamic(model.eval(), kinds, dtype=dtype)
        saved = io.BytesIO()
        torch.save(small.state_dict(), saved)
        again = copy.deepcopy(small)
        again.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=False))
        with torch.no_grad():
            y = x @ torch.randn(x.shape[-1], x.shape[-1])
            return [small(x), small(y), again(x), again(y), model(x)]

    same(program)


def test_a_promise_that_an_object_is_made_of_is_kept(manage):
    manage("lru", BUDGET_NBYTES)
    seed()
    weight, bias, x = torch.randn(64, 64), torch.randn(64), torch.randn(4, 64)
    expected = in_halves(weight, bias + 1)[1](x)
    with injected():
        ours = torchTensorRef.tensorsManager.adopt(bias.clone())
        with torchTensorRef.promising(values="compute"):
            later = ours + 1
            _, run = in_halves(weight, later)
        later.add_(0)
        assert torch.equal(run(x), expected)


@pytest.mark.parametrize("name", ["linear_prepack", "linear_prepack_fp16", "conv2d_prepack"])
def test_what_makes_an_object_is_known_by_its_schema(name):
    plan = plan_of(getattr(quantized, name).default)
    assert plan.special is Special.KEEP
    assert not plan.ready_way


def test_what_only_reads_an_object_is_as_any_operator():
    assert plan_of(quantized.linear_dynamic.default).special is None
