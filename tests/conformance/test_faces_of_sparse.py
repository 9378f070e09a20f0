"""Sparse tensors, whose indices and values are blocks: all that a program sees of them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchTensorRef
from torchTensorRef import tensorsManager
from torchTensorRef.memory.sparse import SparseRef

from ..support.faces import QUIET, failure
from ..support.programs import Bring

pytestmark = QUIET

LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]


def sparse(layout: str, dense: Any) -> Any:
    """The sparse tensor of a layout that has the elements of a dense one."""
    size = ((2, 1),) if layout.startswith("bs") else ()
    name = "to_sparse" if layout == "coo" else f"to_sparse_{layout}"
    return getattr(dense, name)(*size)


def some(rows: int, columns: int) -> torch.Tensor:
    """A matrix about half of which is zero."""
    return torch.rand(rows, columns) * (torch.rand(rows, columns) > 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_it_is_made_of(right, layout):
    def program(bring: Bring) -> Any:
        s = sparse(layout, bring(some(6, 4)))
        names = {
            "coo": ("indices", "values", "_indices", "_values"),
            "csr": ("crow_indices", "col_indices", "values"),
            "bsr": ("crow_indices", "col_indices", "values"),
            "csc": ("ccol_indices", "row_indices", "values"),
            "bsc": ("ccol_indices", "row_indices", "values"),
        }[layout]
        parts = [getattr(s, name)() * 1 for name in names]
        others = [failure(getattr(s, name)) for name in ("indices", "crow_indices", "row_indices")]
        facts = [s.layout, s.is_sparse, s.is_sparse_csr, s.size(), s.dtype, s.device, s.dim()]
        return [*parts, *others, *facts, s._nnz(), s.sparse_dim(), s.dense_dim(), s.requires_grad]

    right(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_no_arrays(right, layout):
    def program(bring: Bring) -> Any:
        s = sparse(layout, bring(some(6, 4)))
        return [*map(failure, (s.numpy, lambda: s.numpy(force=True), lambda: np.asarray(s)))]

    right(program)


# What torch 2.15 says when it loads one.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(right, layout):
    def program(bring: Bring) -> Any:
        s = sparse(layout, bring(some(6, 4)))
        file = io.BytesIO()
        torch.save({"s": s, "again": s}, file)
        file.seek(0)
        loaded = torch.load(file)
        made = [
            s.clone(),
            s.detach(),
            s.data,
            bring(pickle.loads(pickle.dumps(s))),
            bring(loaded["s"]),
            s.to(torch.float64),
            s.half(),
            torch.zeros_like(s),
        ]
        if layout == "coo":
            made.append(copy.deepcopy(s))  # torch copies no other
        shares = [loaded["s"] is loaded["again"]]
        return [part.to_dense() for part in made] + shares + [repr(s), str(s.requires_grad_())]

    right(program)


def test_parts_are_shared(right):
    """What is made of tensors has their memory, and what it hands out is its memory."""

    def program(bring: Bring) -> Any:
        i, v = bring(torch.tensor([[0, 1, 1], [1, 0, 2]])), bring(torch.rand(3))
        s = torch.sparse_coo_tensor(i, v, (2, 3), is_coalesced=True)
        s.values().mul_(3)
        first = [s.to_dense(), v * 1]
        v.add_(1)
        seen = s.to_dense()
        s.mul_(2)
        s.neg_()
        whole = [s.to_dense(), v * 1, s._version > 0]
        t = s.detach()
        t.zero_()
        return [*first, seen, *whole, t.to_dense(), t._nnz(), s.to_dense()]

    right(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposed(right, layout):
    """Blocks are turned as well, in memory that is shared; what is not turned is a copy."""

    def program(bring: Bring) -> Any:
        s = sparse(layout, bring(torch.rand(6, 4)))
        made = [s.t(), s.transpose(0, 1), s.mT, s.mT.mT, s.transpose(1, 1)]
        facts: list[Any] = [(t.layout, t.size(), t._nnz()) for t in made]
        if layout != "coo":
            facts += [t.values().stride() for t in made]
            facts.append(sparse(layout, bring(torch.rand(2, 6, 4) + 1)).mT.to_dense())
            s.mT.values().mul_(2)
        return [*facts, *(t.to_dense() for t in made), s.to_dense()]

    right(program)


def test_a_weight_of_blocks(right):
    def program(bring: Bring) -> Any:
        weight, x = bring(some(6, 4)).to_sparse_bsr((2, 2)), bring(torch.rand(3, 4))
        return [nn.functional.linear(x, weight), weight.t().to_dense()]

    right(program)


def test_written_in_place(right):
    def program(bring: Bring) -> Any:
        s, t = bring(some(5, 4)).to_sparse(), bring(some(5, 4)).to_sparse()
        s += t
        results = [s.to_dense(), s._nnz(), s.is_coalesced()]
        s.mul_(t)
        s.div_(2)
        results += [s.to_dense(), s._nnz()]
        u = torch.sparse_coo_tensor(bring(torch.tensor([[0, 0], [1, 1]])), bring(torch.rand(2)))
        results += [u.is_coalesced(), u._nnz()]
        u.copy_(bring(some(1, 2)).to_sparse())
        u._coalesced_(True)
        u.sparse_resize_((3, 4), 2, 0)
        results += [u.to_dense(), u.size(), u.is_coalesced()]
        u.data = s
        dense = bring(torch.rand(5, 4))
        dense.add_(s, alpha=0.5)
        c = bring(some(5, 4)).to_sparse_csr()
        c.mul_(3)
        return [*results, u.to_dense(), dense, c.to_dense()]

    right(program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.uint8])
def test_a_size_that_indices_of_any_dtype_say(right, dtype):
    """ptwt has them of its values' dtype; torch takes them for whole numbers."""

    def program(bring: Bring) -> Any:
        indices, values = torch.tensor([[0, 5], [127, 3]]).to(dtype), bring(torch.ones(2, 3))
        s = torch.sparse_coo_tensor(bring(indices), values)
        return [s.size(), s.to_dense()]

    right(program)


def test_resized_in_place(right):
    """An optimizer for sparse gradients begins with `grad.new().resize_as_(grad)`."""

    def program(bring: Bring) -> Any:
        a, dense = sparse("coo", bring(some(5, 7))), bring(some(3, 4))
        grown = dense.clone().resize_as_(a)
        return [
            (a.new().resize_as_(a) + a).to_dense(),
            a.clone().resize_as_(a).to_dense(),
            (torch.resize_as_sparse_(a.new(), a) + a).to_dense(),
            grown.size(),
            grown.flatten()[:12],
            *(
                failure(lambda name=name: getattr(a.clone(), name)(dense.clone()))[0]
                for name in ("resize_as_", "set_")
            ),
        ]

    right(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_resized_in_place_is_for_all_that_are_made_of_it(right, layout):
    """Torch empties and grows indices and values themselves, but for those of COO tensors."""

    def parts(s: Any) -> list[Any]:
        names = ["_indices"] if layout == "coo" else ["crow_indices", "col_indices"]
        if layout in ("csc", "bsc"):
            names = ["ccol_indices", "row_indices"]
        names.append("_values" if layout == "coo" else "values")
        return [getattr(s, name)() * 1 for name in names]

    def program(bring: Bring) -> Any:
        dense, results = bring(torch.rand(6, 4)), []
        for share in (lambda s: s.detach(), lambda s: s.data, lambda s: nn.Parameter(s).detach()):
            for write in (
                lambda s, t: t.zero_(),
                lambda s, t: (s.mul_(2), t.mul_(3), s.zero_()),
                lambda s, t: (t.zero_(), failure(lambda: t.copy_(s)), s.mul_(2)),
                lambda s, t: t.sparse_resize_((8, 4), 2, 0) if layout == "coo" else t.resize_(8, 4),
                lambda s, t: t.copy_(s * 2),
            ):
                s = sparse(layout, dense)
                t = share(s)
                write(s, t)
                results += [*parts(s), *parts(t), s.size(), t.size(), s._nnz()]
        return results

    right(program)


def test_what_grows_at_home_is_not_fetched_meanwhile(manage):
    dense = torch.arange(1.0, 37).view(6, 6)
    some, more = (dense * (dense % 3 == 0)).to_sparse_csr(), dense.to_sparse_csr()
    expected = torch.add(some, more, out=some.clone())
    manager = manage(strategy="lru")
    manager.budget = 1024
    mine, all_of_it = manager.adopt(some), manager.adopt(more)
    out = mine.clone()
    torch.add(mine, all_of_it, out=out)
    assert torch.equal(manager.release(out).to_dense(), expected.to_dense())
    manager.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_operators(right, dtype):
    def program(bring: Bring) -> Any:
        a, b = bring(some(6, 5).to(dtype)).to_sparse(), bring(some(5, 6).to(dtype)).to_sparse()
        d, v = bring(torch.rand(5, 4, dtype=dtype)), bring(torch.rand(5, dtype=dtype))
        c = a.to_sparse_csr()
        base = bring(torch.rand(6, 4, dtype=dtype))
        made = [
            a @ b,
            torch.sparse.mm(a, b),
            a @ d,
            a @ v,
            a.t() @ base,
            c @ d,
            c @ b.to_sparse_csr(),
            c @ v,
            torch.sparse.addmm(base, a, d, beta=0.5, alpha=2),
            torch.addmm(base, c, d),
            a * 2,
            a / 3,
            -a,
            a * a,
            a + a.t().t(),
            a.sum(),
            torch.sparse.sum(a, 0),
            a.coalesce().sqrt(),
            torch.cat([a, a]),
            torch.stack([a, a]),
            a[1],
            a.index_select(0, bring(torch.tensor([2, 0]))),
            a.narrow_copy(0, 1, 2),
            a.transpose(0, 1),
            a.unsqueeze(0),
            base.sum() * a,
            torch.hspmm(a, d),
        ]
        return [one.to_dense() if one.layout is not torch.strided else one for one in made]

    right(program)


def test_sampled_products(right):
    def program(bring: Bring) -> Any:
        mask = bring(some(6, 5)).to_sparse_csr()
        a, b = bring(torch.rand(6, 3)), bring(torch.rand(3, 5))
        return [
            torch.sparse.sampled_addmm(mask, a, b, beta=0.5, alpha=2).to_dense(),
            torch.sparse.spdiags(
                bring(torch.rand(2, 4)), bring(torch.tensor([0, 1])), (4, 4)
            ).to_dense(),
            (a @ b).sparse_mask(mask.to_sparse()).to_dense(),
        ]

    right(program)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_gradients(right, layout):
    def program(bring: Bring) -> Any:
        a = sparse(layout, bring(some(5, 4))).requires_grad_()
        d = bring(torch.rand(4, 3)).requires_grad_()
        weights = bring(torch.rand(5, 3))
        (torch.sparse.mm(a, d) * weights).sum().backward()
        first = [a.grad.to_dense(), d.grad * 1, a.grad.layout]
        (torch.sparse.mm(a, d) ** 2).sum().backward()
        values = bring(torch.rand(3)).requires_grad_()
        i = bring(torch.tensor([[0, 1, 1], [1, 0, 2]]))
        s = torch.sparse_coo_tensor(i, values, (2, 4))
        (s @ d.detach()).sum().backward()
        dense = bring(some(3, 3)).requires_grad_()
        dense.to_sparse().to_dense().mul(2).sum().backward()
        return [*first, a.grad.to_dense(), d.grad, values.grad, dense.grad]

    right(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.5),
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["SGD", "momentum", "SparseAdam", "Adagrad"],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_optimizers(right, make, kind):
    def program(bring: Bring) -> Any:
        table = bring(kind(50, 8, sparse=True))
        optimizer = make(table.parameters())
        found = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for part in range(2):
                rows = bring(torch.tensor([[1, step, 4, 4], [7 + part, 1, 1, 30]]))
                (table(rows) ** 2).sum().backward()
            found += [
                table.weight.grad.layout,
                table.weight.grad.to_dense(),
                table.weight.grad._nnz(),
            ]
            optimizer.step()
        return [*found, table.weight]

    right(program)


@pytest.fixture
def alone():
    """A group of one process."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_between_processes(right, alone, layout):
    """What is made of it is there when the exchange is over; what cannot be exchanged raises."""

    def program(bring: Bring) -> Any:
        s = sparse(layout, bring(some(6, 4)))
        refused = [failure(lambda: dist.all_reduce_coalesced([s]))[0]]
        if layout != "coo":
            return [*refused, failure(lambda: dist.all_reduce(s))[0], s.to_dense()]
        rows, columns = bring(torch.tensor([[0, 0, 1], [1, 1, 2]]))
        twice = torch.sparse_coo_tensor(torch.stack([rows, columns]), bring(torch.rand(3)), (6, 4))
        dist.all_reduce(twice)
        values = s.values()
        dist.all_reduce(s, async_op=True).wait()
        values.zero_()  # the memory of before
        facts = [twice.is_coalesced(), twice._nnz(), twice._version, s._version]
        return [*refused, *facts, twice.to_dense(), s.to_dense(), (s * 2).to_dense()]

    right(program)


def test_tables_are_trained_in_parallel(right, alone):
    def program(bring: Bring) -> Any:
        torch.manual_seed(0)
        model = bring(nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)))
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(bring(torch.tensor([1, 3, 3]))).sum().backward()
        return [model[0].weight.grad.layout, model[0].weight.grad.to_dense()]

    right(program)


def test_clipped_sparse_gradients_fail_alike(right):
    def program(bring: Bring) -> Any:
        table = bring(nn.Embedding(6, 3, sparse=True))
        table(bring(torch.tensor([1, 1, 4]))).sum().backward()
        return [failure(lambda: torch.optim.Adam(table.parameters()).step())[0]]

    right(program)


def test_they_are_accounted(manage):
    """Indices and values are blocks, which stay on the accelerator between operators."""
    manager = manage()
    s = manager.adopt(some(64, 64)).to_sparse_csr()
    x = manager.adopt(torch.rand(64, 3))
    assert type(s) is SparseRef
    s @ x
    copied = manager.stats()["fetched_nbytes"]
    for _ in range(3):
        x = s @ x
    assert manager.stats()["fetched_nbytes"] == copied
    parts = [s.crow_indices(), s.col_indices(), s.values()]
    assert all(part.proxyInfo.device.startswith("sim") for part in parts)
    manager.check()


def test_promises_need_values(manage):
    """What is made of sparse tensors and values is computed; a promise has none to multiply."""
    manager = manage()
    s, x = manager.adopt(some(4, 4)).to_sparse(), manager.adopt(torch.rand(4, 2))
    with torchTensorRef.promising():
        assert not (s @ x).proxyInfo.promised
        promised = x + 1
        with pytest.raises(torchTensorRef.PromisedError, match="mm"):
            s @ promised
    with torchTensorRef.promising(values="compute"):
        found = s @ promised
    assert torch.equal(manager.release(found), manager.release(s @ (x + 1)))


def test_adopted_and_released():
    plain = some(4, 4).to_sparse()
    ref = tensorsManager.adopt(plain)
    assert type(ref) is SparseRef
    assert ref.values().proxyInfo.nbytes == plain.values().nbytes
    ref.values().mul_(2)
    assert type(tensorsManager.release(ref)) is torch.Tensor
    assert torch.equal(plain.to_dense(), tensorsManager.release(ref).to_dense())
    assert tensorsManager.release([ref])[0].layout is torch.sparse_coo
