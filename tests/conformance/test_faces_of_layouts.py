"""Sparse, nested and quantized tensors; the modes that torch can be in: as with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ..support.faces import QUIET, failure
from ..support.programs import Bring

pytestmark = QUIET

# -- other layouts ------------------------------------------------------------------------------


def test_sparse_coo(right):
    def program(bring: Bring) -> Any:
        dense = bring(torch.rand(4, 4).relu() * (torch.rand(4, 4) > 0.5))
        other = bring(torch.rand(4, 3))
        s = dense.to_sparse()
        indices = bring(torch.tensor([[0, 1, 1], [2, 0, 0]]))
        made = torch.sparse_coo_tensor(indices, bring(torch.rand(3)), (4, 4))
        whole = made.coalesce()
        return [
            s.to_dense(),
            s @ other,
            torch.sparse.mm(s, other),
            torch.sparse.mm(s, whole).to_dense(),
            (s + whole).to_dense(),
            whole.values() * 2,
            whole.indices() + 1,
            (whole * 3).to_dense(),
            s.sum(),
            torch.sparse.sum(s, 0).to_dense(),
            torch.sparse.softmax(s, 1).to_dense(),
            s.transpose(0, 1).to_dense(),
            dense + s,
            dense.sparse_mask(whole).to_dense(),
            repr(whole),
        ]

    right(program)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse(right, layout):
    def program(bring: Bring) -> Any:
        dense = bring(torch.rand(4, 4) * (torch.rand(4, 4) > 0.5))
        other = bring(torch.rand(4, 3))
        size = ((2, 2),) if layout.startswith("bs") else ()
        s = getattr(dense, f"to_sparse_{layout}")(*size)
        results = [s.to_dense(), s.values() * 2, s.values().shape]
        if layout in ("csr", "csc"):
            results += [s @ other, (s @ s).to_dense(), s.to_sparse().to_dense()]
        if layout == "bsr":
            results += [s @ other, (s + s).to_dense(), s.to_sparse().to_dense()]
            csr = dense.to_sparse_csr()
            # Where plain torch has no kernel, we have none.
            results += [failure(lambda: s @ s)[0], failure(lambda: s @ csr)[0]]
        return results

    right(program)


def test_sparse_made_of_parts(right):
    def program(bring: Bring) -> Any:
        rows, columns = bring(torch.tensor([0, 1, 2])), bring(torch.tensor([1, 0]))
        s = torch.sparse_csr_tensor(rows, columns, bring(torch.rand(2)), (2, 2))
        return [s @ bring(torch.rand(2, 2)), s.crow_indices() + 1]

    right(program)


def test_sparse_gradients(right):
    def program(bring: Bring) -> Any:
        table = bring(nn.Embedding(6, 3, sparse=True))
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        table(bring(torch.tensor([1, 1, 4]))).sum().backward()
        grad = table.weight.grad.to_dense()
        optimizer.step()
        a = bring(torch.rand(3, 3)).to_sparse().requires_grad_()
        b = bring(torch.rand(3, 2, requires_grad=True))
        torch.sparse.mm(a, b).sum().backward()
        return [grad, table.weight, a.grad.to_dense(), b.grad]

    right(program)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(right, layout):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(2, 4)), bring(torch.rand(3, 4))]
        nested = torch.nested.nested_tensor(rows, layout=layout)
        linear = bring(nn.Linear(4, 4))
        through = linear(nested)
        return [
            list(nested.unbind()),
            torch.nested.to_padded_tensor(nested, 0.0),
            [part.detach() for part in through.unbind()],
            nested.is_nested,
        ]

    right(program, plain_because="nested tensors stay plain, and so does what is made of them")


def test_nested_over_the_bytes_of_another(right):
    """Jagged attention makes such tensors where it is differentiated."""

    def program(bring: Bring) -> Any:
        buffer = bring(torch.rand(12))
        sizes, strides = torch.tensor([[2, 3], [2, 3]]), torch.tensor([[3, 1], [3, 1]])
        nested = torch._nested_view_from_buffer(buffer, sizes, strides, torch.tensor([0, 6]))
        before = [part.sum() for part in nested.unbind()]
        buffer.add_(1)
        nested.mul_(2)
        return [before, list(nested.unbind()), buffer]

    right(program, plain_because="nested tensors stay plain, and so does what is made of them")


def test_nested_of_rows_with_gradients(right):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(n, 4, requires_grad=True)) for n in (2, 3)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        (nested * 2).values().sum().backward()
        return [row.grad for row in rows]

    right(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_aware_training(right):
    """A kernel gives the statistics of each channel their size: in memory that is ours."""

    def program(bring: Bring) -> Any:
        parts = torch.ao.quantization
        layers = (parts.QuantStub(), nn.Conv2d(3, 4, 3), nn.ReLU(), parts.DeQuantStub())
        model = nn.Sequential(*layers)
        model.qconfig = parts.get_default_qat_qconfig("x86")
        trained = bring(parts.prepare_qat(model.train()))
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = trained(bring(torch.rand(2, 3, 8, 8))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        converted = parts.convert(trained.eval())
        return [*losses, *trained.state_dict().values(), converted(bring(torch.rand(1, 3, 8, 8)))]

    right(program, plain_because="so is what is made of quantized tensors")


def test_quantized(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, 4))
        q = torch.quantize_per_tensor(x, 0.1, 2, torch.quint8)
        c = torch.quantize_per_channel(
            x, bring(torch.rand(3)), bring(torch.zeros(3)), 0, torch.qint8
        )
        return [
            q.dequantize(),
            q.int_repr(),
            q.q_scale(),
            c.dequantize(),
            torch.relu(q).dequantize(),
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        ]

    right(program, plain_because="quantized tensors stay plain, and so does what is made of them")


# -- modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_compile(right, backend):
    def program(bring: Bring) -> Any:
        torch._dynamo.reset()
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
        compiled = torch.compile(model, backend=backend)
        x = bring(torch.rand(4, 3))
        compiled(x).sum().backward()
        function = torch.compile(lambda a: (a.sin() * 2, a.shape[0]), backend=backend)
        return [compiled(x), [p.grad for p in model.parameters()], function(x)]

    right(program)


def test_autocast(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        x = bring(torch.rand(4, 3))
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            z = torch.bmm(x[None], x.t()[None])
            s = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        y.float().square().sum().backward()
        return [y, z, s, [p.grad for p in model.parameters()]]

    right(program)


def test_inference_mode(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()))
        x = bring(torch.rand(3, 2, 8))
        with torch.inference_mode():
            y = model(x)
            y.add_(1)
            v = y[0]
            attended = nn.functional.scaled_dot_product_attention(y, y, y)
        w = torch.ones_like(x, requires_grad=True)
        return [
            y.is_inference(),
            (w * 2).is_inference(),
            failure(lambda: (y * bring(torch.ones(1)).requires_grad_()).sum().backward())[0],
            y.clone(),
            v.clone(),
            attended.clone(),
            model.state_dict(),
        ]

    right(program)


def test_default_dtype(right):
    def program(bring: Bring) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            x = bring(torch.arange(3))
            return [x / 2, x.sqrt(), x * 0.5, bring(nn.Linear(3, 1))(x.to(torch.float64))]
        finally:
            torch.set_default_dtype(torch.float32)

    right(program)


def test_default_device(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3))
        try:
            torch.set_default_device("meta")
            shape = torch.empty(2, 3)
            result = x + 1
            model = nn.Linear(3, 2)
        finally:
            torch.set_default_device(None)
        with torch.device("cpu"):
            y = bring(torch.zeros(3)) + x
        model = bring(model.to_empty(device="cpu"))
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        return [shape.device.type, result, y, model(x)]

    right(program)
