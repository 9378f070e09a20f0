"""Whether this machine's kernels add a tile of a product as they add the whole one.

What is known of tiles was measured on one processor (`products.py`). Before the first cut that
counts on it, a few products are computed whole and by tiles here, and compared.
"""

from __future__ import annotations

from functools import cache

import torch

#: Terms of each sum; of half precision not so many, which some processors add very slowly.
INNER = (96, 1024, 8192)
INNER_OF_HALF = (96, 4096)
#: Rows beside whole steps: with `MKL_CBWR=COMPATIBLE` two threads and more divide those of a whole
#: otherwise than a tile's where some are left over.
MORE_ROWS = 3


def tiles_are_alike(dtype: torch.dtype, step: int) -> bool:
    """Say whether tiles of `step` rows and columns have the bits of the whole, with these threads.

    Takes about a tenth of a second, once for each number of threads.
    """
    return _are_alike(dtype, step, torch.get_num_threads())


#: Of what was asked: (dtype, step) of tiles that have other bits here, so that nothing was cut.
unlike: set[tuple[torch.dtype, int]] = set()


@cache
def _are_alike(dtype: torch.dtype, step: int, _: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    terms = INNER_OF_HALF if dtype.itemsize == 2 else INNER
    are_alike = all(_is_alike(dtype, step, inner, generator) for inner in terms)
    if not are_alike:
        unlike.add((dtype, step))
    return are_alike


def _is_alike(dtype: torch.dtype, step: int, inner: int, generator: torch.Generator) -> bool:
    def drawn(rows: int, columns: int) -> torch.Tensor:
        # On the host, whatever the default device is.
        single = torch.randn(
            (rows, columns), generator=generator, dtype=torch.float32, device="cpu"
        )
        return single.to(dtype)

    a = drawn(2 * step + MORE_ROWS, inner)
    for b in (drawn(inner, 2 * step), drawn(2 * step, inner).t()):
        whole = a @ b
        for rows in (slice(step), slice(step, None)):
            for columns in (slice(step), slice(step, None)):
                # As a block is fetched: memory of its own, in the order of the operand's.
                tile = a[rows].clone() @ b[:, columns].clone()
                if not torch.equal(tile, whole[rows, columns]):
                    return False
    return True
