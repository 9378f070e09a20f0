"""What a token of a mixture of experts moves whose experts lie in one tensor.

    python -m benchmarks.experts [--budgets 25,50] [--ways grouped_mm,eager] [--strategies flow]
                                 [--write-baseline]

transformers keeps the experts of a layer in one tensor each for their two products, and multiplies
them in one of three ways (`experts_implementation`). A Qwen3-MoE of 6 layers with 128 experts, 8 of
which work for a token, decodes drawn tokens on the simulated accelerator (a link of 12 GB/s, 5
TFLOP/s), with a budget that is a share of its weights.

Any expert is as likely as any other for the next token: a model that was trained repeats some, and
fetches less. A figure is what a token fetched, as a multiple of the bytes that it uses: all weights
but those of the experts that do not work. Beside it the same where no part of a block moves alone
(`options(blocks="off")`), and virtual time. Logits are compared with plain torch's.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from torchTensorRef import disabled, options, tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from .baseline import WIDTH, Figure, Keeper, Tolerance

#: Which experts work hangs on sums that differ in their last bits from processor to processor.
KEEPER = Keeper("experts", "python -m benchmarks.experts", Tolerance(share=0.05))
BUDGETS = (25, 50, 75)
WAYS = ("grouped_mm", "batched_mm", "eager")
STRATEGIES = ("lru", "flow")
LAYERS, EXPERTS, WORKING = 6, 128, 8
#: Tokens before those that are measured, and these.
BEFORE, TOKENS = 24, 24
VOCABULARY = 4096
#: Weights that were drawn send all tokens to few experts, unless what tells tokens apart is louder
#: than what layers add: then nearly all work equally often, which is the worst for a cache.
LOUDNESS = 50


class Found(NamedTuple):
    """What one token took."""

    fetched_nbytes: float
    time_ns: float
    is_equal: bool


def model_of(way: str, **sizes: Any) -> Any:
    """Make the model, always the same, or one of other sizes."""
    import transformers

    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": WORKING,
        "tie_word_embeddings": True,
    }
    config = transformers.Qwen3MoeConfig(**{**usual, **sizes})
    config._experts_implementation = way
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(LOUDNESS)
    return model


def decode(model: Any, bring: Any, begin: Any) -> torch.Tensor:
    """Decode drawn tokens; call `begin` before those that are measured; return the last logits."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for number in range(BEFORE + TOKENS):
            if number == BEFORE:
                begin()
            ids = bring(torch.randint(VOCABULARY, (1, 1), generator=generator))
            logits = model(ids, past_key_values=cache, use_cache=True).logits
    return logits


def used_nbytes(model: Any) -> int:
    """Bytes of the weights that a token uses: of experts those that work, else all."""
    nbytes = 0
    for name, parameter in model.named_parameters():
        share = WORKING / EXPERTS if ".experts." in name else 1
        nbytes += int(parameter.nbytes * share)
    return nbytes


def measured(way: str, strategy: str, budget: int, blocks: str) -> Found:
    """Decode with us and without; return what a token took."""
    with disabled():
        model = model_of(way)
        expected = decode(model, lambda ids: ids, lambda: None)
    weights_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    device = SimDevice(DeviceSpec(name="experts", capacity_nbytes=2 * weights_nbytes), 0)
    tensorsManager.device = device
    tensorsManager.strategy = strategy
    tensorsManager.budget = weights_nbytes * budget // 100
    began: list[int] = []

    def begin() -> None:
        tensorsManager.reset_stats()
        began.append(device.now_ns())

    with options(blocks=blocks):
        logits = decode(tensorsManager.adopt(model), tensorsManager.adopt, begin)
        time_ns = device.now_ns() - began[0]
        stats = tensorsManager.stats()
        is_equal = torch.equal(tensorsManager.release(logits), expected)
    nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    return Found(nbytes / TOKENS, time_ns / TOKENS, is_equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="percent")
    parser.add_argument("--ways", default=",".join(WAYS), help="(%(default)s)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="(%(default)s)")
    chosen = KEEPER.parse(parser, None, defaults=["budgets", "ways", "strategies"])
    with disabled():
        used = used_nbytes(model_of(WAYS[0]))
    cells = [
        (way, strategy, int(budget))
        for way in chosen.ways.split(",")
        for strategy in chosen.strategies.split(",")
        for budget in chosen.budgets.split(",")
    ]
    grid = Table(title=f"a token, which uses {used / 1e6:.1f} MB")
    for heading in ("experts", "strategy", "budget", "MB fetched", "ms", "as blocks: MB", "ms"):
        grid.add_column(heading, justify="left" if heading in ("experts", "strategy") else "right")
    figures: dict[str, Figure] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("experts", total=len(cells))
        for way, strategy, budget in cells:
            name = f"{way}/{strategy}/{budget}"
            progress.update(task, description=name)
            alone = measured(way, strategy, budget, "exact")
            whole = measured(way, strategy, budget, "off")
            costs = alone.fetched_nbytes, alone.time_ns, whole.fetched_nbytes, whole.time_ns
            row = [f"{cost / 1e6:.2f}" for cost in costs]
            grid.add_row(way, strategy, f"{budget} %", *row)
            figures[f"{name}/fetched"] = Figure(alone.fetched_nbytes / used, "x what it uses", 1.0)
            figures[f"{name}/time"] = Figure(alone.time_ns / whole.time_ns, "x as blocks")
            figures[f"{name}/differs"] = Figure(not alone.is_equal, "yes or no", 0)
            progress.advance(task)
    Console(width=WIDTH).print(grid)
    result = {name: round(figure.value, 4) for name, figure in figures.items()}
    return KEEPER.conclude(figures, result, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
