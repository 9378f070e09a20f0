"""One call of an operator as a middleware sees it, and may change it before it runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...base.errors import ConfigError, did_you_mean, nearest
from ...devices.base import Device
from ...memory.manager import tensorsManager
from ...memory.ref import TensorRef
from ...operators.plan import OpPlan

#: What they write is not read before, and no schema says so.
_OVERWRITING = (
    "aten.copy_",
    "aten.fill_",
    "aten.zero_",
    "aten._foreach_copy_",
    "aten._foreach_zero_",
)


class SeenOperand(NamedTuple):
    """A TensorRef among the arguments, described; describing moves nothing."""

    #: As the program calls it, such as ``model.layers.3.mlp.up_proj.weight``; else its block, b7.
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Of its block, which all its aliases share.
    nbytes: int
    #: Where its bytes are: the name of a device.
    device: str
    is_written: bool


class SeenOperator:
    """One call of an operator.

    Attributes
    ----------
    name : str
        The operator: ``aten.addmm.default``. Composite ones come in their parts.
    args, kwargs
        Its arguments; `before` may give others, but for what the operator writes.
    """

    def __init__(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = plan.name
        self.args = args
        self.kwargs = kwargs
        #: Where a middleware has placed it; None: where the strategy says.
        self.placed: Device | None = None
        self.has_answer = False
        self.answered: Any = None
        self._plan = plan
        self._asked = args, kwargs

    # -- looking --------------------------------------------------------------------------------

    @functools.cached_property
    def refs(self) -> list[Any]:
        """The TensorRefs among the arguments, in their order."""
        return [leaf for leaf in tree_leaves(self._asked) if isinstance(leaf, TensorRef)]

    @functools.cached_property
    def operands(self) -> tuple[SeenOperand, ...]:
        """The TensorRefs among the arguments, described."""
        written = {id(leaf) for leaf in self._written(*self._asked)}
        return tuple(
            SeenOperand(
                tensorsManager.names.of_operand(ref._ttr_block) or ref._ttr_block.name,
                tuple(ref.size()),
                ref.dtype,
                ref._ttr_block.nbytes,
                tensorsManager.ownership.where(ref._ttr_block).name,
                id(ref) in written,
            )
            for ref in self.refs
        )

    @functools.cached_property
    def module(self) -> str:
        """Path of the module that calls it, such as ``model.layers.3.mlp.up_proj``; else "".

        In a backward pass, which no module runs, the one that its parameters belong to.
        """
        return module_here(ref._ttr_block for ref in self.refs)

    def read(self) -> list[torch.Tensor]:
        """Return the tensors that it is given and does not write, plain and sparse ones, too."""
        given = self.args, self.kwargs
        written = {id(leaf) for leaf in self._written(*given)}
        leaves = tree_leaves(given)
        return [x for x in leaves if isinstance(x, torch.Tensor) and id(x) not in written]

    def rewritten(self) -> list[torch.Tensor]:
        """Return the tensors that it writes in place or in part, not those that it overwrites."""
        plan = self._plan
        if plan.overwrites or plan.name.startswith(_OVERWRITING):
            return []
        overwritten = {one.name for one in plan.op._schema.arguments if one.is_out}
        names = [name for name in plan.write_names if name not in overwritten]
        leaves = tree_leaves([plan.argument(name, self.args, self.kwargs) for name in names])
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    def _written(self, args: Any, kwargs: Any) -> list[Any]:
        names = self._plan.write_names
        return tree_leaves([self._plan.argument(name, args, kwargs) for name in names])

    # -- changing -------------------------------------------------------------------------------

    @property
    def device(self) -> str | None:
        """Where it has been placed: the name of a device; None leaves it to the strategy.

        What has to run in one place runs there all the same: random numbers of the host's
        generator, operands that the program has put on an accelerator itself.
        """
        return None if self.placed is None else self.placed.name

    @device.setter
    def device(self, name: str | None) -> None:
        self.placed = None if name is None else device_called(name)

    def answer(self, value: Any) -> None:
        """Give the result; the operator does not run.

        Raises
        ------
        ConfigError
            What the operator returns are its own operands, or views of them.
        """
        self.answered = self.checked(value, "answer() was given")
        self.has_answer = True

    def checked(self, value: Any, said: str) -> Any:
        """Adopt what is to be the result; ConfigError where torch could not take it for that."""
        if self._plan.writes or self._plan.may_alias or self._plan.is_true_view:
            raise ConfigError(
                f"{said} another result for {self.name}, which returns its own operands, or views "
                "of them; torch would go on with those. Change what is in them instead."
            )
        returns = [str(result.type) for result in self._plan.op._schema.returns]
        if returns == ["Tensor"] and not isinstance(value, torch.Tensor):
            raise ConfigError(f"{said} {value!r} for {self.name}, which returns a tensor.")
        return tensorsManager.adopt(value)

    def check(self) -> None:
        """Refuse what is no arguments, and others in the place of those that it writes."""
        if not isinstance(self.args, (tuple, list)) or not isinstance(self.kwargs, dict):
            raise ConfigError(
                f"A middleware has made op.args {self.args!r} and op.kwargs {self.kwargs!r} of "
                f"{self.name}; they are a tuple and a dictionary. Write op.args = (x,)."
            )
        if (self.args, self.kwargs) is self._asked or not self._plan.writes:
            return
        before, now = self._written(*self._asked), self._written(self.args, self.kwargs)
        if len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True)):
            raise ConfigError(
                f"{self.name} writes an argument that a middleware has exchanged: the program "
                "would never see what is written. Exchange only what is read."
            )

    def __repr__(self) -> str:
        names = ", ".join(operand.name for operand in self.operands)
        where = f" in {self.module}" if self.module else ""
        return f"<SeenOperator {self.name}({names}){where}>"


def device_called(name: str) -> Device:
    """Return the device in use of that name: "cpu", "cuda:0", or "cuda" for the first."""
    books = tensorsManager.residency.books
    known = {device.name: device for device in (books.host, *books.accelerators)}
    asked = str(name).strip().lower()
    found = known.get(asked) or known.get(f"{asked}:0")
    if found is None:
        found = next((d for d in books.accelerators if d.kind == asked), None)
    if found is None:
        raise ConfigError(
            f"An operator cannot be placed on {name!r}, which is not in use. "
            f"{did_you_mean(asked, known)} Place it on one of these, take the middleware that "
            "places it off the list, or set tensorsManager.device to a list that has it.",
            name=asked,
            known=tuple(known),
            nearest=nearest(asked, known),
        )
    return found


def _self_of(frame: FrameType) -> Any:
    """Return what a frame calls `self`, and leave nothing behind that holds its other locals.

    Before Python 3.13 a frame keeps the dictionary that it gives, and with it tensors that the
    function has let go of meanwhile. It is the one that `locals()` gives, too: where the program
    holds it, it stays whole, and what the program has put into it stays anyway. A debugger may be
    about to write that dictionary back.
    """
    there = frame.f_locals
    found = there.get("self")
    if sys.version_info < (3, 13) and sys.gettrace() is None:
        is_alone = sys.getrefcount(there) <= _ALONE
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            # Whoever asks the frame again gets them anew; and one that held itself would live on.
            if is_alone or there.get(name) is there:
                there.pop(name, None)
    return found


#: References to the locals that nobody else has: the frame's, ours, and that of who counts.
_ALONE = 3


def module_here(blocks: Iterable[Any]) -> str:
    """Return the path of the module whose code called us; else that of the first named operand."""
    frame: Any = sys._getframe(1)
    inner = outer = None
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module = _self_of(frame)
            if isinstance(module, nn.Module):
                if code.co_name == "__init__":
                    return ""  # it is being made, and has no place in a model yet
                inner, outer = module if inner is None else inner, module
        frame = frame.f_back
    if inner is not None:
        return tensorsManager.names.of_module(inner, outer)
    for block in blocks:
        name = tensorsManager.names.of_operand(block)
        if name:
            return name.rpartition(".")[0]
    return ""
