"""Plans: all of an einsum that no value changes, made once and kept with its equation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...base.errors import ConfigError, did_you_mean, nearest
from ...base.units import parse_limit
from ...memory.manager import tensorsManager
from ...memory.ref import TensorRef
from .best_paths import steps_to_best, told
from .blocks import FAST_ON_ACCELERATOR, FAST_ON_HOST, Room, held_nbytes, of_dtype
from .engine import Walk
from .equation import Bound, Equation, Label, view
from .grad import apply, kernel_of_products
from .kernels import Best, Counting, Folding, Job, Kernel, LogSum, wide
from .log_products import LogProduct, is_worth_it
from .paths import Step, at_once, elements_between, steps
from .semirings import SEMIRINGS, Named, Semiring, refuse_dtypes

#: Without a number that must be kept, blocks get this share of the accelerator at least.
LEAST_SHARE = 1 / 8
#: An equation whose lengths change at each call keeps no more plans than this.
MOST_PLANS = 256

T = TypeVar("T")


class Limits(NamedTuple):
    """How much may be computed at once."""

    #: Of `block_size`, by label; of all summed dimensions by None.
    lengths: tuple[tuple[Label | None, int], ...]
    #: The most bytes, if there is a limit, and those of the operands.
    nbytes: int | None
    held_nbytes: int
    #: Whether somebody asked for it.
    is_strict: bool

    @classmethod
    def of(cls, block_size: Any, budget: int | str | None, tensors: tuple[Tensor, ...]) -> Limits:
        """Read what a call says; a ConfigError says what is none."""
        lengths = () if block_size is None else _lengths(block_size)
        nbytes = None
        if budget is not None:
            nbytes = parse_limit(budget)
        elif block_size is None:
            # Who says how large blocks are gets these, and the same bits on every machine.
            nbytes = _accelerator_nbytes(tensors)
        held = 0 if nbytes is None else held_nbytes(tensors)
        return cls(lengths, nbytes, held, budget is not None)


def _lengths(block_size: Any) -> tuple[tuple[Label | None, int], ...]:
    by_label = dict(block_size) if isinstance(block_size, Mapping) else {None: block_size}
    for length in by_label.values():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(
                f"A block size is an integer of at least 1, not {length!r}.", name="block_size"
            )
    return tuple(by_label.items())


def _accelerator_nbytes(tensors: Sequence[Tensor]) -> int | None:
    if any(isinstance(tensor, TensorRef) for tensor in tensors):
        books = tensorsManager.residency.books
        if books.accelerators:
            return books.ledgers[books.accelerators[0]].limit_nbytes
    return None


def plan_of(
    equation: Equation,
    ring: Semiring | Named,
    tensors: tuple[Tensor, ...],
    limits: Limits,
    argmax: bool,
) -> Plan:
    """Return the plan for operands like these: the one that has been made for such, or a new one.

    Raises
    ------
    ValueError, TypeError, ConfigError
        As `einsum` says.
    """
    key = (
        id(ring),  # the plan keeps it alive; what a user's is equal to is not for us to ask
        argmax,
        limits,
        torch.is_grad_enabled(),
        tensors[0].device.type if tensors else "",
        *[(x.shape, x.dtype, x.requires_grad) for x in tensors],
    )
    found: Plan | None = equation.plans.get(key)
    if found is None:
        found = Plan(equation, ring, tensors, limits, argmax)
        if len(equation.plans) >= MOST_PLANS:
            equation.plans.clear()
        equation.plans[key] = found
    return found


class Plan:
    """The steps of an einsum, with operands of some shapes and dtypes."""

    __slots__ = ("_dtype", "_odd", "_ring", "_steps", "_with_argmax")

    def __init__(
        self,
        equation: Equation,
        ring: Semiring | Named,
        tensors: tuple[Tensor, ...],
        limits: Limits,
        argmax: bool,
    ) -> None:
        refuse_dtypes(ring, tensors)
        if argmax and not _is_best(ring):
            raise ValueError("argmax=True is for the semirings 'max-plus' and 'min-plus'.")
        bound = equation.bind([tensor.shape for tensor in tensors])
        self._ring, self._with_argmax = ring, argmax
        spelt = [equation.spelt_out(place, x.dim()) for place, x in enumerate(tensors)]
        if argmax:
            bound = bound.with_summed(spelt)
        shapes = [[bound.sizes[label] for label in kept] for kept in bound.inputs]
        #: Operands of which a diagonal is taken, or dimensions that broadcast are left out or given
        #: the size that they have in others.
        self._odd = [
            (place, *views)
            for place, views in enumerate(zip(spelt, bound.inputs, shapes, strict=True))
            if views[0] != views[1] or list(tensors[place].shape) != views[2]
        ]
        has_own_dtype = isinstance(ring, Named) and ring.dtype is not None
        self._dtype = None if has_own_dtype else tensors[0].dtype
        noted = not has_own_dtype and torch.is_grad_enabled()
        noted = noted and any(tensor.requires_grad for tensor in tensors)
        chosen, room = _choice(bound, ring, tensors, noted, argmax, limits)
        job = Job(bound.inputs, bound.output, bound.sizes)
        if argmax and 0 in job.shape(job.reduced) and 0 not in job.shape(job.output):
            raise ValueError(f"{equation}: a best of no terms is nowhere; leave out argmax.")
        self._steps = _walks(bound, ring, [x.dtype for x in tensors], chosen, room, noted or argmax)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Multiply operands step by step; return what `einsum` does."""
        waiting = list(tensors)
        for place, spelt, kept, shape in self._odd:
            waiting[place] = view(waiting[place], spelt, kept, shape)
        pointers: list[tuple[Job, Tensor]] = []
        for step, walk in self._steps:
            found, *where = apply(walk, [waiting[place] for place in step.places])
            waiting = step.replaced(waiting, found)
            pointers += [(walk.job, one) for one in where]
        (found,) = waiting
        if self._dtype is not None:
            found = of_dtype(found, self._dtype)
        return (found, told(pointers)) if self._with_argmax else found


def _is_best(ring: Semiring | Named) -> bool:
    return isinstance(ring, Named) and ring.name in ("max-plus", "min-plus")


def _choice(
    bound: Bound,
    ring: Semiring | Named,
    tensors: Sequence[Tensor],
    noted: bool,
    argmax: bool,
    limits: Limits,
) -> tuple[tuple[Step, ...], Room]:
    """Choose the order in which operands are multiplied, and how large blocks may be."""
    lengths, default = _by_label(limits.lengths, bound)
    fast = FAST_ON_HOST if tensors[0].device.type == "cpu" else FAST_ON_ACCELERATOR
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
    if limits.nbytes is None:
        return chosen, Room(lengths, default, fast_elements=fast)
    value_nbytes, pointer_nbytes = _item_nbytes(ring, tensors)
    # With gradients the result's own, too, and for "log" its total without infinities.
    item_nbytes = value_nbytes * (3 if noted else 1) + pointer_nbytes
    result_count = math.prod(bound.sizes[label] for label in bound.output)
    whole_nbytes = limits.held_nbytes + result_count * item_nbytes
    if noted:
        whole_nbytes += sum(x.numel() * x.element_size() for x in tensors if x.requires_grad)
    between_nbytes = elements_between(chosen, bound.sizes) * item_nbytes
    if between_nbytes > (limits.nbytes - whole_nbytes) / 2:
        chosen, between_nbytes = together, 0
    whole_nbytes += between_nbytes
    spare_nbytes = limits.nbytes - whole_nbytes
    if not limits.is_strict:
        spare_nbytes = max(spare_nbytes, int(limits.nbytes * LEAST_SHARE))
    return chosen, Room(lengths, default, spare_nbytes, whole_nbytes, limits.is_strict, fast)


def _item_nbytes(ring: Semiring | Named, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the most bytes that an element of a result takes, and those of where it is found."""
    if isinstance(ring, Named) and ring.dtype is not None:
        return ring.dtype.itemsize, 0
    return wide(tensors[0].dtype).itemsize, 8 if _is_best(ring) else 0


def _by_label(
    lengths: tuple[tuple[Label | None, int], ...], bound: Bound
) -> tuple[dict[Label, int], int | None]:
    """Return the block size by index, and that of the summed dimensions that are not named."""
    known = {("..." if isinstance(label, tuple) else label): label for label in bound.sizes}
    found, default = {}, None
    for label, length in lengths:
        if label is None:
            default = length
            continue
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
    return found, default


def _walks(
    bound: Bound,
    ring: Semiring | Named,
    dtypes: list[torch.dtype],
    chosen: Sequence[Step],
    room: Room,
    with_pointers: bool,
) -> tuple[tuple[Step, Walk], ...]:
    """Return the steps, each with its sum of products."""
    inputs, found = list(bound.inputs), []
    for step in chosen:
        job = Job(tuple(inputs[place] for place in step.places), step.output, bound.sizes)
        taken = [dtypes[place] for place in step.places]
        kernel = _kernel(job, ring, taken, with_pointers)
        found.append((step, Walk(job, kernel, room, taken)))
        inputs = step.replaced(inputs, step.output)
        dtypes = step.replaced(dtypes, kernel.dtype)
    return tuple(found)


def _kernel(
    job: Job, ring: Semiring | Named, dtypes: Sequence[torch.dtype], with_pointers: bool
) -> Kernel:
    """Return the kernel of a semiring."""
    dtype = dtypes[0]
    work = wide(dtype)
    if isinstance(ring, Semiring):
        return Folding(dtype, work, ring)
    if ring.dtype is not None:
        return Counting(ring.dtype, ring.dtype)
    if ring.name == "log":
        return LogProduct(work, work) if is_worth_it(job) else LogSum(work, work)
    if ring.name == "real":
        return kernel_of_products(job, ("real",) * len(dtypes), dtypes, dtype)
    return Best(dtype, work, ring.name == "max-plus", with_pointers)
