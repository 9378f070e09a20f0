"""Sums of products in any semiring, in bounded memory: `torchTensorRef.einsum`.

`contract.py` is what a program calls. It reads an equation (`equation.py`), chooses an order of
several operands (`paths.py`), and gives each product to the engine (`engine.py`), which goes
through it block by block (`blocks.py`) with the kernel of a semiring (`kernels.py`, `gemm.py`).
Gradients are sums of products, too (`grad.py`, `pointers.py`, `replay.py`).
"""

from .contract import einsum
from .equation import Equation
from .semirings import SEMIRINGS, Semiring

__all__ = ["SEMIRINGS", "Equation", "Semiring", "einsum"]
