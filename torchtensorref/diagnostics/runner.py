"""``torchtensorref run``: an unmodified program, under our management from its first import on.

The program finds the process as Python itself would have left it: its own ``sys.argv``,
``__main__``, ``sys.path[0]``, and tracebacks that do not mention us.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any
from zipfile import is_zipfile

from ..base.errors import ConfigError, TensorRefError, did_you_mean, nearest
from ..base.options import OPTIONS, settings
from ..devices.registry import REAL_KINDS
from ..devices.sim.spec import SPECS
from ..inject.inject_to import injectTo
from ..strategy.choice import make_strategy
from . import children

#: Exit status of Python itself for arguments it does not understand.
BAD_USAGE = 2
#: Options that take no value.
FLAGS = ("-h", "--help", "--no-children")
#: Options of ours that children find in their environment, by the option that it sets.
_TOLD = ("device", "budget", "strategy", "inject_to", "exclude")


def main(arguments: Sequence[str]) -> int:
    """Read the options, set everything up, and become the program.

    Returns
    -------
    int
        0 when the program ends by itself; what it raises, `SystemExit` included, passes through.
    """
    ours, program = split(list(arguments))
    chosen = _parser().parse_args(ours)
    try:
        apply(chosen)
        if not program:
            raise ConfigError("No program is named. Write `run script.py ...` or `run -m module`.")
        code, main_module = (as_module if program[0] == "-m" else as_script)(program)
    except TensorRefError as error:
        print(f"torchtensorref: {error}", file=sys.stderr)
        return BAD_USAGE
    if not (chosen.no_children or settings.disable):
        children.prepare(variables_of(chosen), budget_is_each=chosen.budget_per_process is not None)
    if chosen.report != "none" and not settings.disable:
        atexit.register(write_report, chosen.report, os.getpid())
    execute(code, main_module)
    return 0


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part our own options from the program and what belongs to it."""
    place = 0
    while place < len(arguments):
        argument = arguments[place]
        if argument == "-m" or not argument.startswith("-"):
            break
        place += 1 if "=" in argument or argument in FLAGS else 2
    return arguments[:place], arguments[place:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtensorref run",
        usage="torchtensorref run [options] (script.py | -m module) [its arguments]",
        description="Run a torch program that has never heard of us.",
    )
    add = parser.add_argument
    add("--device", help="the accelerator: cuda, mps, sim, sim:rtx3060, ... (what torch finds)")
    add("--budget", help="most bytes it may hold: 6GiB, 25%% (what is free)")
    add("--budget-per-process", metavar="BUDGET", help="so much for it and each of its children")
    add("--strategy", help="what stays there: a strategy's name")
    add("--inject-to", help="packages whose names taken from torch are rebound")
    add("--exclude", help="modules that keep plain tensors")
    add("--report", default="stderr", help="stderr, none, or a file; .json for numbers (stderr)")
    add("--trace", metavar="FILE", help="write what happened to the blocks there, as JSON lines")
    add("--no-children", action="store_true", help="leave its Python children plain")
    return parser


# -- setting up -----------------------------------------------------------------------------------


def apply(chosen: argparse.Namespace) -> None:
    """Make the options hold, as if the environment had said so; ConfigError before any does."""
    if chosen.budget_per_process is not None:
        if chosen.budget is not None:
            raise ConfigError("Say --budget (divided) or --budget-per-process, not both.")
        chosen.budget = chosen.budget_per_process
    values = {
        name: OPTIONS[name].parse(text)
        for name in _TOLD
        if (text := getattr(chosen, name)) is not None
    }
    if "device" in values:
        check_device(values["device"])
    if "strategy" in values:
        make_strategy(values["strategy"])
    if chosen.trace is not None:
        values["trace_file"] = chosen.trace
    for name, value in values.items():
        setattr(settings, name, value)
    injectTo.extend(values.get("inject_to", ()))
    injectTo.exclude(*values.get("exclude", ()))


def variables_of(chosen: argparse.Namespace) -> dict[str, str]:
    """Say what the command line said as the environment says it."""
    told = {OPTIONS[name].variable: getattr(chosen, name) for name in _TOLD}
    told[OPTIONS["trace_file"].variable] = chosen.trace
    return {variable: text for variable, text in told.items() if text is not None}


def check_device(name: str) -> None:
    """Refuse the name of a device that nobody knows, without torch, which the program imports."""
    kind, _, rest = name.strip().lower().partition(":")
    spec = rest.rpartition(":")[0] if ":" in rest else "" if rest.isdecimal() else rest
    if kind in ("cpu", *REAL_KINDS) or (kind == "sim" and (not spec or spec in SPECS)):
        return
    known = ["cpu", *REAL_KINDS, "sim", *(f"sim:{spec}" for spec in SPECS)]
    raise ConfigError(
        f"There is no device {name!r}. {did_you_mean(name, known)}",
        name=name,
        known=tuple(known),
        nearest=nearest(name, known),
    )


# -- becoming the program -------------------------------------------------------------------------


def as_script(program: list[str]) -> tuple[CodeType, ModuleType]:
    """Do what ``python script.py`` does before the first line runs."""
    path = Path(program[0])
    if path.is_dir() or is_zipfile(path):
        _replace_first_path(str(path))
        spec = PathFinder.find_spec("__main__", [str(path)])
        if spec is None:
            raise ConfigError(f"can't find '__main__' module in {program[0]!r}", name=str(path))
        code, module = _as_main_of(spec, program)
        sys.argv[:] = program
        return code, module
    full = os.path.abspath(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"can't open file {full!r}: [Errno {error.errno}] {error.strerror}", name=str(path)
        ) from None
    _replace_first_path(os.path.dirname(full))
    sys.argv[:] = program
    module = _main_module(full, SourceFileLoader("__main__", full), None)
    return _compile(source, full), module


def as_module(program: list[str]) -> tuple[CodeType, ModuleType]:
    """Do what ``python -m module`` does before the first line runs."""
    if len(program) < 2:
        raise ConfigError("-m needs the name of a module.")
    _replace_first_path(os.getcwd())
    sys.argv[:] = ["-m", *program[2:]]
    spec = _find(program[1], program[1])
    if spec.submodule_search_locations is not None:
        spec = _find(f"{program[1]}.__main__", program[1])
    return _as_main_of(spec, program[1:])


def _find(name: str, asked: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{asked!r} cannot be imported: {error}", name=asked) from None
    if spec is None or spec.loader is None:
        raise ConfigError(f"There is no module {name!r} to run.", name=asked)
    return spec


def _as_main_of(spec: ModuleSpec, program: list[str]) -> tuple[CodeType, ModuleType]:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ConfigError(f"{spec.name!r} has no Python code to run.", name=spec.name)
    sys.argv[:] = [spec.origin or program[0], *program[1:]]
    return code, _main_module(spec.origin, loader, spec)


def _main_module(file: str | None, loader: Any, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update(
        __file__=file,
        __cached__=spec.cached if spec else None,
        __loader__=loader,
        __package__=spec.parent if spec else None,
        __spec__=spec,
        __builtins__=builtins,
    )
    return module


def _replace_first_path(folder: str) -> None:
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = folder


def _compile(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        _hide_us_from(error, None)
        raise


def execute(code: CodeType, module: ModuleType) -> None:
    """Run a program's code as ``__main__``, which it stays: threads and exit handlers need it."""
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        _hide_us_from(error, trace)
        raise


def _hide_us_from(error: BaseException, trace: TracebackType | None) -> None:
    """Have the hook that prints `error` show only what is the program's."""
    program_hook = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, whole: Any) -> None:
        if raised is error:
            raised.__traceback__ = whole = trace
        program_hook(kind, raised, whole)

    sys.excepthook = show


# -- afterwards -----------------------------------------------------------------------------------


def write_report(where: str, pid: int) -> None:
    """Say what happened, where the user asked for it; a failure to do so is told, never raised."""
    if os.getpid() != pid:
        return  # a forked child that ended as a program does
    manager = getattr(sys.modules.get("torchTensorRef.memory.manager"), "tensorsManager", None)
    try:
        text = report_of(manager, as_json=where.endswith(".json"))
        if where == "stderr":
            print(text, file=sys.stderr, flush=True)
        else:
            Path(where).write_text(f"{text}\n")
    except Exception as error:
        print(f"torchtensorref: no report: {type(error).__name__}: {error}", file=sys.stderr)


def report_of(manager: Any, *, as_json: bool) -> str:
    """Describe what the manager did for the program, as text or as JSON."""
    opened = manager is not None and manager._residency is not None
    born = children.children_of_this_run()
    if as_json:
        stats = manager.stats() if opened else {}
        return json.dumps({**stats, "children": born} if born else stats)
    if opened:
        first = manager.report()
    else:
        first = "torchTensorRef: the program made no tensor" + (" itself." if born else ".")
    return "\n".join([first, *children.lines_of(born)])
