"""`torchTensorRef.einsum`: sums of products in any semiring, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .equation import Equation, Label, compiled
from .plain import torchs
from .plan import Limits, plan_of
from .semirings import Semiring, semiring_of


def einsum(
    equation: str | Equation | Tensor,
    *operands: Any,
    semiring: str | Semiring = "real",
    block_size: int | Mapping[Label, int] | None = None,
    budget: int | str | None = None,
    argmax: bool = False,
) -> Any:
    """Sum products of the elements of tensors, as an equation says, in any semiring.

    Parameters
    ----------
    equation : str or Equation
        As `torch.einsum` has it: `"bij,bjk->bik"`, with `...`, with an index twice in one operand
        (a diagonal), and without `->`. A text is compiled once; `torchTensorRef.Equation` does it
        by hand. With integers for letters, of which there may be any number:
        `einsum(a, [0, 1], b, [1, 2], [0, 2])`.
    *operands : Tensor
        All of one dtype, plain tensors or TensorRefs.
    semiring : str or Semiring, optional
        "real": sums of products. "log": logarithms of sums of exponentials of sums, about a maximum
        that runs along. "max-plus" and "min-plus": the greatest and the least of sums. "boolean":
        whether any product of truths is true. "counting": how many ways there are, as int64. Or one
        of your own.
    block_size : int or mapping, optional
        The most elements that are computed at once: of each summed dimension, or by index, where
        `"..."` is all that `...` stands for. Without it blocks are of a size that is fast and fits.
    budget : int or str, optional
        The most bytes, as a number or a text such as "16MiB": operands, result, what is made on the
        way, and first gradients with their own operands. Without it the budget of the accelerator,
        where operands are TensorRefs.
    argmax : bool, optional
        With "max-plus" and "min-plus", also return where the best terms are.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `argmax`
        With the dtype of the operands, but for "boolean" and "counting". Where they are, an int64
        tensor with one more dimension: an index for each summed dimension, in the order in which
        the equation names them first; of equals the first.

    Raises
    ------
    ValueError
        The equation is none, or the operands do not fit it. An index that only the result has is
        refused: its size is not known.
    TypeError
        The semiring is not about operands of that dtype, or they are of several.
    ConfigError
        No semiring has that name, no index that of a block size, or a budget is too small even for
        the smallest block; then the message says how large it has to be. Nothing has been computed.

    Notes
    -----
    Numbers of half precision are added in float32. Gradients of "real" and "log" can be taken any
    number of times, those of "max-plus" and "min-plus" too (they go to the best terms), those of a
    semiring of one's own once. They are computed in blocks, too, and no product is saved for them.
    A sum over nothing is the semiring's zero.

    Examples
    --------
    >>> import torch, torchTensorRef
    >>> steps = torch.tensor([[0.0, 5.0], [1.0, torch.inf]])
    >>> best, by = torchTensorRef.einsum(
    ...     "ij,jk->ik", steps, steps, semiring="min-plus", argmax=True
    ... )
    >>> best.tolist(), by.squeeze(-1).tolist()
    ([[0.0, 5.0], [1.0, 6.0]], [[0, 0], [0, 0]])
    """
    if semiring == "real" and budget is None and block_size is None and not argmax:
        found = torchs(equation, operands)
        if found is not None:
            return found
    compiled_equation, tensors = _read(equation, operands)
    limits = Limits.of(block_size, budget, tensors)
    plan = plan_of(compiled_equation, semiring_of(semiring), tensors, limits, bool(argmax))
    return plan.run(tensors)


def _read(equation: Any, operands: Sequence[Any]) -> tuple[Equation, tuple[Tensor, ...]]:
    """Return the equation, and the operands, of all the ways to write them."""
    if isinstance(equation, Tensor):
        mixed = [equation, *operands]
        tensors, labels = mixed[: len(mixed) // 2 * 2 : 2], mixed[1::2]
        output = mixed[-1] if len(mixed) % 2 else None
        found = Equation(labels, output)
    else:
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        tensors = list(operands)
        found = equation if isinstance(equation, Equation) else compiled(equation)
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Operand {place} is a {type(tensor).__name__}, not a tensor.")
    return found, tuple(tensors)
