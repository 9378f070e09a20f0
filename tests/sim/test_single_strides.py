"""Strides of dimensions of one element, and of tensors of none, are those that plain torch gives.

No value is found by them, but a tensor of one channel is contiguous in two formats at once, and
they tell which one it is in: by that convolutions choose kernels, and `view` what it refuses.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from torchTensorRef import promising
from torchTensorRef.interception.handlers import SHARE_FROM_NBYTES
from torchTensorRef.tensor.tensor_ref import TensorRef

from ..support.differential import differences
from ..support.forced_blocks import forced_blocks
from ..support.over_host import adapters
from ..support.sweeps import by_pairs, one_in

ROWS, LAST = torch.contiguous_format, torch.channels_last
ROOM_NBYTES = 1 << 24
#: As many rows and columns make a tensor whose copies share its bytes.
LARGE = 130


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def inputs(n: int) -> dict[str, torch.Tensor]:
    """Tensors with dimensions of one element, large for a large n, and some without any."""
    return {
        "grey pictures": drawn(2, 1, n, n),
        "grey, channels last": drawn(2, 1, n, n).to(memory_format=LAST),
        "weights of 1 x 1": drawn(n, n, 1, 1),
        "such, channels last": drawn(n, n, 1, 1).to(memory_format=LAST),
        "one picture": drawn(1, 3, n, n).to(memory_format=LAST),
        "a column": drawn(1, n * n).t(),
        "a row": drawn(n * n, 1).t(),
        "in the middle": drawn(1, n, n).transpose(0, 1),
        "permuted": drawn(n, 1, n, 2).permute(2, 1, 3, 0),
        "of nobody's strides": drawn(n * n * 2).as_strided((2, 1, n, n), (n * n, 7, n, 1)),
        "with gaps": drawn(2, n, n, 3)[..., :1],
        "nothing": drawn(2, 0, n, n).to(memory_format=LAST),
        "nothing, permuted": drawn(0, 1, n, 1).permute(3, 2, 1, 0),
    }


def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        for _ in range(2):  # the second is added to the first
            of(leaf).sum().backward()
        return leaf.grad

    return step


def in_module(layout: torch.memory_format) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        module = nn.Module()
        module.weight = nn.Parameter(x)
        module.register_buffer("scale", x / 2)
        module.to(memory_format=layout)
        return module.weight, module.scale

    return step


def loaded(assign: bool) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros_like(x, memory_format=ROWS))
        module.load_state_dict({"weight": x}, assign=assign)
        return module.weight

    return step


def saved(x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


Step = Callable[[torch.Tensor], Any]

COPIES: dict[str, Step] = {
    "clone": lambda x: x.clone(),
    "clone in rows": lambda x: x.clone(memory_format=ROWS),
    "contiguous": lambda x: x.contiguous(),
    "to rows": lambda x: x.to(memory_format=ROWS),
    "a copy in rows": lambda x: x.to(memory_format=ROWS, copy=True),
    "a copy": lambda x: x.to(torch.float32, copy=True),
    "to the host": lambda x: x.to("cpu", copy=True),
    "double": lambda x: x.double(),
    "turned": lambda x: x.transpose(0, -1).clone(memory_format=ROWS),
    "turned and contiguous": lambda x: x.transpose(0, -1).contiguous(),
    "data": lambda x: (x.data, x.detach()),
    "deepcopy": copy.deepcopy,
    "deepcopy of a parameter": lambda x: copy.deepcopy(nn.Parameter(x)),
    "copy": copy.copy,
    "copied to": lambda x: torch.empty_like(x, memory_format=ROWS).copy_(x),
    "module": in_module(ROWS),
    "loaded": loaded(assign=False),
    "assigned": loaded(assign=True),
    "gradient of a clone": gradient(lambda x: x.clone(memory_format=ROWS)),
}
COPIES_OF_PICTURES: dict[str, Step] = {
    "clone, channels last": lambda x: x.clone(memory_format=LAST),
    "to channels last": lambda x: x.to(memory_format=LAST),
    "a copy, channels last": lambda x: x.to(memory_format=LAST, copy=True),
    "contiguous, channels last": lambda x: x.contiguous(memory_format=LAST),
    "double, channels last": lambda x: x.to(torch.float64, memory_format=LAST),
    "there and back": lambda x: x.to(memory_format=LAST).contiguous(),
    "like one": lambda x: torch.zeros_like(x.to(memory_format=LAST)),
    "module, channels last": in_module(LAST),
    "gradient, channels last": gradient(lambda x: x.to(memory_format=LAST) * 2),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=x.numel() > 1e4),
    "convolution": lambda x: functional.conv2d(
        x.clone(memory_format=LAST), torch.ones(2, x.size(1), 1, 1)
    ),
    "gradient of a convolution": gradient(
        lambda x: functional.conv2d(x, torch.ones(2, x.size(1), 1, 1).to(memory_format=LAST))
    ),
}
OPERATORS: dict[str, Step] = {
    "like": lambda x: (torch.zeros_like(x), torch.ones_like(x, memory_format=ROWS)),
    "reshape": lambda x: (x.reshape(x.shape), x.reshape(1, x.numel(), 1), x.flatten()),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.squeeze()),
    "expand": lambda x: (x.expand(2, *x.shape), x.expand(2, *x.shape).clone(), x.expand_as(x)),
    "arithmetic": lambda x: (x + 1, x + x, x.exp(), x > 0, x + x.contiguous(), x.contiguous() + x),
    "in place": lambda x: x.clone(memory_format=ROWS).mul_(x),
    "broadcast": lambda x: (x + x[..., :1], x[:1] * x, torch.lerp(x, x, 0.5)),
    "where": lambda x: torch.where(x > 0, x, x.contiguous()),
    "cat": lambda x: (torch.cat([x]), torch.cat([x, x], -1), torch.stack([x, x])),
    "sums": lambda x: (x.sum(0), x.sum(-1, keepdim=True), x.cumsum(0), x.softmax(-1)),
    "parts": lambda x: (x[:1], x[..., :1], x.flip(0), x.chunk(2)),
    "rows": lambda x: x.index_select(0, x.new_zeros(1, dtype=torch.int64)),
    "in another order": lambda x: (*x.sort(-1), x.tril()),
    "repeat": lambda x: (x.repeat(*[1] * x.dim()), functional.pad(x, (1, 1))),
    "out": lambda x: torch.add(x, x, out=x.new_empty(0)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": saved,
    "gradient": gradient(lambda x: x * 2),
    "gradient of a view": gradient(lambda x: x.transpose(0, -1)),
    "gradient of rows": gradient(lambda x: x.reshape(-1) * 2),
}


def steps_for(x: torch.Tensor, *, is_large: bool) -> dict[str, Step]:
    steps = COPIES if is_large else COPIES | OPERATORS
    return steps | COPIES_OF_PICTURES if x.dim() == 4 else steps


def outcome(step: Step, x: torch.Tensor) -> Any:
    """What a step gives, or how it fails."""
    try:
        return step(x)
    except (RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def on_accelerator(step: Step, ref: Any) -> Any:
    return outcome(step, ref.toGPU())


def in_blocks(step: Step, ref: Any) -> Any:
    with forced_blocks(0, keep_bits=True):
        return outcome(step, ref)


def promised(step: Step, ref: Any) -> Any:
    with promising():
        made = outcome(step, ref)
    for leaf in tree_leaves(made):
        if isinstance(leaf, TensorRef):
            leaf.fulfil()
    return made


#: A promise is written down, and taken over by a module, only with its values.
NEED_VALUES = {"pickle", "file", "loaded"}
#: What arithmetic on nothing promises has other strides (docs/known-issues.md).
NOT_PROMISED = "nothing, permuted"


@pytest.mark.parametrize(
    ("device", "run", "n"),
    by_pairs(["simulated", "adapter"], [on_accelerator, in_blocks, promised], [3, LARGE]),
)
def test_strides_are_those_of_plain_torch(manage, device, run, n):
    manager = manage(nbytes=ROOM_NBYTES)
    if device == "adapter":
        (manager.device,) = adapters(1, ROOM_NBYTES)
    given = inputs(n)
    assert (min(x.nbytes for x in given.values() if x.numel()) >= SHARE_FROM_NBYTES) == (n == LARGE)
    steps = [
        (name, what, x, step)
        for name, x in given.items()
        for what, step in steps_for(x, is_large=n == LARGE).items()
        if run is not promised or not (what in NEED_VALUES or name == NOT_PROMISED)
    ]
    found = []
    for name, what, x, step in one_in(2, steps):
        expected = outcome(step, copy.deepcopy(x))
        told = differences(expected, run(step, manager.adopt(copy.deepcopy(x))))
        found += [f"{what} of {name}: {text}" for text in told]
    assert found == []
