"""The tree of errors, and the words that help a reader out of one.

Errors that must also be an error of torch live beside what raises them
(`OutOfBudgetError` in `budget.py`), because this module never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "ConfigError",
    "ExposedError",
    "InvariantError",
    "LostError",
    "StrategyError",
    "TensorRefError",
    "TransferError",
    "UnsupportedOpError",
    "did_you_mean",
    "nearest",
]


def _rebuild(
    kind: type[TensorRefError], args: tuple[object, ...], facts: dict[str, object]
) -> TensorRefError:
    """Make an error again from its pickle, whatever its constructor asks for."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class TensorRefError(Exception):
    """Anything this library raises on purpose.

    Cause: see the class that was raised. Catch this one to catch them all; what torch
    itself raises for a wrong program (shapes, dtypes) is not wrapped and passes as it is.

    Cure: read the message. It says what happened, with numbers, and what to do next.
    The same facts are attributes of the error.

    Parameters
    ----------
    message : str
        What happened, how much, and what to do.
    **facts : object
        What a program may want to read; each becomes an attribute.

    Notes
    -----
    Survives pickling with its facts, also in subclasses with another constructor.
    """

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ConfigError(TensorRefError, ValueError):
    """A setting has a name or a value that we do not know.

    Cause: a misspelt device, strategy, option or `TTR_` variable, a budget such as
    `"6 gigs"`, or a device that this build of torch cannot use.

    Cure: take the spelling that the message suggests. It is raised before anything is
    changed, so the old setting still holds.
    """

    name: str = ""  # what was given
    known: tuple[str, ...] = ()  # what would have been understood
    nearest: str | None = None  # the known name that looks most like it


class NanError(TensorRefError, FloatingPointError):
    """An operator has made a NaN of operands that had none (`NanGuard`).

    Cause: a number too large for its dtype, 0/0, the logarithm of a negative number, a mask that
    leaves nothing.

    Cure: look at the operator and the module that the message names, and at the operands' values
    there. The result has been thrown away.
    """

    operator: str = ""  # its full name
    module: str = ""  # the path of the module that called it, where that is known


class StrategyError(TensorRefError):
    """A strategy does not keep its contract.

    Cause: when it is chosen, a method is missing or takes other arguments. While the
    program runs, a method raised; the error's cause is what it raised.

    Cure: the message names the strategy, its file and the point. The operator that was
    about to run has not run and nothing has been changed, so the program may go on with
    `tensorsManager.strategy = "lru"`. An answer that cannot be used is no error but a
    warning: the built-in answer is taken instead.
    """

    strategy: str = ""  # its name
    where: str = ""  # the file that defines it
    method: str = ""  # what was asked, if it was being asked
    answer: str = ""  # what it did, in short


class UnsupportedOpError(TensorRefError, NotImplementedError):
    """An operator cannot be run on managed tensors anywhere, not even on the host.

    Cause: no kernel exists for these dtypes and devices, or the operator needs raw memory
    that cannot be handed out; or a graph of kernels was to be captured, which keeps addresses.

    Cure: release the operands first (`tensorsManager.release`), or run that part of the
    program inside `torchTensorRef.disabled()`. If plain torch runs it, it is our bug.
    """

    op: str = ""  # the operator, as torch names it
    device: str = ""  # where it was tried last


class TransferError(TensorRefError, RuntimeError):
    """A copy between two devices failed.

    Cause: the device was lost, its driver refused the copy, or the copy was made to fail
    with `TTR_FAULTS`.

    Cure: nothing is lost. The replica copied from is untouched and remains the valid one,
    so the operation may be tried again. If it repeats, `python -m torchTensorRef check`
    tells which device is at fault.
    """

    source: str = ""  # the device copied from
    destination: str = ""  # the device copied to
    nbytes: int = 0  # how much was asked for


class ExposedError(TensorRefError, RuntimeError):
    """Something was asked that cannot be done while a raw pointer is out.

    Cause: the tensor gave away its address (`numpy()`, `data_ptr()`, DLPack, shared
    memory), so its bytes have to stay where they are as long as that object lives.

    Cure: delete the exported array first, or work on a `clone()`.
    """

    block: str = ""  # its short name, as in stories
    device: str = ""  # where its bytes are held


class LostError(TensorRefError, RuntimeError):
    """The only copy of some bytes was lost: what is asked for does not exist any more.

    Cause: an error that may come at any instruction (`MemoryError`, one that another thread has
    sent with `PyThreadState_SetAsyncExc`) came while the bytes were being moved. A signal, such
    as Ctrl-C, never does this. Or, on the path in Python, the `__del__` of an object in a cycle
    uses a TensorRef that the cycle holds.

    Cure: make the tensor again, or load it; break the cycle. All others are as they were.
    """

    block: str = ""  # its short name, as in stories


class PromisedError(TensorRefError, RuntimeError):
    """A value was asked of a promise, which has none yet.

    Cause: inside `torchTensorRef.promising()`, or of a promise made there, a program reads a number
    (`item`, `tolist`, `numpy`, `if x:`), or runs an operator whose result has a shape that depends
    on values (`nonzero`, `unique`, a mask as an index).

    Cure: `ref.fulfil()` computes it, where what it depends on has values. Or answer:
    `promising(values={"item": 3})`, or a policy for all: `values="zeros"`, `"random"`, `"compute"`.
    """

    op: str = ""  # the operator that asked
    where: str = ""  # file and line of the program


class InvariantError(TensorRefError):
    """The books are wrong: this is a bug in torchTensorRef, not in your program.

    Cause: `tensorsManager.check()`, an illegal change of state, or the simulated device
    found two facts that contradict each other.

    Cure: please report it with the whole text, which holds the story of the block.
    `TTR_CHECK=2` finds the first operator after which it is true; `TTR_DISABLE=1` lets the
    program run without us.
    """

    violations: tuple[str, ...] = ()  # each broken rule as a sentence
    story: tuple[str, ...] = ()  # what happened to the block before


#: More names than that are not listed in a message: only those that look most like the given one.
MOST_LISTED, LISTED_OF_MANY = 12, 4


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Find the known name that looks most like a given one.

    Parameters
    ----------
    name : str
        What was written; compared without regard to case.
    known : Iterable[str]
        The names that exist.
    likeness : float, optional
        How much alike they must be at least, up to 1.

    Returns
    -------
    str or None
        One of `known`, or None if nothing is close enough to be worth suggesting.

    Examples
    --------
    >>> nearest("LRUU", ["genoa", "lru", "flow"])
    'lru'
    """
    import difflib  # only when something went wrong: importing us has to stay cheap

    by_fold = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=likeness)
    return by_fold[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say what is known, and which of it was probably meant.

    Parameters
    ----------
    name : str
        What was written.
    known : Iterable[str]
        The names that exist.

    Returns
    -------
    str
        One or two sentences, without a space around them, for the end of a message.

    Examples
    --------
    >>> did_you_mean("flwo", ["genoa", "lru", "flow"])
    "Did you mean 'flow'? Known: flow, genoa, lru."
    """
    names: Sequence[str] = sorted(set(known))
    listed = f"Known: {', '.join(most_alike(name, names))}." if names else "None is known."
    close = nearest(name, names)
    return listed if close is None else f"Did you mean {close!r}? {listed}"


def most_alike(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names in their order; of many, those that look most like a given one.

    Parameters
    ----------
    name : str
        What was written.
    known : sequence of str
        The names that exist.

    Returns
    -------
    list of str
        What to list in a message; the last of it says how many are left out.

    Examples
    --------
    >>> most_alike("x1", ["x10", *(f"card{n}" for n in range(16)), "x2", "x3"])
    ['x10', 'card1', 'x2', 'x3', 'and 15 more']
    """
    if len(known) <= MOST_LISTED:
        return list(known)
    import difflib

    folded = name.casefold()
    likeness = {one: difflib.SequenceMatcher(None, folded, one.casefold()).ratio() for one in known}
    alike = sorted(known, key=likeness.__getitem__, reverse=True)[:LISTED_OF_MANY]
    return [*(one for one in known if one in alike), f"and {len(known) - len(alike)} more"]
