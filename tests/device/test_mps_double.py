"""A device as mps, without streams and with storages that cannot be emptied: the same bits.

Samples of what runs on the simulated device: operators, models, random evictions.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.strategy.choice import make_strategy

from ..conformance.known_differences import KNOWN
from ..support.device_double import MpsDevice
from ..support.injection import injected, one_thread
from ..support.operator_cases import DTYPES, operators, run_operator, turn_of
from ..support.programs import COUNTS_OF_STEPS, Bring, RandomEviction, assert_right, trained
from ..support.shaking import Shaken
from ..support.sweeps import WHOLE, usual
from .conftest import managed_by

#: One operator in so many.
ONE_IN = 12 if WHOLE else 24
TIGHT_NBYTES = 60_000


@pytest.fixture
def device() -> MpsDevice:
    return MpsDevice()


@pytest.fixture
def manage(device: MpsDevice) -> Any:
    with managed_by(device) as make:
        yield make


def test_it_is_what_the_adapter_finds_on_mps(device: MpsDevice) -> None:
    assert device.exchanges_storages
    assert not device.vendor.has_streams
    assert device.capacity_nbytes == 1 << 30


SAMPLE = [n for n in operators() if turn_of(n) % ONE_IN == 1 and n not in KNOWN]


@pytest.mark.parametrize("part", range(4))
def test_operators_give_the_bits_of_plain_torch(manage: Any, device: MpsDevice, part: int) -> None:
    strategies = [Shaken(make_strategy(name)) for name in ("genoa", "flow")]
    manager = manage(strategies[0])
    wrong, passed = {}, 0
    with one_thread():
        for name in SAMPLE[part::4]:
            dtype = DTYPES[turn_of(name) % len(DTYPES)]
            manager.strategy = strategies[turn_of(name) % 2]
            outcome = run_operator(operators()[name], dtype, samples=1)
            passed += outcome.passed.total()
            if outcome.failures:
                wrong[name] = outcome.failures
    assert wrong == {}
    assert passed > len(SAMPLE) // 8
    assert device.given_up_count, "something was evicted"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["training", "recurrent", "convolutions"])
# A cell of the net may need more than there is, and runs on the host.
@pytest.mark.filterwarnings("ignore:torchTensorRef")
def test_random_evictions_change_no_bit(
    manage: Any, device: MpsDevice, kind: str, seed: int
) -> None:
    manager = manage(RandomEviction(seed), TIGHT_NBYTES)
    assert_right(PROGRAMS[kind], manager, plain_because=COUNTS_OF_STEPS)
    assert device.given_up_count


def recurrent(bring: Bring) -> Any:
    torch.manual_seed(3)
    model = bring(nn.LSTM(12, 16, num_layers=2, bidirectional=True, dropout=0.2))
    result = model(bring(torch.rand(6, 3, 12)))[0]
    result.square().mean().backward()
    return [result, [p.grad for p in model.parameters()]]


def convolutions(bring: Bring) -> Any:
    torch.manual_seed(4)
    model = bring(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.3),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        )
    )
    result = model(bring(torch.rand(4, 3, 20, 20)))
    result.square().mean().backward()
    return [result, [p.grad for p in model.parameters()], list(model.buffers())]


PROGRAMS = {
    "training": trained(
        lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
        lambda: (torch.rand(8, 20), torch.rand(8, 5)),
        steps=4,
    ),
    "recurrent": recurrent,
    "convolutions": convolutions,
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    usual(
        [("LlamaForCausalLM", "flow"), ("T5ForConditionalGeneration", "lru")],
        [("BertForMaskedLM", "lru"), ("LoRA on LlamaForCausalLM", "flow")],
    ),
)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
# What other libraries advise against on their own account.
@pytest.mark.filterwarnings("ignore")
def test_models_give_the_bits_of_plain_torch(manage: Any, name: str, strategy: str) -> None:
    from ..conformance.models import compare
    from ..conformance.test_models import BY_NAME, shortened

    case = BY_NAME[name]
    if case.missing:
        pytest.skip(case.missing)
    made: list[MpsDevice] = []

    def accelerator(budget_nbytes: int) -> MpsDevice:
        made.append(MpsDevice(budget_nbytes))
        return made[-1]

    logging.disable(logging.WARNING)
    try:
        with injected(), one_thread():
            outcome = compare(shortened(case), strategies=(strategy,), accelerator=accelerator)
    finally:
        logging.disable(logging.NOTSET)
    assert (outcome.failures, outcome.refused) == ({}, {})
    assert outcome.accelerated_count > 0
    assert made[0].given_up_count
