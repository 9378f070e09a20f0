"""Cuts of products: by rows and columns of the result, and by what they are done for one by one.

Kernels choose among ways to compute by the sizes of what they are given, and those add in different
orders. Measured with torch 2.13 and MKL 2024.2 on an EPYC with AVX-512, 1 and 2 threads, 8,000
products of random sizes up to 4096, cut at random, and 3,700 of powers of two: in half precision no
cut ever changed a bit. In single precision tiles of 128 and more did not, but where the second
operand is in rows and the first has less than 8 rows: there they did in one of thirty. In double
precision tiles of 512 of products of powers of two did, where the second operand is in columns:
none is taken to keep them. On other processors it may be otherwise (on an Intel Xeon with AMX cuts
in bfloat16 change bits), so half and single precision are tried first (`probe.py`). In half
precision torch takes another kernel for few multiplications (`SMALL_PRODUCT`): of 1,407 such tiles
of larger products 38 had other bits on a Xeon, of 7,117 larger tiles none. No tile is that small.

Of several products at once (`bmm`) the bits depend on where each matrix begins: of 30,000 cut after
any of them 8 in a hundred had other bits in single and double precision, a few in the others; of
200,000 none where tiles of at least two began at multiples of 64 bytes in both operands and the
result. Tiles have memory of their own, so the operands have to lie like that before.
"""

from __future__ import annotations

from math import ceil, gcd, lcm, prod

import torch

from .cut import (
    Along,
    Axis,
    Call,
    Cut,
    Inner,
    Place,
    are_rows_at,
    begins_at,
    broadcast_along,
    is_dense,
)
from .probe import tiles_are_alike
from .sums import HALF, Products

#: Rows and columns of tiles, by the size of an element: multiples of it.
STEPS = {torch.float32: 128, torch.float64: 512, torch.complex64: 128, torch.complex128: 512}
STEP_OF_HALF = 64
#: Products in half precision of more multiplications go to oneDNN (torch's `mkldnn_gemm_min_size`).
SMALL_PRODUCT = 16**3
#: Where memory that torch has allocated begins, and so each tile: at a multiple of so many bytes.
ALIGNED_NBYTES = 64
STEP_OF_SUMS = 128
#: Rows from which on a product is cut in columns without changing a bit, in spite of the order of
#: its second operand.
SAFE_ROWS = {torch.float32: 16}


def mm(call: Call) -> Cut | None:
    """Rows of the first, columns of the second; at last what is summed over."""
    a, b = call["self"], call["mat2"]
    if a.dim() != 2 or b.dim() != 2:
        return None
    axes = _rows_and_columns(a, b)
    is_float = a.dtype in HALF or a.dtype in STEPS
    return Cut(
        axes=(*axes, Axis(a.size(1), STEP_OF_SUMS if is_float else a.size(1), keeps_bits=False)),
        operands={("self", None): (0, 2), ("mat2", None): (2, 1)},
        results=((0, 1),),
        inner=Inner(2, Products),
    )


def addmm(call: Call) -> Cut | None:
    """The same; what is added lies along the result."""
    bias, a, b = call["self"], call["mat1"], call["mat2"]
    if a.dim() != 2 or b.dim() != 2 or bias.dim() > 2:
        return None
    sizes = (a.size(0), b.size(1))
    return Cut(
        axes=_rows_and_columns(a, b),
        operands={
            ("self", None): broadcast_along(bias, sizes),
            ("mat1", None): (0, None),
            ("mat2", None): (None, 1),
        },
        results=((0, 1),),
    )


def bmm(call: Call) -> Cut | None:
    """Product by product, then as one."""
    a, b = call["self"], call["mat2"]
    if a.dim() != 3 or b.dim() != 3:
        return None
    return Cut(
        axes=_of_several(a, b),
        operands={("self", None): (0, 1, None), ("mat2", None): (0, None, 2)},
        results=((0, 1, 2),),
    )


def baddbmm(call: Call) -> Cut | None:
    """The same; what is added lies along the result."""
    bias, a, b = call["self"], call["batch1"], call["batch2"]
    if a.dim() != 3 or b.dim() != 3 or bias.dim() > 3:
        return None
    sizes = (a.size(0), a.size(1), b.size(2))
    return Cut(
        axes=_of_several(a, b),
        operands={
            ("self", None): broadcast_along(bias, sizes),
            ("batch1", None): (0, 1, None),
            ("batch2", None): (0, None, 2),
        },
        results=((0, 1, 2),),
    )


def linear(call: Call) -> Cut | None:
    """Rows of the input, in each of its leading dimensions, and rows of the weight."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if weight.dim() != 2 or x.dim() < 1:
        return None
    lead = x.dim() - 1
    rows, columns = prod(x.size()[-2:-1]), weight.size(0)
    step, step_of_columns = _steps(x.dtype, rows, x.size(-1), columns)
    operands: dict[Place, Along] = {
        ("input", None): (*range(lead), None),
        ("weight", None): (lead, None),
    }
    if bias is not None:
        operands["bias", None] = (lead,)
    last = lead - 1
    is_safe = x.dtype in HALF and tiles_are_alike(x.dtype, STEP_OF_HALF)
    if _is_copied_in_rows(x) or _is_copied_in_rows(weight):
        is_safe = False
    if _are_small_together(x.dtype, rows * x.size(-1) * columns, x.size()[:-2].numel()):
        is_safe = False
    leading = [
        Axis(size, step if i == last else 1, is_safe) for i, size in enumerate(x.size()[:-1])
    ]
    return Cut(
        axes=(*leading, Axis(columns, step_of_columns, is_safe)),
        operands=operands,
        results=(tuple(range(lead + 1)),),
    )


#: The step of products whose matrices all begin at multiples of `ALIGNED_NBYTES`, of whatever part:
#: one alone is computed by another function than several.
STEP_OF_ALIGNED = 2


def _of_several(a: torch.Tensor, b: torch.Tensor) -> tuple[Axis, Axis, Axis]:
    """Which of several products, and their rows and columns.

    Cut in those, each matrix begins elsewhere in its tile, but where that is a multiple always: of
    370 products cut at random 4 had other bits without this, and of 730 none with it.
    """
    count, rows, columns = _products(a, b), *_rows_and_columns(a, b)
    if _are_small_together(a.dtype, a.size(1) * a.size(2) * b.size(2), a.size(0)):
        return count, rows._replace(keeps_bits=False), columns._replace(keeps_bits=False)
    if count.keeps_bits or count.extent == 1 or count.exact_step == STEP_OF_ALIGNED:
        return count, rows, columns
    return count, rows._replace(keeps_bits=False), columns._replace(keeps_bits=False)


def _products(a: torch.Tensor, b: torch.Tensor) -> Axis:
    """Which of several products."""
    count, rows, inner, columns = a.size(0), a.size(1), a.size(2), b.size(2)
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return Axis(count)
    if not (_lies_as_in_a_tile(a) and _lies_as_in_a_tile(b)):
        return Axis(count, keeps_bits=False)
    sizes = (numel * a.element_size() for numel in (rows * inner, inner * columns, rows * columns))
    step = lcm(
        STEP_OF_ALIGNED, *(ALIGNED_NBYTES // gcd(ALIGNED_NBYTES, nbytes) for nbytes in sizes)
    )
    if _are_small_together(a.dtype, rows * inner * columns, count):
        step *= ceil((SMALL_PRODUCT + 1) / (rows * inner * columns * step))
    return Axis(count, keeps_bits=False, exact_step=step)


def _lies_as_in_a_tile(x: torch.Tensor) -> bool:
    if _is_copied_in_rows(x):
        return False
    return are_rows_at(x, ALIGNED_NBYTES) or (is_dense(x) and begins_at(x, ALIGNED_NBYTES))


def _is_copied_in_rows(x: torch.Tensor) -> bool:
    """Whether a product copies a matrix in rows: one in columns, with gaps within them.

    In a tile it has none, and is taken as it is, in columns: by another kernel.
    """
    return x.dim() > 1 and 1 not in x.stride()[-2:] and x.stride(-2) < x.stride(-1)


def _rows_and_columns(a: torch.Tensor, b: torch.Tensor) -> tuple[Axis, Axis]:
    dtype = a.dtype
    are_rows_safe = not (dtype.is_floating_point or dtype.is_complex)
    if dtype in HALF or dtype is torch.float32:
        are_rows_safe = tiles_are_alike(dtype, _step(dtype))
    if _is_copied_in_rows(a) or _is_copied_in_rows(b):
        are_rows_safe = False
    are_columns_safe = dtype not in SAFE_ROWS or b.stride(-2) == 1 or a.size(-2) >= SAFE_ROWS[dtype]
    step, step_of_columns = _steps(dtype, a.size(-2), a.size(-1), b.size(-1))
    return (
        Axis(a.size(-2), step, keeps_bits=are_rows_safe),
        Axis(b.size(-1), step_of_columns, keeps_bits=are_rows_safe and are_columns_safe),
    )


def _step(dtype: torch.dtype) -> int:
    if dtype in HALF:
        return STEP_OF_HALF
    return STEPS.get(dtype, 1)


def _steps(dtype: torch.dtype, rows: int, inner: int, columns: int) -> tuple[int, int]:
    """Return the rows and the columns that a tile has at least.

    In half precision so many that none is a small product, unless all of it is one.
    """
    step = _step(dtype)
    if dtype not in HALF or rows * inner * columns <= SMALL_PRODUCT:
        return step, step
    least_rows = _up_to(step, SMALL_PRODUCT // (inner * min(columns, step)) + 1)
    if least_rows < rows or columns <= step:
        return least_rows, step
    return _up_to(step, rows), _up_to(step, SMALL_PRODUCT // (inner * rows) + 1)


def _up_to(step: int, least: int) -> int:
    return -(-least // step) * step


def _are_small_together(dtype: torch.dtype, multiplications: int, count: int) -> bool:
    """Whether several products, computed as one, are none that is small, and each by itself is."""
    return dtype in HALF and 0 < multiplications <= SMALL_PRODUCT < multiplications * count
