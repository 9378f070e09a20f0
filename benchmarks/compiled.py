"""What a compiled model costs with us: per step, at half the weights, and in compilations.

    python -m benchmarks.compiled [--models llama,unet] [--rounds 9] [--write-baseline]

Each model is compiled by inductor with `fullgraph=True`, without gradients. Measured are

* `resident`: processor time of a step with everything on the device, one thread, as a multiple of
  plain compiled torch: the median of neighbouring measurements;
* `half`: virtual time of five steps within half the weights on the simulated device, as a multiple
  of the same program that is not compiled, and is intercepted as that is;
* `graphs`: graphs that it is compiled to where it is forced to run by blocks, one for each kind of
  layer (of another class, with other settings, of other shapes, given others); and `again`: those
  that had been made before.

`narrow` is a model whose steps take milliseconds: what we do for each of its parameters shows most.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch._dynamo import eval_frame

from torchTensorRef import disabled, options, tensorsManager
from torchTensorRef.inject.compiler import unregistered

from .baseline import Figure, Keeper, Tolerance
from .overhead_of_dispatch import ROOM_NBYTES, bring, keep_what_is_freed, ratio

KEEPER = Keeper("compiled", "python -m benchmarks.compiled", Tolerance(share=0.05, amount=0.02))
RESIDENT_BOUND, HALF_BOUND = 1.05, 1.02
STEPS = 5

Inputs = tuple[Any, ...]


def _llama(**config: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **config)).eval()


def llama() -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """A Llama of eight layers, and 32 tokens."""
    model = _llama(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return model, (torch.randint(1000, (1, 32)),), {}


def narrow() -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """A Llama of twelve layers that are 96 wide, and 16 tokens."""
    model = _llama(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    return model, (torch.randint(1000, (1, 16)),), {}


def unet() -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """A UNet of diffusers, and a latent of 32 x 32."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    return model, (torch.rand(1, 4, 32, 32), 10), {"encoder_hidden_states": torch.rand(1, 16, 64)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs, dict[str, Any]]]] = {
    "llama": llama,
    "unet": unet,
    "narrow": narrow,
}


def _ours(inputs: Any) -> Any:
    return bring(inputs.clone()) if isinstance(inputs, torch.Tensor) else inputs


def _made(name: str) -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """Make a model that is managed, and what it is given."""
    torch.manual_seed(0)
    with disabled():
        model, args, options = MODELS[name]()
    managed = tensorsManager.adopt(model, sole=True)
    return managed, tuple(map(_ours, args)), {key: _ours(x) for key, x in options.items()}


def _open(budget_nbytes: int, strategy: str) -> None:
    tensorsManager.device = "sim"
    tensorsManager.budget = budget_nbytes
    tensorsManager.strategy = strategy


@contextmanager
def _unpatched() -> Iterator[None]:
    """Give what is compiled inside to nobody but plain torch, when it is called, too."""
    context: Any = eval_frame._TorchDynamoContext
    ours = context.__call__
    context.__call__ = ours.__wrapped__
    try:
        yield
    finally:
        context.__call__ = ours


def resident(name: str, rounds: int) -> float:
    """Return the processor time of a step, as a multiple of plain compiled torch."""
    torch._dynamo.reset()
    _open(ROOM_NBYTES, "lru")
    with disabled(), _unpatched():
        torch.manual_seed(0)
        model, args, options = MODELS[name]()
        plain = torch.compile(model, fullgraph=True)
    managed, our_args, our_options = _made(name)
    ours = torch.compile(managed, fullgraph=True)

    def run_plain() -> Any:
        with unregistered():  # the compiler would stumble over our hooks
            return plain(*args, **options)

    found = ratio(run_plain, lambda: ours(*our_args, **our_options), 5, rounds)
    with disabled():
        expected = run_plain()[0]
    torch.testing.assert_close(ours(*our_args, **our_options)[0].cpu(), expected)
    return found


class Counting:
    """Inductor, which counts the graphs that it is given, and those that it was given before."""

    def __init__(self) -> None:
        self.kinds: set[Any] = set()
        self.again_count = 0
        self.inductor: Any = torch._dynamo.lookup_backend("inductor")

    def __call__(self, graph: Any, examples: Any) -> Any:
        kind = graph.code, str([getattr(x, "shape", x) for x in examples])
        self.again_count += kind in self.kinds
        self.kinds.add(kind)
        return self.inductor(graph, examples)


def half(name: str) -> tuple[float, Counting]:
    """Return the virtual time of steps within half the weights, and the graphs made for them."""
    took, backend = {}, Counting()
    for is_compiled in (False, True):
        torch._dynamo.reset()
        _open(ROOM_NBYTES, "flow")
        model, args, options = _made(name)
        _open(sum(p.nbytes for p in model.parameters()) // 2, "flow")
        run = torch.compile(model, fullgraph=True, backend=backend) if is_compiled else model
        device: Any = tensorsManager.residency.books.main
        for _ in range(STEPS):  # what is learned, is learned now
            run(*args, **options)
        device.synchronize()
        before_ns = device.now_ns()
        for _ in range(STEPS):
            run(*args, **options)
        device.synchronize()
        took[is_compiled] = device.now_ns() - before_ns
    return took[True] / took[False], backend


def main(arguments: list[str] | None = None) -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(prog=KEEPER.command, description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    chosen = KEEPER.parse(parser, arguments, defaults=("models", "rounds"))
    keep_what_is_freed()
    torch.set_num_threads(1)
    figures = {}
    with torch.no_grad():
        for name in chosen.models.split(","):
            bound = None if name == "narrow" else RESIDENT_BOUND
            took = resident(name, chosen.rounds)
            figures[f"{name} resident"] = Figure(round(took, 3), "x plain compiled", bound)
            print(name, "resident", figures[f"{name} resident"].value, flush=True)
            took, _ = half(name)
            figures[f"{name} half"] = Figure(round(took, 4), "x not compiled", HALF_BOUND)
            with options(compiled="forced"):
                by_blocks, backend = half(name)
            print(name, "half", took, "by blocks", by_blocks, flush=True)
            figures[f"{name} graphs"] = Figure(len(backend.kinds), "kinds of layers")
            figures[f"{name} again"] = Figure(backend.again_count, "graphs made again", 0)
    settings = {"rounds": chosen.rounds, "steps": STEPS}
    result = {name: figure.value for name, figure in figures.items()}
    return KEEPER.conclude(figures, result, settings=settings, writes=chosen.write_baseline)


if __name__ == "__main__":
    sys.exit(main())
