"""A sample of the models of `make compatibility`: one or two of each family, some of their runs."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from ..support.injection import injected, one_thread
from ..support.sweeps import usual

pytest.importorskip("transformers")

# After the check above: the zoo is made of its classes.
from .models import compare
from .zoo import CASES, Case

BY_NAME = {case.name: case for case in CASES}
SAMPLE = usual(
    [
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "Mamba2ForCausalLM",
        "BertForMaskedLM",
        "T5ForConditionalGeneration",
        "ViTForImageClassification",
        "Wav2Vec2ForCTC",
        "LlavaForConditionalGeneration",
        "UNet2DConditionModel",
        "LSTM",
        "LoRA on LlamaForCausalLM",
    ],
    [
        "Gemma3ForCausalLM",
        "ResNetForImageClassification",
        "FluxPipeline",
        "DenseNet",
        "nn.Transformer",
    ],
)
RUNS = ("forward", "backward", "three steps", "generate dynamic", "generate static", "pictures")


def shortened(case: Case) -> Case:
    """The runs that are most unlike one another."""
    runs = {name: run for name, run in case.runs.items() if name in RUNS}
    return dataclasses.replace(case, runs=runs)


@pytest.mark.parametrize("name", SAMPLE)
# What other libraries advise against on their own account.
@pytest.mark.filterwarnings("ignore")
def test_a_model_gives_the_bits_of_plain_torch(manage, name):
    if BY_NAME[name].missing:
        pytest.skip(BY_NAME[name].missing)
    strategy = ("flow", "lru")[SAMPLE.index(name) % 2]
    logging.disable(logging.WARNING)
    try:
        with injected(), one_thread():
            outcome = compare(shortened(BY_NAME[name]), strategies=(strategy,))
    finally:
        logging.disable(logging.NOTSET)
    assert (outcome.failures, outcome.refused) == ({}, {})
    assert outcome.accelerated_count > 0


def test_no_model_is_there_twice():
    assert len(BY_NAME) == len(CASES)


def test_there_are_models_of_every_kind():
    kinds = {
        "text decoder",
        "text encoder",
        "encoder-decoder",
        "vision",
        "audio",
        "multimodal",
        "state space",
        "mixture of experts",
    }
    families = [case.family for case in CASES]
    assert kinds <= set(families)
    assert sum(family in kinds for family in families) >= 60
    assert families.count("diffusion") >= 8
