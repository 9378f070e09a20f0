"""`torchTensorRef.einsum`: sums of products in any semiring, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigError, did_you_mean, nearest
from ...base.units import parse_limit
from ...memory.manager import tensorsManager
from ...memory.ref import TensorRef
from .best_paths import steps_to_best, told
from .blocks import Room, held_nbytes, of_dtype
from .equation import Bound, Equation, Label, compiled
from .grad import apply, kernel_of_products
from .kernels import Best, Counting, Folding, Job, Kernel, LogSum, wide
from .log_products import LogProduct, is_worth_it
from .paths import Step, at_once, elements_between, steps
from .plain import torchs
from .semirings import SEMIRINGS, Named, Semiring, refuse_dtypes, semiring_of

#: Without a number that must be kept, blocks get this share of the accelerator at least.
LEAST_SHARE = 1 / 8


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
    ring = semiring_of(semiring)
    refuse_dtypes(ring, tensors)
    is_best = isinstance(ring, Named) and ring.name in ("max-plus", "min-plus")
    if argmax and not is_best:
        raise ValueError("argmax=True is for the semirings 'max-plus' and 'min-plus'.")
    bound = compiled_equation.bind([tensor.shape for tensor in tensors])
    views = compiled_equation.views(tensors)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    noted = wanted and (not isinstance(ring, Named) or ring.dtype is None)
    chosen, room = _plan(bound, ring, tensors, noted, argmax, block_size, budget)
    job = Job(bound.inputs, bound.output, bound.sizes)
    if argmax and 0 in job.shape(job.reduced) and 0 not in job.shape(job.output):
        raise ValueError(f"{compiled_equation}: a best of no terms is nowhere; leave out argmax.")
    results, jobs = _run(bound, ring, views, chosen, room, noted or argmax)
    found = results[0]
    if not (isinstance(ring, Named) and ring.dtype):
        found = of_dtype(found, tensors[0].dtype)
    return (found, told(results[1], *jobs)) if argmax else found


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


def _plan(
    bound: Bound,
    ring: Semiring | Named,
    tensors: tuple[Tensor, ...],
    noted: bool,
    argmax: bool,
    block_size: Any,
    budget: int | str | None,
) -> tuple[tuple[Step, ...], Room]:
    """Choose the order in which operands are multiplied, and how large blocks may be."""
    lengths, default = _lengths(block_size, bound)
    # Who says how large blocks are gets these, and the same bits on every machine.
    is_free = block_size is not None and budget is None
    limit_nbytes = None if is_free else _limit_nbytes(tensors, budget)
    together = at_once(bound.inputs, bound.output)
    chosen = together
    if 0 not in bound.sizes.values():  # no step on the way may add nothing
        sizes = tuple(bound.sizes.items())
        chosen = (
            steps_to_best(bound.inputs, bound.output)
            if argmax
            else steps(bound.inputs, bound.output, sizes, ring.commutative)
        )
    if ring is not SEMIRINGS["real"]:
        # What is made on the way may be all terms: of numbers their product is a matrix product's.
        terms = math.prod(bound.sizes.values())
        if any(math.prod(bound.sizes[x] for x in step.output) == terms for step in chosen[:-1]):
            chosen = together
    if limit_nbytes is None:
        return chosen, Room(lengths, default)
    value_nbytes, pointer_nbytes = _item_nbytes(ring, tensors)
    # With gradients the result's own, too, and for "log" its total without infinities.
    item_nbytes = value_nbytes * (3 if noted else 1) + pointer_nbytes
    result_count = math.prod(bound.sizes[label] for label in bound.output)
    whole_nbytes = held_nbytes(tensors) + result_count * item_nbytes
    if noted:
        whole_nbytes += sum(x.numel() * x.element_size() for x in tensors if x.requires_grad)
    between_nbytes = elements_between(chosen, bound.sizes) * item_nbytes
    if between_nbytes > (limit_nbytes - whole_nbytes) / 2:
        chosen, between_nbytes = together, 0
    whole_nbytes += between_nbytes
    spare_nbytes = limit_nbytes - whole_nbytes
    if budget is None:
        spare_nbytes = max(spare_nbytes, int(limit_nbytes * LEAST_SHARE))
    return chosen, Room(lengths, default, spare_nbytes, whole_nbytes, budget is not None)


def _item_nbytes(ring: Semiring | Named, tensors: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the most bytes that an element of a result takes, and those of where it is found."""
    if isinstance(ring, Named) and ring.dtype is not None:
        return ring.dtype.itemsize, 0
    return wide(tensors[0].dtype).itemsize, 8 if ring.name in ("max-plus", "min-plus") else 0


def _limit_nbytes(tensors: tuple[Tensor, ...], budget: int | str | None) -> int | None:
    if budget is not None:
        return parse_limit(budget)
    if any(isinstance(tensor, TensorRef) for tensor in tensors):
        books = tensorsManager.residency.books
        if books.accelerators:
            return books.ledgers[books.accelerators[0]].limit_nbytes
    return None


def _lengths(block_size: Any, bound: Bound) -> tuple[dict[Label, int], int | None]:
    """Return the block size by index, and that of the summed dimensions that are not named."""
    if block_size is None:
        return {}, None
    by_label = dict(block_size) if isinstance(block_size, Mapping) else {None: block_size}
    for length in by_label.values():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(
                f"A block size is an integer of at least 1, not {length!r}.", name="block_size"
            )
    if None in by_label:
        return {}, by_label[None]
    known = {("..." if isinstance(label, tuple) else label): label for label in bound.sizes}
    found = {}
    for label, length in by_label.items():
        label = "..." if label is ... else label
        if label not in known:
            names = [str(one) for one in known]
            raise ConfigError(
                f"The equation has no index {label!r}. {did_you_mean(str(label), names)}",
                name=str(label),
                known=tuple(names),
                nearest=nearest(str(label), names),
            )
        for one in bound.sizes:
            if one == label or (label == "..." and isinstance(one, tuple)):
                found[one] = length
    return found, None


def _run(
    bound: Bound,
    ring: Semiring | Named,
    views: Sequence[Tensor],
    chosen: Sequence[Step],
    room: Room,
    with_pointers: bool,
) -> tuple[tuple[Tensor, ...], tuple[Job, list[tuple[Job, Tensor]]]]:
    """Multiply operands step by step.

    Returns
    -------
    tuple
        The results of the last step; and its job, with the jobs and the pointers of those before.
    """
    waiting = list(zip(bound.inputs, views, strict=True))
    results: tuple[Tensor, ...] = ()
    job, before = Job((), (), bound.sizes), []
    for step in chosen:
        if len(results) > 1:
            before.append((job, results[1]))
        taken = [waiting[place] for place in step.places]
        job = Job(tuple(labels for labels, _ in taken), step.output, bound.sizes)
        factors = [factor for _, factor in taken]
        results = apply(job, _kernel(job, ring, factors, with_pointers), factors, room)
        made = (step.output, results[0])
        if len(step.places) == 1 and len(waiting) > 1:
            waiting[step.places[0]] = made
        else:
            waiting = [one for at, one in enumerate(waiting) if at not in step.places]
            waiting.append(made)
    return results, (job, before)


def _kernel(
    job: Job, ring: Semiring | Named, factors: Sequence[Tensor], with_pointers: bool
) -> Kernel:
    """Return the kernel of a semiring."""
    dtype = factors[0].dtype
    work = wide(dtype)
    if isinstance(ring, Semiring):
        return Folding(dtype, work, ring)
    if ring.dtype is not None:
        return Counting(ring.dtype, ring.dtype)
    if ring.name == "log":
        return LogProduct(work, work) if is_worth_it(job) else LogSum(work, work)
    if ring.name == "real":
        return kernel_of_products(job, ("real",) * len(factors), factors, dtype)
    return Best(dtype, work, ring.name == "max-plus", with_pointers)
