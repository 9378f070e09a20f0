"""Products of sparse matrices that do not fit, in rows: the bits of plain torch, within budget."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchTensorRef.base.options import options
from torchTensorRef.operators.blocked.sparse import joined
from torchTensorRef.operators.layouts import parts_of

from ..support.faces import QUIET
from ..support.forced_blocks import forced_blocks
from ..support.sweeps import in_turn, one_in

pytestmark = QUIET

ROWS, INNER, COLUMNS = 600, 400, 96


def some(rows: int, columns: int, density: float = 0.03, dtype: Any = torch.float32) -> Any:
    """A sparse matrix, coalesced."""
    dense = torch.randn(rows, columns, dtype=dtype)
    return (dense * (torch.rand(rows, columns) < density)).to_sparse()


def uncoalesced(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with the same places, in no order, some of them twice."""
    chosen = torch.randint(matrix._nnz(), (matrix._nnz() + 100,))
    indices, values = matrix._indices()[:, chosen], torch.randn(len(chosen), dtype=matrix.dtype)
    return torch.sparse_coo_tensor(indices, values, matrix.size())


def operands(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the products below are made of."""
    coo = some(ROWS, INNER, dtype=dtype)
    csr = coo.to_sparse_csr()
    narrow = torch.sparse_csr_tensor(
        csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.size()
    )
    return {
        "coo": coo,
        "unordered": uncoalesced(coo),
        "csr": csr,
        "narrow": narrow,
        "dense": torch.randn(INNER, COLUMNS, dtype=dtype),
        "turned": torch.randn(COLUMNS, INNER, dtype=dtype),
        "added": torch.randn(ROWS, COLUMNS, dtype=dtype),
        "bias": torch.randn(COLUMNS, dtype=dtype),
        "vector": torch.randn(INNER, dtype=dtype),
        "other": some(INNER, COLUMNS, dtype=dtype),
    }


Product = Callable[[Any], torch.Tensor]

PRODUCTS: dict[str, Product] = {
    "coo dense": lambda x: x.coo @ x.dense,
    "coo strided": lambda x: x.coo @ x.turned.t(),
    "unordered dense": lambda x: x.unordered @ x.dense,
    "csr dense": lambda x: x.csr @ x.dense,
    "narrow dense": lambda x: x.narrow @ x.dense,
    "csr strided": lambda x: x.csr @ x.turned.t(),
    "sparse.mm": lambda x: torch.sparse.mm(x.coo, x.dense),
    "sparse.mm csr": lambda x: torch.sparse.mm(x.csr, x.dense),
    "sparse.addmm": lambda x: torch.sparse.addmm(x.added, x.coo, x.dense, beta=0.5, alpha=1.7),
    "addmm": lambda x: torch.addmm(x.added, x.csr, x.dense, beta=0.5, alpha=1.7),
    "addmm of a row": lambda x: torch.addmm(x.bias, x.csr, x.dense),
    "vector": lambda x: x.coo @ x.vector,
    "coo coo.T": lambda x: x.coo @ x.coo.t(),
    "coo coo": lambda x: x.coo @ x.other,
    "unordered coo": lambda x: x.unordered @ x.other,
    "sparse.mm coo": lambda x: torch.sparse.mm(x.coo, x.other),
    "csr csr": lambda x: x.csr @ x.other.to_sparse_csr(),
    "csr csc": lambda x: x.csr @ x.other.to_sparse_csc(),
    "coo.T dense": lambda x: x.coo.t() @ x.added,
    "sampled": lambda x: torch.sparse.sampled_addmm(x.csr, x.added, x.turned, beta=0.5, alpha=1.7),
}


class Operands:
    """The operands as attributes, plain or managed."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(named)


def both(manager: Any, product: Product, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """The product of plain tensors, and of managed ones."""
    named = operands(dtype)
    expected = product(Operands(named))
    # Each only once: they share no memory with what plain torch has.
    ours = product(Operands({name: manager.adopt(x.clone()) for name, x in named.items()}))
    return expected, manager.release(ours)


@pytest.mark.parametrize("is_managed", [True, False])
@pytest.mark.parametrize("name", ["csr", "coo"])
def test_a_single_number_is_added_as_in_plain_torch(manage, name, is_managed):
    named, bias = operands(torch.float32), torch.tensor(1.5)
    left, right = named[name], named["dense"]
    manager = manage(nbytes=60_000)
    mine = manager.adopt(left.clone()), manager.adopt(right.clone())
    added = manager.adopt(bias.clone()) if is_managed else bias
    for addmm in (torch.addmm, torch.sparse.addmm):
        try:
            expected = addmm(bias, left, right)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                addmm(added, *mine)
        else:
            assert_alike(expected, manager.release(addmm(added, *mine)))


def assert_alike(expected: torch.Tensor, got: torch.Tensor, is_marked: bool = True) -> None:
    """Equal in every part, to the bit, and marked as coalesced alike."""
    assert got.layout is expected.layout
    assert got.size() == expected.size()
    for mine, its in zip(parts_of(got), parts_of(expected), strict=True):
        assert torch.equal(mine, its)
        assert mine.dtype is its.dtype
    if expected.layout is torch.sparse_coo and is_marked:
        assert got.is_coalesced() == expected.is_coalesced()


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(PRODUCTS, [torch.float32, torch.float64], each=1)
)
def test_rows_keep_every_bit(manage, name, dtype):
    kib = {"vector": 60, "sampled": 250}.get(name, 120)
    manager = manage("flow", nbytes=(kib << 10) * dtype.itemsize // 4)
    assert_alike(*both(manager, PRODUCTS[name], dtype))
    stats = manager.stats()
    assert stats["blocked_op_count"] == 1
    assert stats["blocked_tile_count"] > 1
    assert stats["reordered_op_count"] == 0
    assert stats["peak_resident_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    in_turn(
        ["coo dense", "csr dense", "coo coo.T", "sparse.addmm"], ["lru", "flow", "genoa"], each=1
    ),
)
def test_what_stands_on_the_right_is_cut_in_columns(manage, name, strategy):
    manager = manage(strategy, nbytes=60 << 10)
    assert_alike(*both(manager, PRODUCTS[name]))
    assert manager.stats()["blocked_op_count"] == 1
    assert manager.stats()["peak_resident_nbytes"] <= 60 << 10


def test_columns_of_rows_in_no_order(manage):
    """MKL has the columns of a row in no order: cut in columns they come in another one."""
    named = {"a": some(ROWS, INNER).to_sparse_csr(), "b": some(INNER, 300, 0.2).to_sparse_csr()}
    expected = (named["a"] @ named["b"]).to_dense()
    manager = manage(nbytes=100 << 10)
    a, b = (manager.adopt(x) for x in named.values())
    assert torch.equal(manager.release(a @ b).to_dense(), expected)
    assert manager.stats()["blocked_op_count"] == 0
    with options(blocks="any"):
        assert torch.equal(manager.release(a @ b).to_dense(), expected)
    assert manager.stats()["blocked_op_count"] == 1


@pytest.mark.parametrize("name", ["coo", "csr"])
def test_what_has_no_product_is_not_cut(manage, name):
    """Elements that are blocks or rows: torch's own error."""
    named = operands(torch.float32)
    left, other = named[name], named["other"].to_dense()
    manager = manage(nbytes=60_000)
    for right in (other.to_sparse_bsr((4, 4)), other.to_sparse_bsc((4, 4)), other.to_sparse(1)):
        ours = manager.adopt(left.clone()), manager.adopt(right.clone())
        with pytest.raises(RuntimeError) as expected:
            left @ right
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            ours[0] @ ours[1]


def test_without_rows(manage):
    with forced_blocks(0, keep_bits=True):
        manager = manage()
        a, b = some(0, 4).to_sparse_csr(), torch.randn(4, 3)
        assert_alike(a @ b, manager.release(manager.adopt(a) @ manager.adopt(b)))


def test_what_is_not_cut_runs_on_the_host(manage):
    manager = manage(nbytes=20 << 10)
    vector_of_rows = lambda x: x.csr @ x.vector  # noqa: E731
    assert_alike(*both(manager, vector_of_rows))
    assert_alike(*both(manager, lambda x: x.coo.to_sparse_csr()))
    assert_alike(*both(manager, PRODUCTS["coo coo.T"]))
    with options(blocks="off"):
        assert_alike(*both(manager, PRODUCTS["coo dense"]))
    assert manager.stats()["blocked_op_count"] <= 1


@pytest.mark.parametrize("seed", one_in(4, range(12)))
def test_random_sizes_and_budgets(manage, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    rows, inner, columns = (generator.choice([1, 2, 33, 150, 400]) for _ in range(3))
    a, b = (
        some(*sizes, generator.choice([0.0, 0.02, 0.3]))
        for sizes in ((rows, inner), (inner, columns))
    )
    dense = torch.randn(inner, columns)
    manager = manage("flow", nbytes=generator.choice([2, 8, 32]) << 10)
    ours = [manager.adopt(x.clone()) for x in (a, b, dense)]
    assert_alike(a @ b, manager.release(ours[0] @ ours[1]))
    assert_alike(a @ dense, manager.release(ours[0] @ ours[2]))
    csr, our_csr = a.to_sparse_csr(), ours[0].to_sparse_csr()
    assert_alike(csr @ dense, manager.release(our_csr @ ours[2]))
    manager.check()


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_gradients_of_what_does_not_fit(manage, layout):
    a, dense = some(ROWS, INNER), torch.randn(INNER, COLUMNS)
    weights = torch.randn(ROWS, COLUMNS)
    a = a if layout == "coo" else a.to_sparse_csr()
    manager = manage("flow", nbytes=150 << 10)

    def gradients(a: Any, dense: Any, weights: Any) -> list[Any]:
        a, dense = a.clone().requires_grad_(), dense.clone().requires_grad_()
        (torch.sparse.mm(a, dense) * weights).sum().backward()
        return [a.grad, dense.grad]

    expected = gradients(a, dense, weights)
    got = gradients(*(manager.adopt(x.clone()) for x in (a, dense, weights)))
    for mine, its in zip(got, expected, strict=True):
        # Torch takes the gradient over and forgets that it is coalesced; we copy it.
        assert_alike(its, manager.release(mine), is_marked=False)
    assert manager.stats()["blocked_op_count"] > 0


def test_against_scipy(manage):
    scipy = pytest.importorskip("scipy.sparse")
    a, dense = some(ROWS, INNER, dtype=torch.float64), torch.randn(INNER, COLUMNS).double()
    csr = a.to_sparse_csr()
    theirs = scipy.csr_matrix(
        (csr.values().numpy(), csr.col_indices().numpy(), csr.crow_indices().numpy()), csr.size()
    )
    manager = manage("flow", nbytes=200 << 10)
    ours, our_csr, our_dense = (manager.adopt(x.clone()) for x in (a, csr, dense))
    square = manager.release(ours @ ours.t()).to_dense()
    torch.testing.assert_close(square, torch.from_numpy((theirs @ theirs.T).toarray()))
    for made in (ours @ our_dense, our_csr @ our_dense):
        torch.testing.assert_close(manager.release(made), torch.from_numpy(theirs @ dense.numpy()))
    assert manager.stats()["blocked_op_count"] == 3
    assert manager.stats()["peak_resident_nbytes"] <= 200 << 10


@pytest.mark.parametrize("compress", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_tiles_are_joined_where_they_are_whatever_the_default_device_is(compress):
    dense = torch.randn(8, 12) * (torch.rand(8, 12) < 0.4)
    tiles = [(begin, compress(dense[:, begin : begin + 4])) for begin in (0, 4, 8)]
    expected = joined(tiles, dense.size())
    with torch.device("meta"):
        found = joined(tiles, dense.size())
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
