"""What our own Python costs under pressure, as a multiple of plain torch.

    python -m benchmarks.host_time [--programs decode_32,train] [--shares 50,110]
                                   [--contenders flow,lru] [--rounds 9] [--write-baseline]
    python -m benchmarks.host_time --calibrate [--processor NAME] [--save FILE]

Virtual time counts kernels and copies; the host decides meanwhile, and a small model waits for it.
Here widths are small, so that what is measured is Python: the program's own, torch's, and ours. The
device is the adapter for real accelerators over the host (`overhead_of_dispatch`); the budget is a
share of the bytes of parameters, buffers and optimizer state.

Each program and contender has a process of its own. A figure is the median of the ratios of
neighbouring steps, ours to plain torch's, in processor time with one thread; before, the program
runs until its flow is learned. Peers run the same program with their hooks, host to host, with all
weights offloaded: they have no budget to obey.

`--calibrate` measures instead what management takes by path, for the simulated device
(`calibrate_host.py`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from torchTensorRef import disabled, tensorsManager

from .baseline import Figure, Keeper, Tolerance, processor
from .calibrate_host import calibrate
from .overhead_of_dispatch import bring, keep_what_is_freed, open_device, ratio

KEEPER = Keeper("host_time", "python -m benchmarks.host_time", Tolerance(share=0.1, amount=0.1))
RESULT = "RATIO "
#: Steps before anything is measured: the flow is learned, and followed.
LEARNING_STEPS = 8
SHARES = (50, 110)
#: Programs measured unless others are asked for; the others take minutes each.
USUAL = ("decode_8", "decode_32", "unet", "train")

Step = Callable[[], Any]


class Program(NamedTuple):
    """A program to be measured.

    Attributes
    ----------
    model : nn.Module
        Plain; every contender gets a copy.
    start : callable
        From a model and `bring`, which puts tensors where they belong, to one step of the program.
    state_factor : float
        Bytes that stay, optimizer state included, as a multiple of the model's.
    """

    model: nn.Module
    start: Callable[[nn.Module, Callable[[Any], Any]], Step]
    state_factor: float = 1.0


# -- programs --------------------------------------------------------------------------------------


def decode(layers: int) -> Program:
    """One token of a Llama with a key-value cache; every 16 tokens it begins anew."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

    def start(model: nn.Module, bring: Callable[[Any], Any]) -> Step:
        prompt = bring(torch.randint(256, (1, 4)))
        made: dict[str, Any] = {"count": 0}

        def token() -> Any:
            if made["count"] % 16 == 0:
                made.update(cache=DynamicCache(config=config), ids=prompt)
            made["count"] += 1
            out = model(made["ids"], past_key_values=made["cache"], use_cache=True)
            made["ids"] = out.logits[:, -1:].argmax(-1)
            return made["ids"]

        return token

    return Program(LlamaForCausalLM(config).eval(), start)


def unet() -> Program:
    """One step of a diffusers UNet on a small latent."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16, 16),
        layers_per_block=2,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()

    def start(model: nn.Module, bring: Callable[[Any], Any]) -> Step:
        latent, text = bring(torch.rand(1, 4, 8, 8)), bring(torch.rand(1, 4, 16))
        return lambda: model(latent, 10, encoder_hidden_states=text).sample

    return Program(model, start)


def train() -> Program:
    """A training step with AdamW of twelve small blocks."""
    hidden, depth = 32, 12
    model = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU())
            for _ in range(depth)
        ),
        nn.Linear(hidden, 8),
    )

    def start(model: nn.Module, bring: Callable[[Any], Any]) -> Step:
        x, y = bring(torch.rand(4, hidden)), bring(torch.randint(8, (4,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> Any:
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return Program(model, start, state_factor=4.0)


class Experts(nn.Module):
    """A layer of which two of many experts work for each token."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(hidden), nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, hidden)
            )
            for _ in range(count)
        )

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2)
        parts = [
            w * self.experts[n](y)
            for w, n in zip(weights[0].unbind(), chosen[0].tolist(), strict=True)
        ]
        return x + parts[0] + parts[1]


def mixture() -> Program:
    """One token through 48 layers of 128 experts, 18,576 blocks; the token says which work."""
    hidden = 16
    model = nn.Sequential(*(Experts(hidden, 128) for _ in range(48))).eval()

    def start(model: nn.Module, bring: Callable[[Any], Any]) -> Step:
        generator = torch.Generator().manual_seed(3)
        return lambda: model(bring(torch.rand(1, hidden, generator=generator)))

    return Program(model, start)


def grouped() -> Program:
    """One token of a Qwen3-MoE, whose layers keep their 128 experts in one tensor each."""
    from transformers import DynamicCache

    from .experts import VOCABULARY, model_of

    model = model_of(
        "grouped_mm",
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=12,
        head_dim=16,
        tie_word_embeddings=False,
    )

    def start(model: nn.Module, bring: Callable[[Any], Any]) -> Step:
        generator = torch.Generator().manual_seed(1)
        made: dict[str, Any] = {"count": 0}

        def token() -> Any:
            if made["count"] % 16 == 0:
                made["cache"] = DynamicCache(config=model.config)
            made["count"] += 1
            ids = bring(torch.randint(VOCABULARY, (1, 1), generator=generator))
            return model(ids, past_key_values=made["cache"], use_cache=True).logits

        return token

    return Program(model, start)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "decode_8": lambda: decode(8),
    "decode_32": lambda: decode(32),
    "decode_80": lambda: decode(80),
    "unet": unet,
    "train": train,
    "mixture": mixture,
    "grouped": grouped,
}
OURS = ("flow", "lru", "genoa")
PEERS = ("accelerate", "diffusers")
#: Most that a figure may be, by program, contender and share (issue 21).
BOUNDS = {
    "decode_32 flow 50": 3.0,
    "decode_32 lru 50": 3.0,
    "train flow 50": 4.0,
    "train lru 50": 4.0,
    "decode_32 genoa 50": 8.0,
    "mixture flow 25": 4.0,
}


# -- in a process of its own -----------------------------------------------------------------------


def nbytes_of(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, each once."""
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in [*model.parameters(), *model.buffers()]
    }
    return sum(storages.values())


def offloaded(name: str, model: nn.Module) -> nn.Module:
    """Give a model to a peer, all of its weights offloaded, host to host."""
    if name == "accelerate":
        from accelerate import cpu_offload

        return cpu_offload(model, execution_device=torch.device("cpu"))
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    return model


def measure(program_name: str, contender: str, shares: list[int], rounds: int) -> None:
    """Print the ratio of one program under one contender at each share."""
    keep_what_is_freed()
    torch.set_num_threads(1)
    with disabled():
        torch.manual_seed(0)
        program = PROGRAMS[program_name]()
        plain = program.start(program.model, lambda x: x)
    nbytes = int(nbytes_of(program.model) * program.state_factor)
    for share in shares if contender in OURS else [0]:
        with disabled():
            model = copy.deepcopy(program.model)
        if contender in OURS:
            open_device("adapter")
            tensorsManager.strategy = contender
            tensorsManager.budget = nbytes * share // 100
            step = program.start(tensorsManager.adopt(model), bring)
        else:
            with disabled():
                step = plain_step(program.start(offloaded(contender, model), lambda x: x))
        with torch.no_grad():
            for _ in range(LEARNING_STEPS):
                step()
            found = ratio(plain, step, 1, rounds)
        print(
            RESULT + json.dumps([cell(program_name, contender, share), round(found, 3)]), flush=True
        )
        del model, step
        gc.collect()


def plain_step(step: Step) -> Step:
    """A step in which nothing comes under management."""

    def run() -> Any:
        with disabled():
            return step()

    return run


# -- all of them -----------------------------------------------------------------------------------


def cell(program: str, contender: str, share: int) -> str:
    return f"{program} {contender} {share}" if share else f"{program} {contender}"


def ratios_elsewhere(
    program: str, contender: str, chosen: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Measure one program under one contender in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.host_time", "--here", program, contender]
    command += ["--shares", chosen.shares, "--rounds", str(chosen.rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT):
                yield tuple(json.loads(line.removeprefix(RESULT)))
    if process.returncode:
        raise SystemExit(f"{program} under {contender} failed with {process.returncode}")


def table(found: dict[str, float], shares: list[int]) -> Table:
    """A row per program and contender, a column per share."""
    grid = Table(title="processor time of a step, x plain torch")
    for heading in ("program", "contender", *(f"{share} %" for share in shares), "all offloaded"):
        grid.add_column(heading, justify="left" if heading[0] in "pc" else "right")
    for program in PROGRAMS:
        for contender in (*OURS, *PEERS):
            row = [found.get(cell(program, contender, share)) for share in (*shares, 0)]
            if any(row):
                grid.add_row(program, contender, *("-" if x is None else f"{x:.2f}" for x in row))
    return grid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--programs", default=",".join(USUAL), help=f"of {', '.join(PROGRAMS)} (%(default)s)"
    )
    parser.add_argument("--contenders", default=",".join((*OURS, *PEERS)), help="(%(default)s)")
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="percent (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure what management takes by path"
    )
    parser.add_argument("--processor", default=processor(), help="its name (%(default)s)")
    parser.add_argument("--save", help="write what --calibrate finds into this JSON file")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    chosen = KEEPER.parse(parser, None, defaults=["programs", "contenders", "shares", "rounds"])
    if chosen.calibrate:
        return calibrate(chosen.processor, chosen.save)
    shares = [int(share) for share in chosen.shares.split(",")]
    if chosen.here:
        measure(*chosen.here, shares, chosen.rounds)
        return 0
    found: dict[str, float] = {}
    pairs = [(p, c) for p in chosen.programs.split(",") for c in chosen.contenders.split(",")]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("host time", total=len(pairs))
        for program, contender in pairs:
            progress.update(task, description=f"{program} {contender}")
            found.update(ratios_elsewhere(program, contender, chosen))
            progress.advance(task)
    Console(width=100).print(table(found, shares))
    figures = {name: Figure(x, "x plain torch", BOUNDS.get(name)) for name, x in found.items()}
    return KEEPER.conclude(figures, found, settings={}, writes=chosen.write_baseline)


if __name__ == "__main__":
    raise SystemExit(main())
