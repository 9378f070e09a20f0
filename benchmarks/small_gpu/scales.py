"""Sizes: of the models, of the work on them, and of the caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: What the device may hold, in percent of the bytes of the model's weights; the most telling first.
CAPS = (50, 25, 75, 110)

WIDE_BATCH = 16
LORA_RANK = 8
#: Numbers per patch of the denoiser: 2 x 2 pixels of 16 channels.
PATCH_WIDTH = 64

#: The families of models. "lora" is the Llama with adapters in its attention.
FAMILIES = ("llama", "denoiser", "lora")

#: Workload -> the family it runs on. In the order of the room they need beside the weights, so
#: that the headroom a contestant needs only grows while a seat is measured.
WORKLOADS: Mapping[str, str] = {
    "decode1": "llama",
    "decode16": "llama",
    "prefill": "llama",
    "diffusion": "denoiser",
    "training": "lora",
}


@dataclass(frozen=True)
class Scale:
    """One size of everything.

    Attributes
    ----------
    llama, denoiser : mapping
        What the models' configurations are made with.
    prefill_tokens, prompt_tokens, decode_steps, training_tokens : int
        Lengths of the sequences.
    images, patches, denoise_steps : int
        Of the diffusion loop: two images are one with guidance.
    shard_nbytes : int
        The largest file of weights.
    """

    name: str
    llama: Mapping[str, int]
    denoiser: Mapping[str, int]
    prefill_tokens: int
    prompt_tokens: int
    decode_steps: int
    training_tokens: int
    patches: int
    denoise_steps: int
    shard_nbytes: int
    images: int = 2


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }


def _denoiser(hidden: int, layers: int, heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        # 7.24e9 parameters, 14.5 GB: PEERS d.1. The denoiser: 4.1e9, 8.2 GB.
        Scale(
            "full",
            _llama(4096, 14336, 32, 32, 32000),
            _denoiser(3072, 24, 24),
            prefill_tokens=512,
            prompt_tokens=32,
            decode_steps=6,
            training_tokens=128,
            patches=4096,
            denoise_steps=4,
            shard_nbytes=2 * 10**9,
        ),
        # 1.1 GB and 0.9 GB: two minutes on a large card.
        Scale(
            "medium",
            _llama(1536, 5376, 16, 12, 32000),
            _denoiser(1024, 24, 16),
            prefill_tokens=512,
            prompt_tokens=32,
            decode_steps=8,
            training_tokens=128,
            patches=1024,
            denoise_steps=4,
            shard_nbytes=300 * 10**6,
        ),
        # 13 MB and 11 MB: for the simulated device, on one core. Layers are many, as in the full
        # one, so that one matrix is a small part of the weights.
        Scale(
            "small",
            _llama(192, 672, 12, 8, 512),
            _denoiser(160, 12, 8),
            prefill_tokens=32,
            prompt_tokens=4,
            decode_steps=4,
            training_tokens=8,
            patches=32,
            denoise_steps=3,
            shard_nbytes=5 * 10**6,
        ),
        # 1 MB: for the tests.
        Scale(
            "tiny",
            _llama(64, 224, 8, 4, 256),
            _denoiser(64, 6, 4),
            prefill_tokens=16,
            prompt_tokens=4,
            decode_steps=3,
            training_tokens=8,
            patches=16,
            denoise_steps=2,
            shard_nbytes=400 * 10**3,
        ),
    )
}

#: Bytes of the full scale's weights, which the simulated device's speeds are related to.
FULL_NBYTES: Mapping[str, float] = {"llama": 14.48e9, "lora": 14.48e9, "denoiser": 8.2e9}
