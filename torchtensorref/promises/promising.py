"""Promises: TensorRefs that have shape and dtype, and no bytes yet.

Operators on them run on metadata (`promised_call.py`) and give promises. What was asked for is
kept as a graph (`graph.py`), so that `fulfil` can do it later, and written down by a recorder for a
forecast.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as _no_transforms
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base import forking
from ..base.activation import making, watch
from ..base.scopes import Scopes, surely
from ..interception.handlers import HANDLERS
from ..interception.operands import analyse
from ..interception.ready_path import SLOW
from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.plain_views import make_ref
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan
from ..operators.random_numbers import draws_random
from ..operators.row import Special
from .before import Before
from .composite import run_composite
from .draws import Draws, PromisedDraws, generator_of
from .graph import Cell, Node, fulfil_all, is_lost, lacks_values, nodes_before, used_by
from .promised_call import NOWHERE, PromisedCall, take_number, write_copies
from .recorder import Recorder
from .values import A_READ, Values, has_no_value, where_asked

__all__ = ["Promises", "Scope", "promises", "promising", "scoped"]

#: Handled by a look at metadata alone: as for any TensorRef.
_BY_METADATA = {
    Special.CHOOSE_ATTENTION,
    Special.IS_PINNED,
    Special.PIN,
    Special.CAN_REPLACE,
    Special.IS_SET_TO,
    Special.COMPARE_SIZES,
}


class Scope(NamedTuple):
    """What holds inside one `promising()`."""

    values: Values
    recorder: Recorder | None = None
    #: Where random numbers wait that nobody draws; None: among those that are to be drawn.
    draws: PromisedDraws | None = None


_scope: Scopes[Scope | None] = Scopes("torchTensorRef.promising", None)
_without = Scope(Values())


class Promises:
    """Runs operators on promises, and gives promises their bytes."""

    def __init__(self) -> None:
        #: The cells of real blocks that operators on promises read.
        self._cell_of: weakref.WeakKeyDictionary[Block, Cell] = weakref.WeakKeyDictionary()
        #: The living promises: where there is none, operators are not looked at.
        self._promised: weakref.WeakSet[Block] = weakref.WeakSet()
        self._lock = forking.Lock()
        #: Held while the graph is added to, or a part of it runs: threads may share promises.
        self._graph = forking.RLock()
        #: The random numbers that are to be drawn.
        self.draws = PromisedDraws(self._draw)
        forking.in_child.add(self)

    def begin_in_child(self, *, was_held: bool) -> None:
        """Leave the scopes of other threads in a forked child; all of it is inside that of ours.

        Threads of the child's own send what was promised in it (a queue's), and ask for values.
        """
        global _without
        _scope.leave_others()
        _without = Scope(self.values)
        self.look_on()

    def look_on(self) -> None:
        """See every operator while any thread is in a scope."""
        with self._lock:
            watch.want("promises", any(_scope.everywhere()), is_slow=True)

    @property
    def values(self) -> Values:
        """The answers that hold here."""
        return (_scope.get() or _without).values

    @property
    def recorder(self) -> Recorder | None:
        """Who writes down what is asked for here."""
        return (_scope.get() or _without).recorder

    # -- asked by the slow path -----------------------------------------------------------------

    def takes(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator is not to run now; one that draws and is to run draws in its turn."""
        if self.take_part(args, kwargs):
            return True
        if plan.is_random:
            self.draws.settle(generator_of((*args, *kwargs.values())))
        return False

    def take_part(self, *arguments: Any) -> bool:
        """Whether what is made of some arguments is a promise: in a scope, or as one of them is."""
        return _scope.get() is not None or bool(
            self._promised
            and any(
                isinstance(value, TensorRef) and value._ttr_block.promise is not None
                for value in tree_leaves(arguments)
            )
        )

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on metadata; NotImplemented where it is to take its usual way."""
        if plan.special in _BY_METADATA:
            return HANDLERS[plan.special](plan, args, kwargs)
        residency = tensorsManager.residency
        if residency.recorder is not None:
            residency.recorder.mistrust("promises take part")
        if any(isinstance(value, torch.UntypedStorage) for value in args):  # it has its bytes
            if isinstance(args[0], TensorRef):
                self.asked(args[0]._ttr_block, plan.name)
            return NotImplemented
        numbers: set[Block] = set()
        if not plan.writes:
            take = functools.partial(take_number, numbers)
            args, kwargs = tree_map_only(torch.Tensor, take, (args, kwargs))
        operands = analyse(plan, args, kwargs, tensorsManager)
        if operands.has_other_subclass:
            return NotImplemented
        if operands.sparse:  # its elements are known, and what is made of them is, too
            if self.recorder is not None:
                self.recorder.before.note_written(operands)
                write_copies(self, operands)
            for block in operands.blocks:
                self.asked(block, plan.name)
            return NotImplemented
        if plan.is_true_view and operands.blocks:
            if self.recorder is not None:
                self.recorder.note_view(operands.blocks[0])
            if operands.blocks[0].promise is None:
                return NotImplemented  # a view of what has bytes has them, too
        with self._graph:
            return PromisedCall(self, operands, numbers).run()

    def run_composite(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite operator that has not been taken apart yet; `SLOW` where it is to be."""
        if self.recorder is None or plan.peak_nbytes is None:
            return SLOW
        return run_composite(self.recorder, plan, args, kwargs)

    def cell_of(self, block: Block) -> Cell:
        """Return the cell of a block: of a promise its own, of another what it holds now."""
        if block.promise is not None:
            return block.promise  # type: ignore[no-any-return]
        recorder = self.recorder
        if recorder is not None:  # no copies, and nothing of the program's is kept alive
            return recorder.before.cell_of(block)
        cell = self._cell_of.get(block)
        if cell is None or cell.real is None or cell.real.replicas is not block.replicas:
            real = tensorsManager.residency.sharing.copy_on_write(block)
            cell = self._cell_of[block] = Cell(block.nbytes, real)
        return cell

    def make_promise(self, block: Block, cell: Cell) -> None:
        """Let a block that has bytes be a promise from now on; what it had is the cell's."""
        recorder = self.recorder
        if recorder is not None:
            cell.real = recorder.before.note_bytes(block)
        self._note_promise(block, cell)

    def _note_promise(self, block: Block, cell: Cell) -> None:
        with tensorsManager.residency.books.lock:
            # In this order: it has its bytes, or is promised to have those of the cell.
            block.ready = None
            self._promised.add(block)
            block.promise = cell
            block.move_to({}, [])

    def _note_real(self, block: Block) -> None:
        """Note that a block has its bytes now."""
        block.promise = None
        self._promised.discard(block)

    def take_back(self, before: Before) -> None:
        """Give what a forecast has written what it had before; it can be done twice."""
        lock = tensorsManager.residency.books.lock
        for block, original in before.originals.items():
            with lock:
                block.nbytes = original.nbytes
                original.share_with(block)
                block.exposure = original.exposure
                self._note_real(block)
        for block, cell in before.promised.items():
            block.nbytes, block.exposure = cell.nbytes, None
            self._note_promise(block, cell)
        before.put_back()
        for block in before.forget():
            with lock:
                _ = block.is_shared  # forgets those that have died

    # -- fulfilling -----------------------------------------------------------------------------

    def fulfil(self, block: Block, asked_by: str = "fulfil") -> None:
        """Run what a promise depends on, in order, and give it its bytes.

        Raises
        ------
        PromisedError
            It depends on what has no values. What was computed on the way stays computed.
        LostError
            It depends on a write that an error has broken off.
        """
        with self._graph:
            cell: Cell | None = block.promise
            if cell is None:
                return
            nodes = nodes_before(cell.writer)
            if lacks_values([*used_by(nodes), cell]):
                raise has_no_value(asked_by, "it depends on a promise that was made without values")
            self._run_all(nodes)
            assert cell.real is not None
            with tensorsManager.residency.books.lock:
                cell.real.share_with(block)
                self._note_real(block)

    def _run_all(self, nodes: Iterable[Node]) -> None:
        try:
            self.outside(fulfil_all, nodes)
        except BaseException:
            tensorsManager.doubt()
            self.draws.leave_lost(is_lost)
            raise

    def can_all(self, cells: Iterable[Cell]) -> bool:
        """Whether all of these can have values, by what the answers here say it may take."""
        needed = {one for cell in cells for one in [cell, *used_by(nodes_before(cell.writer))]}
        limit_nbytes = self.values.limit_nbytes
        return not lacks_values(needed) and (
            limit_nbytes is None or sum(one.nbytes for one in needed) <= limit_nbytes
        )

    def _draw(self, last: Node) -> None:
        """Run what draws random numbers up to a node, unless it never has values."""
        scope = _scope.get()
        with self._graph:
            nodes = nodes_before(last)
            if (scope is None or scope.recorder is None) and not lacks_values(used_by(nodes)):
                self._run_all(nodes)

    def asked(self, block: Block, op: str = A_READ) -> None:
        """Give a block its bytes because somebody reads them; or raise `PromisedError`."""
        values = self.values
        with self._graph:
            if block.promise is None:
                return  # another thread has given it its bytes
            if values.computes and self.can_all([block.promise]):
                self.fulfil(block, op)
                return
            made_up = values.made_up((block.nbytes,), (1,), torch.uint8)
            if made_up is None:
                raise has_no_value(op, "it is a promise")
            if self.recorder is not None:
                self.recorder.before.note_promise(block)
            filled = tensorsManager.ownership.adopt_tensor(made_up, sole=True)._ttr_block
            filled.share_with(block)
            self._note_real(block)

    @staticmethod
    def outside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something as if there were no scope: operators run for real."""
        with (
            _scope.entered(None),
            making.entered(None),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            torch._C.DisableTorchFunction(),
            _no_transforms(),
            _disable_current_modes(),
        ):
            return call(*args, **kwargs)

    # -- making promises ------------------------------------------------------------------------

    def make(
        self, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], for_real: Any
    ) -> Any:
        """Make what a factory makes without its bytes; NotImplemented where it is to make them.

        `for_real` is called with the same arguments, but for `requires_grad`, when they are wanted.
        """
        asked = torch.device(kwargs.get("device") or "cpu")
        if asked.type == "meta" or kwargs.get("out") is not None or kwargs.get("names"):
            return NotImplemented
        if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return NotImplemented  # of a TensorRef: an operator as any other; of a plain one: data
        # As they are now: a list of sizes may change until then, and numbers among them.
        args, kwargs = tree_map_only(torch.Tensor, operator.index, (args, kwargs))
        options = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
        plain = wrapped(*args, **{**options, "device": "meta"})
        if type(plain) is not torch.Tensor or plain.layout is not torch.strided:
            return NotImplemented
        cell = Cell(plain.untyped_storage().nbytes())
        cell.base = plain.detach()
        ref = self.ref_over(cell.base, self.promised(cell), asked)
        usual = {**kwargs, "dtype": plain.dtype}
        usual.pop("requires_grad", None)
        run = functools.partial(for_real, wrapped, args, usual)
        draws = self.draws_of(kwargs.values()) if draws_random(wrapped.__name__) else None
        self.note(wrapped.__name__, run, (), {}, births=[(0, cell)], draws=draws)
        return ref.requires_grad_() if plain.requires_grad else ref

    def promised(self, cell: Cell) -> Block:
        """Make the block of a cell that has no bytes yet."""
        block = Block(cell.nbytes, tensorsManager.residency.books.tick)
        self._promised.add(block)
        block.promise = cell
        if self.recorder is not None:
            self.recorder.before.born.add(block)
        return block

    def ref_over(self, plain: torch.Tensor, block: Block, label: torch.device) -> Any:
        """Make the TensorRef with the metadata of a tensor without bytes."""
        return make_ref(plain, block, NOWHERE, label)

    def note(self, name: str, run: Any, args: Any, kwargs: Any, **parts: Any) -> None:
        """Add an operator, or a factory, to the graph; see `Node`."""
        Node(name, where_asked(), run, args, kwargs, **parts)

    def draws_of(self, arguments: Iterable[Any]) -> Draws:
        """Return where an operator, or a factory, with such arguments is to draw from."""
        draws = (_scope.get() or _without).draws or self.draws
        return draws.of(generator_of(arguments))


promises = Promises()


@contextmanager
def promising(values: Mapping[str, Any] | str | int | None = None) -> Iterator[None]:
    """Make promises inside: factories and operators give shapes, dtypes and no bytes.

    Parameters
    ----------
    values : mapping, str or int, optional
        What a program is told that asks for a value: by operator (`{"item": 3}`, or a callable that
        is given the operands), or a policy for all: `"zeros"`, `"random"` or a seed, `"compute"`
        (run what it depends on). Without it such a question raises `PromisedError`.

    Notes
    -----
    Holds for the current thread or task. What is made from real tensors is a deferred computation:
    `ref.fulfil()` runs what the promise depends on, in the order of the program. Data
    (`torch.tensor`, files, arrays) stays real; random numbers are drawn when they are fulfilled, in
    the order in which they were asked for.

    Examples
    --------
    >>> import torchTensorRef, torch
    >>> x = torchTensorRef.tensorsManager.adopt(torch.ones(3))
    >>> with torchTensorRef.promising():
    ...     y = (x * 2).sum()
    >>> y.proxyInfo.promised, tuple(y.shape)
    (True, ())
    >>> y.fulfil().item()
    6.0
    """
    outer = _scope.get() or Scope(Values())  # a forecast around it sees what is promised inside
    with scoped(outer._replace(values=Values(values))):
        yield


@contextmanager
def scoped(scope: Scope) -> Iterator[None]:
    """Make promises inside as a scope says."""
    tensorsManager.promises = promises
    tensorsManager.residency.books.asked = promises.asked
    with surely(promises.look_on), _scope.entered(scope), making.entered(promises.make):
        promises.look_on()
        yield
