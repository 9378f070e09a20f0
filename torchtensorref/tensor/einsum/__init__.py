"""Sums of products in any semiring, in bounded memory: `torchTensorRef.einsum`.

`contract.py` is what a program calls. It reads an equation (`equation.py`), and looks for its plan
(`plan.py`), which is all that does not depend on values: an order of several operands (`paths.py`),
and for each product how the engine (`engine.py`) goes through it block by block (`blocks.py`) with
the kernel of a semiring (`kernels.py`, `gemm.py`, `log_products.py`). Gradients are sums of
products, too (`grad.py`, `log_shares.py`, `pointers.py`, `replay.py`).
"""

from .contract import einsum
from .equation import Equation
from .semirings import SEMIRINGS, Semiring

__all__ = ["SEMIRINGS", "Equation", "Semiring", "einsum"]
