"""What a program is told that asks a promise for a value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..base.errors import ConfigError, PromisedError, did_you_mean, nearest

__all__ = ["POLICIES", "Values", "where_asked"]

#: What torch calls the operators by which programs ask for numbers, and what programs call them.
SHORT_NAMES = {"_local_scalar_dense": "item"}
#: What asks for bytes and is no operator, so that no answer can be given for it by name.
A_READ = "a read"
#: Operands made up for an answer take at most so much.
MADE_UP_NBYTES = 64 << 20
#: With "compute or zeros" what a value depends on takes at most so much: masks and positions do.
COMPUTED_NBYTES = 16 << 20


class Values:
    """Answers to questions for values: by operator, or made up for all of them.

    Parameters
    ----------
    given : mapping, str, int or None
        By the name of the operator (`"item"`, `"nonzero"`): the answer, or a callable that is given
        the operands and returns it. Or a policy: `"zeros"`, `"random"` (seed 0), a number (the
        seed), `"compute"`. None answers nothing.

    Raises
    ------
    ConfigError
        There is no such policy, or it is nothing of all this.
    """

    def __init__(self, given: Mapping[str, Any] | str | int | None = None) -> None:
        if not isinstance(given, (Mapping, str, int, type(None))) or isinstance(given, bool):
            raise ConfigError(
                f"values={given!r} answers nothing. Write {', '.join(map(repr, POLICIES))}, a "
                "whole number (a seed), or a mapping by operator such as {'item': 3}."
            )
        self.by_name: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        _check_names(self.by_name)
        self.policy = given if isinstance(given, str) else None
        seed = given if isinstance(given, int) else 0
        if isinstance(given, int):
            self.policy = "random"
        if self.policy is not None and self.policy not in POLICIES:
            raise ConfigError(
                f"There is no policy {self.policy!r} for values. "
                f"{did_you_mean(self.policy, POLICIES)} Or give a mapping by operator.",
                name=self.policy,
                known=POLICIES,
                nearest=nearest(self.policy, POLICIES),
            )
        self._generator = torch.Generator().manual_seed(seed) if self.policy == "random" else None
        #: File and line of the last question to which an answer was made up; "": none was.
        self.made_up_at = ""

    @property
    def limit_nbytes(self) -> int | None:
        """What a computation may use at most; None: anything."""
        return COMPUTED_NBYTES if self.policy == "compute or zeros" else None

    @property
    def computes(self) -> bool:
        """Whether a value is computed where that can be done."""
        return self.policy in ("compute", "compute or zeros")

    def answer(self, name: str, operands: list[Any]) -> tuple[Any] | None:
        """Return the answer given for an operator, in a tuple; None without one."""
        short = short_name(name)
        if short not in self.by_name:
            return None
        answer = self.by_name[short]
        return (answer(*operands) if callable(answer) else answer,)

    def made_up(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Make a plain operand for an answer; None where nothing is made up, or it is too large."""
        if self.policy not in ("zeros", "random", "compute or zeros"):
            return None
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
        if extent * dtype.itemsize > MADE_UP_NBYTES:
            return None
        self.made_up_at = where_asked()
        with torch._C.DisableTorchFunction():
            # Elements may share memory, which no kernel fills: it is filled as a row.
            plain = _empty(extent, dtype).zero_()
            if self._generator is not None:
                _fill(plain, self._generator)
            return plain.as_strided_(size, stride)


def _check_names(names: Iterable[object]) -> None:
    """Refuse what is no text, and what is hardly the name of an operator that there is.

    A name like no other passes: its operator may be registered later.
    """
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"values has an answer for {name!r}, which is no text. Name the operators that "
                "ask, as in {'item': 3}.",
                name=str(name),
            )
    if all(hasattr(torch.ops.aten, str(name)) or name in SHORT_NAMES.values() for name in names):
        return
    known = {short_name(name) for name in torch._C._dispatch_get_all_op_names()}
    for name in map(str, names):
        close = nearest(name, known, likeness=0.75)
        if name not in known and close is not None:
            raise ConfigError(
                f"values has an answer for {name!r}, and no operator is called so. Did you mean "
                f"{close!r}?",
                name=name,
                nearest=close,
            )


def _empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a plain row, with no function that we have a hand in."""
    made: torch.Tensor = torch._C._VariableFunctions.empty_strided((count,), (1,), dtype=dtype)
    return made


def _fill(row: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a row with random numbers: normal ones, or 0 and 1 where it has no others."""
    if row.is_complex():
        row = torch._C._VariableFunctions.view_as_real(row)
    if not row.is_floating_point():  # nor are all of these drawn by torch
        row.copy_(_empty(len(row), torch.uint8).random_(0, 2, generator=generator))
    elif row.element_size() == 1:
        row.copy_(_empty(len(row), torch.float32).normal_(generator=generator))
    else:
        row.normal_(generator=generator)


#: What `values` may say for all questions.
POLICIES = ("compute", "compute or zeros", "random", "zeros")


def short_name(name: str) -> str:
    """Return what a program calls an operator: "item" for `aten._local_scalar_dense.default`."""
    packet = name.split("::")[-1].removeprefix("aten.").partition(".")[0]
    return SHORT_NAMES.get(packet, packet)


def has_no_value(op: str, why: str) -> PromisedError:
    """Make the error that says who asks for a value, where, and what to do."""
    name, where = short_name(op), where_asked()
    by_name = "" if op == A_READ else f"{{{name!r}: ...}} or "
    return PromisedError(
        f"{name} at {where} needs a value, and {why}. Call fulfil() on it first, or answer: "
        f"promising(values=...) with {by_name}'zeros', 'random', 'compute'.",
        op=op,
        where=where,
    )


def cannot_be_written(op: str, block: str, why: str) -> PromisedError:
    """Make the error of who writes what somebody outside would not see written."""
    name, where = short_name(op), where_asked()
    return PromisedError(
        f"{name} at {where} writes {block}, which is held outside ({why}), where a promise cannot "
        "be seen. Let go of what holds it, write a clone() of it instead, or have it computed at "
        "once: promising(values='compute').",
        op=op,
        where=where,
    )


def where_asked() -> str:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("torch", "torchTensorRef"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
