"""What the compatibility run is made of: a model, how it is made, and what is done with it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import torch
from torch import nn

#: What is done with a model: a name for the table, and a function of the model.
Run = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """One model. `make` builds it, each of `runs` uses it and returns what is to be compared."""

    name: str
    family: str
    make: Callable[[], Any]
    runs: Mapping[str, Run] = field(default_factory=dict)
    #: Why it cannot be tried here; "" where it can.
    missing: str = ""


def seed(number: int = 0) -> None:
    """Start every generator that a model may draw from."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def tokens(rows: int = 2, columns: int = 7, *, below: int = 90) -> torch.Tensor:
    """Token numbers that are no special ones."""
    return torch.randint(5, below, (rows, columns))


def perturbed(model: Any) -> Any:
    """Move every weight a little: fresh ones are too regular (ones, zeros) to show a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


# -- what is compared ------------------------------------------------------------------------------


def observed(value: Any) -> list[Any]:
    """The tensors and plain values inside what a model returns, in order."""
    return list(_leaves(value, set()))


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield value
    elif isinstance(value, numpy.ndarray):
        yield torch.from_numpy(value.copy())
    elif id(value) not in seen:
        seen.add(id(value))
        yield from _inside(value, seen)


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, Mapping):
        parts: Any = [value[key] for key in value]
    elif isinstance(value, (list, tuple)):
        parts = value
    elif hasattr(value, "__dict__"):
        # A cache, or an output that is no dictionary: its attributes, but no code and no settings.
        parts = [
            part
            for name, part in sorted(vars(value).items())
            if isinstance(part, (torch.Tensor, list, tuple, dict))
            or type(part).__module__.endswith("cache_utils")
        ]
    else:
        return
    for part in parts:
        yield from _leaves(part, seen)


# -- what is done with a model ---------------------------------------------------------------------


def forward(inputs: Callable[[], dict[str, Any]], **options: Any) -> Run:
    """Call the model once, without gradients."""

    def run(model: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return model(**inputs(), **options)

    return run


def backward(inputs: Callable[[], dict[str, Any]], **options: Any) -> Run:
    """Call it in training, with its dropout, and return the result and every gradient."""

    def run(model: Any) -> Any:
        model.train()
        result = model(**inputs(), **options)
        floats = [x for x in graph_of(result) if x.requires_grad]
        loss = sum((x.float() ** 2).mean() for x in floats)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [loss, *(x.detach() for x in floats), *gradients]

    return run


def graph_of(value: Any) -> list[torch.Tensor]:
    """The floating point tensors of a result, still tied to their autograd graph."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [x for key in value for x in graph_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in graph_of(part)]
    return []


def generate(inputs: Callable[[], dict[str, Any]], cache: str | None = None, **options: Any) -> Run:
    """Have the model write a few tokens, with the cache named."""

    def run(model: Any) -> Any:
        model.eval()
        asked = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, **options}
        if cache is not None:
            asked["cache_implementation"] = cache
        with without_streams():
            return model.generate(
                **inputs(), **asked, return_dict_in_generate=True, output_logits=True
            )

    return run


class NoStream:
    """Stands for a stream where there are none: what is issued is done."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: NoStream) -> None:
        """Nothing is ever behind."""


@contextmanager
def without_streams() -> Iterator[None]:
    """Let offloading caches run: they ask for CUDA streams, which a CPU build does not have."""
    if torch.cuda.is_available():
        yield
        return
    streams = mock.patch("torch.Stream", NoStream)
    default = mock.patch("torch.cuda.default_stream", return_value=NoStream())
    with streams, default:
        yield


def saved_and_loaded(inputs: Callable[[], dict[str, Any]], **options: Any) -> Run:
    """Save the model, load it again, and call what was loaded."""

    def run(model: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder).eval()
            with torch.no_grad():
                return [loaded(**inputs(), **options), *loaded.parameters()]

    return run


def weights_nbytes(model: Any) -> int:
    """Bytes of the parameters and buffers of a model, or of all the models of a pipeline."""
    tensors = {id(t): t for part in parts_of(model) for t in [*part.parameters(), *part.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def parts_of(model: Any) -> list[nn.Module]:
    """The modules of a pipeline; a module itself."""
    if isinstance(model, nn.Module):
        return [model]
    return [part for part in model.components.values() if isinstance(part, nn.Module)]
