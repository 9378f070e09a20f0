"""What interception costs: each program managed, as a ratio to plain torch in the same process.

    python -m benchmarks.overhead_of_dispatch [--device sim] [--rounds 15] [--processes 3]
                                              [--only add,view] [--system-allocator]
                                              [--write-baseline]

Both sides take turns and each figure is the median of the ratios of neighbours, so that a machine
that slows down slows both. Time is the processor time of this process with one thread
(`time.process_time`): the machine may be shared, and what others take is not ours. Where the system
puts code and data differs from process to process, and with it the figures, by several percent: all
is measured in three processes, one after another, and of the three figures the middle one is given.

The device is the adapter for real accelerators (`AcceleratorDevice`) over `torch.cpu`, with room
for everything: all that a real accelerator's path does in Python, and the host's own kernels.
An accelerator's allocator keeps what is freed for the next one who asks. The C library's, which
stands in for it here, gives it back to the system at the end of some steps and not of others, and
which side then pays for up to 40,000 page faults (60 ms of the 600 of a training step) differs from
process to process, also between two runs of plain torch. It is told to keep what is freed, for both
sides; `--system-allocator` leaves it as it is.

`--device sim` takes the simulated device instead, whose clock and allocator are instruments: they
cost about as much again per operator, and are no part of interception.

Operators run in C++ where the library is built, and one program is measured in Python beside it;
`TTR_CORE=python` measures all of them there.
"""

from __future__ import annotations

import argparse
import collections
import copy
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from torchTensorRef import disabled, tensorsManager
from torchTensorRef.base.options import settings
from torchTensorRef.devices.accelerator.device import AcceleratorDevice
from torchTensorRef.memory import core

from .baseline import Figure, Keeper, Tolerance

#: What is measured beside the rest where there is no C++: the path in Python (`TTR_CORE=python`).
IN_PYTHON = "tiny_llama_decode"
IN_PYTHON_FIGURE = f"{IN_PYTHON} in Python"
#: Upper bounds that were set as targets, on the path in Python.
BOUNDS = {"add": 7.5, "mm_64": 3.0, "view": 7.0, IN_PYTHON: 3.6}
#: And where operators run in C++.
BOUNDS_IN_CPP = {
    IN_PYTHON_FIGURE: BOUNDS[IN_PYTHON],
    "add": 1.7,
    "view": 1.7,
    "mm_64": 1.15,
    "linear_row": 1.3,
    "attention_step": 1.3,
    "layer_norm": 1.5,
    "tiny_llama_decode": 1.4,
    "tiny_train_step": 1.3,
    "small_llama_decode": 1.03,
    "bert_forward": 1.03,
    "unet_step": 1.03,
    "train_step": 1.03,
}
#: From process to process the figures differ by several percent, of which the middle sees less.
KEEPER = Keeper(
    "overhead_of_dispatch",
    "python -m benchmarks.overhead_of_dispatch",
    Tolerance(share=0.05),
)
#: What a process prints before its ratio of a program.
RATIO = "RATIO "
ROOM_NBYTES = 8 << 30

Run = Callable[[], Any]


def bring(x: Any) -> Any:
    """Put a tensor or a module under management."""
    return tensorsManager.adopt(x, sole=True)


def ratio(plain: Run, ours: Run, repeats: int, rounds: int) -> float:
    """Median over rounds of the processor time of ours over that of plain, taken next to it."""

    def seconds(run: Run) -> float:
        start = time.process_time()
        for _ in range(repeats):
            run()
        return time.process_time() - start

    def seconds_plain() -> float:
        with disabled():
            return seconds(plain)

    for _ in range(4):  # what is learned, is learned now
        seconds_plain(), ours()
    ratios = []
    for _ in range(rounds):
        before = seconds_plain()
        between = seconds(ours)
        ratios.append(2 * between / (before + seconds_plain()))
    return statistics.median(ratios)


# -- single operators ------------------------------------------------------------------------------


def operator(make: Callable[[], tuple[Any, ...]], run: Callable[..., Any]) -> tuple[Run, Run]:
    """One operator on resident operands."""
    plain = make()
    ours = tuple(bring(x.clone()).toGPU() if hasattr(x, "clone") else x for x in plain)
    return lambda: run(*plain), lambda: run(*ours)


def add() -> tuple[Run, Run]:
    return operator(lambda: (torch.rand(4), torch.rand(4)), lambda a, b: a + b)


def mm_64() -> tuple[Run, Run]:
    return operator(lambda: (torch.rand(64, 64), torch.rand(64, 64)), lambda a, b: a @ b)


def view() -> tuple[Run, Run]:
    return operator(lambda: (torch.rand(8, 8),), lambda x: x.view(64))


def linear_row() -> tuple[Run, Run]:
    return operator(
        lambda: (torch.rand(1, 128), torch.rand(128, 128), torch.rand(128)), nn.functional.linear
    )


def attention_step() -> tuple[Run, Run]:
    """One row that is decoded, four heads, over 20 keys."""
    return operator(
        lambda: (torch.rand(1, 4, 1, 32), *torch.rand(2, 1, 4, 20, 32)),
        nn.functional.scaled_dot_product_attention,
    )


def layer_norm() -> tuple[Run, Run]:
    return operator(
        lambda: (torch.rand(1, 128), torch.rand(128), torch.rand(128)),
        lambda x, w, b: nn.functional.layer_norm(x, (128,), w, b),
    )


# -- models ----------------------------------------------------------------------------------------


def forward(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Run, Run]:
    """One call of a model."""
    ours = tensorsManager.adopt(copy.deepcopy(model))
    brought = [bring(x.clone()) for x in inputs]
    return lambda: model(*inputs, **options), lambda: ours(*brought, **options)


def llama(tokens: int, **config: int) -> tuple[Run, Run]:
    """Decode with a key-value cache: the model's calls as `generate` makes them, greedily."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **config)).eval()
    prompt = torch.randint(1000, (1, 12))

    def decode(model: nn.Module, ids: Any) -> Any:
        cache, made = DynamicCache(config=model.config), []
        for _ in range(tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1:].argmax(-1)
            made.append(ids)
        return torch.cat(made, 1)

    ours = tensorsManager.adopt(copy.deepcopy(model))
    brought = bring(prompt.clone())
    return lambda: decode(model, prompt), lambda: decode(ours, brought)


def tiny_llama() -> tuple[Run, Run]:
    return llama(
        24,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def small_llama() -> tuple[Run, Run]:
    return llama(
        12,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
    )


def bert() -> tuple[Run, Run]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return forward(BertModel(config).eval(), torch.randint(1000, (4, 64)))


def unet() -> tuple[Run, Run]:
    """One step of a diffusers UNet on a latent of 64 x 64."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    latent, text = torch.rand(1, 4, 64, 64), torch.rand(1, 16, 64)
    ours = tensorsManager.adopt(copy.deepcopy(model))
    brought = bring(latent.clone()), bring(text.clone())
    return (
        lambda: model(latent, 10, encoder_hidden_states=text).sample,
        lambda: ours(brought[0], 10, encoder_hidden_states=brought[1]).sample,
    )


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 8, batch_first=True)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def train_step() -> tuple[Run, Run]:
    """Forward, backward and AdamW on a transformer (hidden 512, 8 layers, batch 4 x 64)."""
    return training(512, 8, 4, 64)


def tiny_train_step() -> tuple[Run, Run]:
    """The same of hidden 64, 4 layers, one batch of 16."""
    return training(64, 4, 1, 16)


def training(hidden: int, layers: int, *rows: int) -> tuple[Run, Run]:
    model = nn.Sequential(*(Block(hidden) for _ in range(layers)), nn.Linear(hidden, 100))
    x, y = torch.rand(*rows, hidden), torch.randint(100, rows)
    ours = tensorsManager.adopt(copy.deepcopy(model))

    def stepper(model: nn.Module, x: Any, y: Any) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> Any:
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return stepper(model, x, y), stepper(ours, bring(x.clone()), bring(y.clone()))


#: Name, maker, calls per measurement.
PROGRAMS: tuple[tuple[str, Callable[[], tuple[Run, Run]], int], ...] = (
    ("add", add, 4000),
    ("mm_64", mm_64, 1500),
    ("view", view, 4000),
    ("linear_row", linear_row, 4000),
    ("attention_step", attention_step, 2000),
    ("layer_norm", layer_norm, 4000),
    ("tiny_llama_decode", tiny_llama, 2),
    ("small_llama_decode", small_llama, 1),
    ("bert_forward", bert, 2),
    ("unet_step", unet, 2),
    ("tiny_train_step", tiny_train_step, 10),
    ("train_step", train_step, 1),
)


def _print_slow_operators(run: Run) -> None:
    """Count the operators of one run that do not take the ready path."""
    from torchTensorRef.interception.slow_path import SlowPath

    counts: collections.Counter[str] = collections.Counter()
    whole = SlowPath.run

    def counted(call: Any) -> Any:
        counts[call.plan.name] += 1
        return whole(call)

    SlowPath.run = counted  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            run()
    finally:
        SlowPath.run = whole  # type: ignore[method-assign]
    for name, count in counts.most_common(12):
        print(f"    {count:6} x {name}")


def open_device(name: str) -> None:
    if name == "sim":
        tensorsManager.device = "sim"
    else:
        device = AcceleratorDevice("cpu", module=torch.cpu)  # type: ignore[arg-type]
        device.name, device.capacity_nbytes = "adapter:0", ROOM_NBYTES
        device.torch_device = torch.device("cpu")  # as tensors on it say, without a number
        tensorsManager.device = device
    tensorsManager.budget = ROOM_NBYTES
    tensorsManager.strategy = "lru"


def keep_what_is_freed() -> bool:
    """Tell the C library to give no memory back to the system; False where it cannot be told."""
    is_glibc = platform.libc_ver()[0] == "glibc"
    trim_threshold, mmap_threshold = -1, -3  # of `mallopt` (malloc.h)
    libc = ctypes.CDLL(None) if is_glibc else None
    return libc is not None and all(
        libc.mallopt(which, 1 << 30) for which in (mmap_threshold, trim_threshold)
    )


def measure(chosen: argparse.Namespace) -> None:
    """Measure in this process; print a line for each program as soon as it is measured."""
    keeps = not chosen.system_allocator and keep_what_is_freed()
    torch.set_num_threads(1)
    open_device(chosen.device)
    print(f"operators: {core.path_in_words()}")
    print(f"device {tensorsManager.device}, what is freed is {'kept' if keeps else 'given back'}")
    for name, make, repeats in PROGRAMS:
        if name not in chosen.only.split(","):
            continue
        torch.manual_seed(0)
        with disabled():
            plain, ours = make()
        with torch.no_grad():
            found = ratio(plain, ours, repeats, chosen.rounds)
        if chosen.why:
            _print_slow_operators(ours)
        print(RATIO + json.dumps([name, round(found, 3)]), flush=True)


def ratios_elsewhere(
    chosen: argparse.Namespace, only: str, path: str
) -> Iterator[tuple[str, float]]:
    """Measure in a process of its own, on a path: (program, ratio), as soon as it is there.

    Raises
    ------
    SystemExit
        The process failed.
    """
    command = [sys.executable, "-m", "benchmarks.overhead_of_dispatch", "--measure"]
    command += ["--device", chosen.device, "--rounds", str(chosen.rounds), "--only", only]
    command += ["--why"] * chosen.why + ["--system-allocator"] * chosen.system_allocator
    environ = {**os.environ, "TTR_CORE": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RATIO):
                yield tuple(json.loads(line.removeprefix(RATIO)))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)


def medians(chosen: argparse.Namespace) -> dict[str, float]:
    """Measure in processes one after another; the middle ratio of each program."""
    found: dict[str, list[float]] = {}
    wanted = set(chosen.only.split(",")).intersection(name for name, *_ in PROGRAMS)
    runs = [(chosen.only, settings.core, "")]
    if core.library is not None and IN_PYTHON in wanted:
        runs.append((IN_PYTHON, "python", " in Python"))
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=chosen.processes * (len(wanted) + len(runs) - 1))
        for number in range(chosen.processes):
            progress.update(task, description=f"process {number + 1}")
            for only, path, suffix in runs:
                for name, one in ratios_elsewhere(chosen, only, path):
                    found.setdefault(name + suffix, []).append(one)
                    print(f"  {name + suffix:32} {one:7.3f}", flush=True)
                    progress.advance(task)
    return {name: round(statistics.median(each), 3) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("adapter", "sim"), default="adapter")
    parser.add_argument("--rounds", type=int, default=15, help="medians over so many (%(default)s)")
    parser.add_argument("--processes", type=int, default=3, help="and over so many (%(default)s)")
    parser.add_argument("--why", action="store_true", help="show what takes the slow path")
    parser.add_argument(
        "--only", default=",".join(name for name, *_ in PROGRAMS), help="names, separated by commas"
    )
    parser.add_argument(
        "--system-allocator", action="store_true", help="let the C library give memory back"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    how = ("device", "system_allocator", "only", "rounds", "processes")
    chosen = KEEPER.parse(parser, None, defaults=how)
    if chosen.measure:
        measure(chosen)
        return 0
    result = medians(chosen)
    path = core.path_in_words().partition(" ")[0]  # Python, or C++ (TTR_CORE=c++)
    # Figures of another path are no baseline.
    shared = {"device": chosen.device, "system_allocator": chosen.system_allocator, "path": path}
    # The bounds are of interception alone, and so of what runs without options.
    is_usual = chosen.device == "adapter" and not chosen.system_allocator
    bounds = {} if not is_usual else BOUNDS if path == "Python" else BOUNDS_IN_CPP
    figures = {
        name: Figure(value, "x plain torch", bounds.get(name)) for name, value in result.items()
    }
    return KEEPER.conclude(
        figures, {**result, "path": path}, settings=shared, writes=chosen.write_baseline
    )


if __name__ == "__main__":
    sys.exit(main())
