"""What is promised has the sizes, dtypes and strides that kernels give, and not those of CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef.inject import hooks

from ..support.differential import differences
from ..support.promised import asked_on_both


@pytest.fixture(autouse=True)
def injected(manage):
    manage()
    with hooks.is_disabled.entered(False):
        yield


def of_norms(dtype: torch.dtype, kept: torch.dtype, is_training: bool) -> list[torch.Tensor]:
    found = []
    for change in (
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[..., ::2],
    ):
        x = change(torch.rand(4, 3, 2, 6, dtype=torch.float64).to(dtype)).requires_grad_()
        mean, variance = torch.zeros(3, dtype=kept), torch.ones(3, dtype=kept)
        y = nn.functional.batch_norm(x, mean, variance, training=is_training)
        weight = torch.rand(x.size(-1), dtype=kept)
        z = nn.functional.layer_norm(x, weight.size(), weight, weight)
        of_channels = torch.rand(3, dtype=kept)
        y = y + nn.functional.group_norm(x, 3, of_channels, of_channels)
        (y + z).double().square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), z.detach(), x.grad]
    return found


def of_transforms() -> list[torch.Tensor]:
    x = torch.rand(4, 5, 6)
    y = torch.fft.rfftn(x)
    return [y, torch.fft.ifftn(y, dim=(0, 2)), torch.fft.irfft2(y), torch.fft.fft(x.mT, dim=0)]


def of_decompositions() -> list[torch.Tensor]:
    x = torch.rand(5, 3, 3)
    singular = torch.linalg.svd(x)
    return [torch.linalg.eig(x)[1], singular[0], singular[2], torch.linalg.qr(x)[0]]


def of_bags() -> list[torch.Tensor]:
    table = torch.rand(6, 3, requires_grad=True)
    at, starts = torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])
    bags = nn.functional.embedding_bag(at, table, starts, mode="max")
    bags.sum().backward()
    assert table.grad is not None
    return [bags.detach(), table.grad]


def of_what_is_filled() -> list[torch.Tensor]:
    """What is given to be filled keeps its strides: a shape function changed those of `sort`."""
    pairs = torch.zeros(4, 2)
    torch.sort(
        torch.rand(4), out=(pairs[:, 0], places := torch.zeros(4, 2, dtype=torch.int64)[:, 1])
    )
    return [pairs, places]


#: Older torch's shape functions do not ask for the device in all of these.
NEWER = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="lays out as CUDA"
)


def of_images(change: Any, count: int) -> list[torch.Tensor]:
    """Convolutions and norms of what lies otherwise than in rows, and what is between them."""
    torch.manual_seed(4)
    x = change(torch.rand(count, 8, 8, 8)).requires_grad_()
    layers = (
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.ConvTranspose2d(8, 8, 2),
        nn.Conv2d(8, 8, 2, dtype=torch.float64),
    )
    seen = [x]
    for layer in layers:
        y = layer(seen[-1].to(layer.weight.dtype))
        seen += [y, y / 1.5, nn.functional.silu(y) + y]
    rows = seen[3].permute(0, 2, 3, 1)
    seen += [
        z := nn.functional.layer_norm(rows, (8,)),
        rows.mT * z.mT,
        z.permute(0, 3, 1, 2) + seen[3],
    ]
    sum(y.double().square().mean() for y in seen).backward()
    gradients = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    return [*(y.detach() for y in seen[1:]), *gradients]


CHANGES: dict[str, Any] = {
    "in rows": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(0, 3, 1, 2),
    "reshaped": lambda x: x.flatten(2).mT.transpose(-1, -2).reshape(x.size()) + 0,
    "of one row": lambda x: x[..., :3, :][..., :5],
}

PROGRAMS: dict[str, Any] = {
    **{
        f"norms of {dtype} by {kept}, {is_training}": (
            lambda dtype=dtype, kept=kept, is_training=is_training: of_norms(
                dtype, kept, is_training
            )
        )
        for dtype, kept in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        )
        for is_training in (True, False)
    },
    **{
        f"{count} images {name}": lambda change=change, count=count: of_images(change, count)
        for name, change in CHANGES.items()
        for count in (1, 2)
    },
    "transforms": pytest.param(of_transforms, marks=NEWER),
    "decompositions": pytest.param(of_decompositions, marks=NEWER),
    "bags": of_bags,
    "out=": of_what_is_filled,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_kernels_make_what_was_promised(program):
    plain, ours = asked_on_both(program)
    assert [one.stride() for one in ours] == [one.stride() for one in plain]
    for one in ours:
        one.fulfil()
    assert differences(plain, ours) == []


def test_what_a_shape_function_asserts_is_the_error_of_a_kernel():
    with torchTensorRef.disabled(), pytest.raises(RuntimeError, match="at least 2 dimensions"):
        torch.linalg.inv(torch.ones(()))
    with torchTensorRef.promising(), pytest.raises(RuntimeError, match="at least 2 dimensions"):
        torch.linalg.inv(torch.ones(()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_factories_take_sparse_tensors_as_examples():
    """They asked themselves what it is on the meta device, until the recursion was too deep."""
    sparse = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    for example in sparse:
        assert torch.zeros_like(example, device="meta").device.type == "meta"
        with torchTensorRef.promising():
            made = torch.zeros_like(example)
        assert (made.layout, made.shape) == (example.layout, example.shape)
