"""The five programs. Each is a plain torch program that does not know whose tensors it uses.

A program does one *run*: some steps, each of which reads all weights once (training: twice).
It says when a step ends (`laps.step`), and what came before the first one that is no step
(`laps.skip`). It returns small tensors that must be equal for all contestants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .scales import LORA_RANK, PATCH_WIDTH, WIDE_BATCH, Scale

#: What brings a tensor to where a contestant wants its inputs.
Put = Callable[[torch.Tensor], torch.Tensor]
Result = dict[str, Any]


class Laps(Protocol):
    """A stop-watch."""

    def skip(self) -> None:
        """Forget the time since the last mark."""

    def step(self, count: int = 1) -> None:
        """Note the time since the last mark, as that of `count` steps; waits for the device."""


class NoGradients(RuntimeError):
    """A backward pass ended without an error and without gradients."""


@dataclass(frozen=True)
class Workload:
    """One program and what the bound has to know of it."""

    name: str
    prepare: Callable[[Any, Scale, Put], Callable[[Laps], Result]]
    #: How often a step sweeps over the weights.
    passes: int = 1
    #: Runs before anything is measured: order learned, kernels chosen.
    warm_up_runs: int = 1
    #: The parts of the result that are tokens.
    tokens: str | None = None
    #: Each run goes on where the last one ended, so only the first one's result is compared.
    is_stateful: bool = False


def _prompt(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def _decode(batch: int) -> Callable[[Any, Scale, Put], Callable[[Laps], Result]]:
    def prepare(model: Any, scale: Scale, put: Put) -> Callable[[Laps], Result]:
        prompt = put(_prompt(batch, scale.prompt_tokens, scale.llama["vocab_size"]))

        @torch.no_grad()
        def run(laps: Laps) -> Result:
            out = model(prompt, use_cache=True, logits_to_keep=1)
            written = [out.logits[:, -1].argmax(-1, keepdim=True)]
            laps.skip()
            for _ in range(scale.decode_steps):
                out = model(
                    written[-1],
                    past_key_values=out.past_key_values,
                    use_cache=True,
                    logits_to_keep=1,
                )
                written.append(out.logits[:, -1].argmax(-1, keepdim=True))
                written[-1].tolist()  # as a program does that prints its words one by one
                laps.step()
            return {"tokens": torch.cat(written, 1), "logits": out.logits}

        return run

    return prepare


def _prefill(model: Any, scale: Scale, put: Put) -> Callable[[Laps], Result]:
    prompt = put(_prompt(1, scale.prefill_tokens, scale.llama["vocab_size"]))

    @torch.no_grad()
    def run(laps: Laps) -> Result:
        laps.skip()
        logits = model(prompt, use_cache=False, logits_to_keep=1).logits
        laps.step()
        return {"tokens": logits[:, -1].argmax(-1), "logits": logits}

    return run


def _diffusion(model: Any, scale: Scale, put: Put) -> Callable[[Laps], Result]:
    generator = torch.Generator().manual_seed(9)
    shape = (scale.images, scale.patches, PATCH_WIDTH)
    noise = put(torch.randn(shape, generator=generator).to(torch.bfloat16))
    steps = scale.denoise_steps
    times = [put(torch.full((scale.images,), 1 - step / steps)) for step in range(steps)]

    @torch.no_grad()
    def run(laps: Laps) -> Result:
        laps.skip()
        x = noise
        for time in times:
            x = x - model(x, time) / steps
        laps.step(steps)  # nobody looks at an image that is not finished
        return {"image": x}

    return run


def add_adapters(model: nn.Module) -> nn.Module:
    """Freeze a Llama and give its attention LoRA adapters with seeded weights."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=LORA_RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )
    model = get_peft_model(model, config)
    with torch.no_grad():
        for seed, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def _training(model: Any, scale: Scale, put: Put) -> Callable[[Laps], Result]:
    tokens = put(_prompt(1, scale.training_tokens, scale.llama["vocab_size"]))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, foreach=False)

    def run(laps: Laps) -> Result:
        model.train()
        losses = []
        laps.skip()
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            _check_gradients(adapters)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            laps.step()
        return {
            "losses": torch.stack(losses),
            "adapters": torch.stack([p.detach().float().sum() for p in adapters]),
        }

    return run


def _check_gradients(adapters: list[torch.Tensor]) -> None:
    """Refuse a step that would change nothing.

    Raises
    ------
    NoGradients
        An adapter has none.
    """
    missing = sum(p.grad is None for p in adapters)
    if missing:
        raise NoGradients(
            f"backward ended without an error, and {missing} of {len(adapters)} adapter weights "
            "got no gradient"
        )


ALL = {
    workload.name: workload
    for workload in (
        Workload("decode1", _decode(1), tokens="tokens"),
        Workload("decode16", _decode(WIDE_BATCH), tokens="tokens"),
        Workload("prefill", _prefill, warm_up_runs=5, tokens="tokens"),
        Workload("diffusion", _diffusion, warm_up_runs=2),
        Workload("training", _training, passes=2, is_stateful=True),
    )
}
