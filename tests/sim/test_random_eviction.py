"""A strategy that evicts at random at each operator must not change a bit of any model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ..support.programs import COUNTS_OF_STEPS, Bring, RandomEviction, assert_right, trained
from ..support.sweeps import WHOLE, turn_of

#: The seed and the budget, by its name.
MANAGERS = {"ample": (1, 1 << 20), "some": (2, 40_000), "tight": (3, 8_000)}


def pytest_generate_tests(metafunc):
    """Give each test two of the managers, by turns; all of them where all is run."""
    if "manager" in metafunc.fixturenames:
        left_out = () if WHOLE else turn_of(metafunc.function.__name__, MANAGERS)
        given = [name for name in MANAGERS if name not in left_out]
        metafunc.parametrize("manager", given, indirect=True)


@pytest.fixture
def manager(manage, request):
    seed, nbytes = MANAGERS[request.param]
    return manage(RandomEviction(seed), nbytes=nbytes)


@pytest.mark.parametrize("foreach", [True, False])
def test_training_with_adamw(manager, foreach):
    program = trained(
        lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=foreach),
        lambda: (torch.rand(8, 20), torch.rand(8, 5)),
        steps=4,
    )
    assert_right(program, manager, plain_because=COUNTS_OF_STEPS)


def test_llama_generates_the_same_tokens(manager):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=120,
        max_position_embeddings=64,
        pad_token_id=0,
    )

    def program(bring: Bring) -> Any:
        model = bring(transformers.LlamaForCausalLM(config).eval())
        tokens = bring(torch.randint(1, 120, (2, 7)))
        with torch.no_grad():
            logits = model(tokens).logits
        texts = model.generate(tokens, max_new_tokens=6, do_sample=False)
        sampled = model.generate(tokens, max_new_tokens=4, do_sample=True)
        return [logits, texts, sampled]

    assert_right(program, manager)


def backward_of(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """Outputs, gradients and buffers after one step forward and back, dropout and all."""
    result = model(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    result.square().mean().backward()
    return [result, [p.grad for p in model.parameters()], list(model.buffers())]


def test_convolutions(manager):
    def program(bring: Bring) -> Any:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.GroupNorm(2, 8),
            nn.Dropout2d(0.3),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        )
        return backward_of(bring(model), bring(torch.rand(4, 3, 20, 20)))

    assert_right(program, manager)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets(manager, kind):
    def program(bring: Bring) -> Any:
        model = bring(kind(12, 16, num_layers=2, bidirectional=True, dropout=0.2))
        return backward_of(model, bring(torch.rand(6, 3, 12)))

    assert_right(program, manager)


def test_transformer_encoder(manager):
    def program(bring: Bring) -> Any:
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        model = bring(nn.TransformerEncoder(layer, 2))
        x = bring(torch.rand(2, 5, 16))
        trained_once = backward_of(model, x)
        with torch.no_grad():
            return [*trained_once, model.eval()(x)]

    assert_right(program, manager)
