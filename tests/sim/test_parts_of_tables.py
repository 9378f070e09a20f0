"""Operators that read a few rows, elements or views of a table larger than the budget."""

import pytest
import torch
from torch.nn import functional as F

from torchTensorRef.base.options import options

from ..support.differential import differences

SIZE = (1000, 8, 25)
BUDGET = 40_000


def rows(*sizes, low=0):
    return torch.randint(low, 8, sizes)


#: What is run, and the indices beside the table.
CASES = {
    "embedding": (lambda t, i: F.embedding(i, t.view(1000, 200)), [rows(2, 3)]),
    "embedding of ints": (lambda t, i: F.embedding(i, t.view(1000, 200)), [rows(5).int()]),
    "embedding of a transposed": (lambda t, i: F.embedding(i, t.view(1000, 200).t()), [rows(2)]),
    "embedding of nothing": (lambda t, i: F.embedding(i, t.view(1000, 200)), [rows(0)]),
    "index_select": (lambda t, i: t.index_select(0, i), [rows(7)]),
    "index_select inside": (lambda t, i: t[3:50].index_select(-1, i), [rows(2)]),
    "index_select of a view": (lambda t, i: t[:, 2].index_select(0, i), [rows(7)]),
    "gather": (lambda t, i: t.gather(1, i), [rows(9, 3, 4)]),
    "gather of the first": (lambda t, i: t.gather(0, i), [rows(9, 3, 4)]),
    "take": (lambda t, i: t.take(i), [rows(3, 5, low=-3)]),
    "rows": (lambda t, i: t[i], [rows(3, 2, low=-5)]),
    "a column of indices": (lambda t, i: t[:90, i], [rows(1)]),
    "pairs": (lambda t, i, j: t[i, j], [rows(3, 2), rows(2)]),
    "neighbours inside": (lambda t, i, j: t[:90, i, j], [rows(3, 1), rows(2)]),
    "apart": (lambda t, i, j: t[i, :, j], [rows(3, 1), rows(2)]),
    "all": (lambda t, i, j: t[i, j, i], [rows(3, 1), rows(2)]),
    "rows of a view": (lambda t, i: t[:9, :, ::3][i], [rows(3)]),
    "one of each": (lambda t, i, j: t[i, j], [torch.tensor([5]), torch.tensor(3)]),
    "a mask": (lambda t, m: t[m], [torch.arange(1000) % 99 == 0]),
    "a mask of two": (lambda t, m: t[m], [(torch.arange(8000) % 999 == 0).view(1000, 8)]),
    "a mask beside indices": (
        lambda t, m, i: t[m, i], [torch.arange(1000) % 399 == 0, rows(1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_moves_alone(manage, name, dtype):
    function, others = CASES[name]
    table = torch.randn(SIZE).to(dtype)
    expected = function(table, *others)
    manager = manage(nbytes=BUDGET)
    ours = [manager.adopt(one.clone()) for one in (table, *others)]
    found = function(*ours)
    assert not differences(expected, found)
    assert found.stride() == expected.stride()
    stats = manager.stats()
    assert stats["parts_op_count"] == 1
    assert stats["host_op_count"] == stats["host_fallback_count"] == 0
    assert stats["peak_resident_nbytes"] <= BUDGET
    moved = sum(one.nbytes for one in (expected, *others))
    assert stats["fetched_nbytes"] <= 8 * moved + 8_000


def test_gradients_of_rows_are_those_of_plain_torch(manage):
    weight, index = torch.randn(1000, 25), torch.tensor([[1, 2], [2, 999]])
    plain = weight.clone().requires_grad_()
    F.embedding(index, plain).square().sum().backward()
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(weight.clone()).requires_grad_()
    F.embedding(manager.adopt(index), ours).square().sum().backward()
    assert not differences(plain.grad, ours.grad)


@pytest.mark.parametrize("rows", [1, 60])
def test_a_plain_sparse_matrix_is_no_table_of_ours(manage, rows):
    matrix, index = torch.randn(80, 80).to_sparse(), torch.arange(rows)
    manager = manage(nbytes=BUDGET)
    found = matrix.index_select(0, manager.adopt(index))
    assert not differences(matrix.index_select(0, index).to_dense(), found.to_dense())


@pytest.mark.parametrize("index", [[3, 1000], [-1, 2]])
def test_a_place_that_is_not_there_is_the_program_s_mistake(manage, index):
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(torch.randn(1000, 25))
    with pytest.raises(IndexError, match="index out of range"):
        F.embedding(manager.adopt(torch.tensor(index)), ours)


@pytest.mark.parametrize(
    ("places", "size"),
    [((), (50,)), ((), (1001,)), ((), (1000, 7)), ((), (1, 8)), ((slice(None),), (7,))],
)
def test_a_mask_of_another_size_is_the_program_s_mistake(manage, places, size):
    table, mask = torch.randn(SIZE), torch.zeros(size, dtype=torch.bool)
    mask[0] = True
    with pytest.raises(IndexError) as expected:
        table[(*places, mask)]
    manager = manage(nbytes=BUDGET)
    ours, ours_too = manager.adopt(table), manager.adopt(mask)
    with pytest.raises(IndexError) as found:
        ours[(*places, ours_too)]
    assert str(found.value) == str(expected.value)


def test_as_many_rows_as_the_table_has_are_read_at_home(manage):
    table, index = torch.randn(1000, 25), torch.randint(1000, (1000,))
    manager = manage(nbytes=BUDGET)
    found = manager.adopt(table.clone()).index_select(0, manager.adopt(index.clone()))
    assert not differences(table.index_select(0, index), found)
    assert manager.stats()["parts_op_count"] == 0
    assert manager.stats()["host_op_count"] == 1


def test_rows_whose_layout_is_that_of_the_table_are_read_at_home(manage):
    table, index = torch.randn(90, 8, 25), torch.tensor([3, 4])
    expected = table.transpose(0, 2)[index]
    manager = manage(nbytes=BUDGET)
    found = manager.adopt(table.clone()).transpose(0, 2)[manager.adopt(index)]
    assert not differences(expected, found)
    assert found.stride() == expected.stride()
    assert manager.stats()["host_op_count"] == 1


@pytest.mark.parametrize(
    "function",
    [lambda t, i: t[:, i][..., None, :], lambda t, i: t.t()[None, i], lambda t, i: t.t()[i, None]],
)
def test_dimensions_of_one_element_have_the_strides_of_plain_torch(manage, function):
    table, index = torch.randn(400, 300), torch.tensor([5])
    expected = function(table, index)
    manager = manage(nbytes=BUDGET)
    found = function(manager.adopt(table.clone()), manager.adopt(index))
    assert not differences(expected, found)
    assert found.stride() == expected.stride()


def test_rows_are_read_at_home_where_blocks_are_off(manage):
    manager = manage(nbytes=BUDGET)
    with options(blocks="off"):
        manager.adopt(torch.randn(1000, 25))[manager.adopt(torch.tensor([4]))]
    assert manager.stats()["host_op_count"] == 1


@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("kind", ["copy", "alloc"])
def test_a_copy_or_an_allocation_fails(manage, kind, number):
    manager = manage(nbytes=BUDGET)
    device = manager.residency.books.main
    table, index = torch.randn(1000, 25), torch.tensor([5, 2])
    ours = [manager.adopt(one.clone()) for one in (table, index)]
    for more in range(3):
        device.fail_next(kind, number + more)
    assert not differences(table[index], ours[0][ours[1]])


@pytest.mark.parametrize(
    "function",
    [lambda t: t[5] * 2, lambda t: t[5].exp(), lambda t: t[7].sum(0), lambda t: t[3].softmax(0),
     lambda t: t[5:8, 3] + 1, lambda t: t[0] @ t[2].t()],
)  # fmt: skip
def test_a_short_view_moves_alone(manage, function):
    """Of a product one that begins at a multiple of 64 bytes; others run on the host."""
    table = torch.randn(SIZE)
    expected = function(table)
    manager = manage(nbytes=BUDGET)
    found = function(manager.adopt(table.clone()))
    assert not differences(expected, found)
    stats = manager.stats()
    assert stats["host_op_count"] == stats["host_fallback_count"] == 0
    assert stats["fetched_nbytes"] < 8_000


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.nn.functional.gelu])
def test_a_view_with_gaps_keeps_its_bits(manage, function):
    """Packed it would be computed by vectors, and not one by one."""
    table = torch.randn(SIZE)
    manager = manage(nbytes=BUDGET)
    assert not differences(function(table[:, 3, 7]), function(manager.adopt(table)[:, 3, 7]))


def test_a_short_view_beside_what_is_small(manage):
    """One of both is fetched alone, and keeps its dimensions."""
    table, other = torch.randn(SIZE), torch.randn(1, 8, 25)
    manager = manage(nbytes=BUDGET)
    ours, ours_too = manager.adopt(table.clone()), manager.adopt(other.clone())
    assert not differences(table[5:6] * other, ours[5:6] * ours_too)
    ours_too.mul_(ours[5:6])
    assert not differences(other.mul_(table[5:6]), ours_too)


def test_a_short_view_is_written_alone(manage):
    table = torch.randn(SIZE)
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(table.clone())
    ours[5].mul_(2)
    table[5].mul_(2)
    assert not differences(table, ours)
    assert manager.stats()["host_fallback_count"] == 0
