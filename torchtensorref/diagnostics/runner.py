"""``torchtensorref run``: an unmodified program, under our management from its first import on.

The program finds the process as Python itself would have left it: its own ``sys.argv``,
``__main__``, ``sys.path[0]``, and tracebacks that do not mention us.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import (
    BuiltinImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any
from zipfile import is_zipfile

from .._version import __version__
from ..base.device_names import no_such_device
from ..base.errors import ConfigError, TensorRefError
from ..base.event_sinks import say
from ..base.option_parsers import budget_by_device, path_to_write
from ..base.options import OPTIONS, settings
from ..base.refused_import import BAD_USAGE
from ..devices.registry import REAL_KINDS, known_names
from ..devices.sim.cards import SPECS
from ..inject.inject_to import check_known, injectTo
from ..strategy.choice import make_strategy
from . import children, looking_on
from .arguments import Parser
from .ending import Ending, report_place

#: Options that take no value.
FLAGS = ("-h", "--help", "--no-children", "--live", "--progress")
#: From our options to the settings that they are.
_OF_SAME_NAME = ("device", "budget", "strategy", "placement", "inject_to", "exclude")
SETTING_OF = {name: name for name in _OF_SAME_NAME} | {"trace": "trace_file"}


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
        where = report_place(chosen.report)
        if chosen.timeline is not None:
            chosen.timeline = path_to_write(chosen.timeline, "--timeline")
        apply(chosen)
        if not program:
            raise ConfigError("No program is named. Write `run script.py ...` or `run -m module`.")
        code, main_module = (as_module if program[0] == "-m" else as_script)(program)
        check_known([*injectTo, *injectTo.excluded])  # now its own modules are found, too
    except TensorRefError as error:
        say(f"torchtensorref: {error}")
        return BAD_USAGE
    if not (chosen.no_children or settings.disable):
        children.prepare(variables_of(chosen), budget_is_each=chosen.budget_per_process is not None)
    ending = Ending(where, {"version": __version__, "arguments": list(arguments)})
    if where != "none" and not settings.disable:
        ending.begin()
    if not settings.disable:
        looking_on.begin(chosen)
    try:
        execute(code, main_module)
    except ConfigError as error:
        if not is_of_beginning(error):
            raise
        say(f"torchtensorref: {error}")
        ending.call_off()
        return BAD_USAGE
    return 0


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part our own options from the program and what belongs to it."""
    place = 0
    while place < len(arguments):
        argument = arguments[place]
        if argument == "--":
            return arguments[:place], arguments[place + 1 :]
        if argument in ("-m", "-") or not argument.startswith("-"):
            break
        place += 1 if "=" in argument or argument in FLAGS else 2
    return arguments[:place], arguments[place:]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchtensorref run",
        usage="torchtensorref run [options] (script.py | -m module | -) [its arguments]",
        description="Run a torch program that has never heard of us.",
    )
    add = parser.add_argument
    add("--device", help="the accelerator: cuda, mps, sim, sim:rtx3060, ... (what torch finds)")
    add("--budget", help="most bytes it may hold: 6GiB, 25%%, auto: what is free (auto)")
    add("--budget-per-process", metavar="BUDGET", help="so much for it and each of its children")
    add("--strategy", help="what stays there: flow, lru, genoa, venice, or your own (flow; venice)")
    add("--placement", help="accelerator: no operator is computed at home to save time (auto)")
    add("--inject-to", help="packages whose names taken from torch are rebound")
    add("--exclude", help="modules that keep plain tensors")
    add("--report", default="stderr", help="stderr, none, or a file; .json for numbers (stderr)")
    add("--trace", metavar="FILE", help="write what happened to the blocks there, as JSON lines")
    add("--timeline", metavar="FILE", help="write a Chrome trace there, for ui.perfetto.dev")
    add("--live", action="store_true", help="show a panel, where stderr is a terminal")
    add("--progress", action="store_true", help="write a line to stderr every two seconds")
    add("--no-children", action="store_true", help="leave its Python children plain")
    return parser


# -- setting up -----------------------------------------------------------------------------------


def apply(chosen: argparse.Namespace) -> None:
    """Make the options hold, as if the environment had said so; ConfigError before any does."""
    if chosen.budget_per_process is not None:
        if chosen.budget is not None:
            raise ConfigError("Say --budget (divided) or --budget-per-process, not both.")
        chosen.budget = chosen.budget_per_process
    if chosen.budget is not None:
        chosen.budget = budget_by_device(chosen.budget, chosen.device or settings.device or "")
    values = {
        name: OPTIONS[name].parse(text, f"--{flag.replace('_', '-')}")
        for flag, name in SETTING_OF.items()
        if (text := getattr(chosen, flag)) is not None
    }
    if "device" in values:
        check_device(values["device"])
    if "strategy" in values:
        make_strategy(values["strategy"])
    for name, value in values.items():
        setattr(settings, name, value)
    injectTo.begin_with(values.get("inject_to", ()), values.get("exclude", ()))


def variables_of(chosen: argparse.Namespace) -> dict[str, str]:
    """Say what the command line said as the environment says it."""
    told = {OPTIONS[name].variable: getattr(chosen, flag) for flag, name in SETTING_OF.items()}
    return {variable: text for variable, text in told.items() if text is not None}


def check_device(name: str) -> None:
    """Refuse the name of a device that nobody knows, without torch, which the program imports.

    Several are separated by commas.
    """
    for one in name.split(","):
        kind, _, rest = one.strip().lower().partition(":")
        spec = rest.rpartition(":")[0] if ":" in rest else "" if rest.isdecimal() else rest
        if kind not in ("cpu", *REAL_KINDS) and (kind != "sim" or (spec and spec not in SPECS)):
            raise no_such_device(one, known_names())


# -- becoming the program -------------------------------------------------------------------------


def as_script(program: list[str]) -> tuple[CodeType, ModuleType]:
    """Do what ``python script.py`` does before the first line runs."""
    if program[0] == "-":
        _replace_first_path("")
        sys.argv[:] = program
        code = _compile(sys.stdin.buffer.read(), "<stdin>")
        return code, _main_module("<stdin>", BuiltinImporter, None)
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
    _replace_first_path(os.path.dirname(os.path.realpath(full)))
    sys.argv[:] = program
    if full.endswith(".pyc") or source.startswith(MAGIC_NUMBER):
        return _compiled(full)
    module = _main_module(full, SourceFileLoader("__main__", full), None)
    return _compile(source, full), module


def _compiled(full: str) -> tuple[CodeType, ModuleType]:
    loader = SourcelessFileLoader("__main__", full)
    try:
        code = loader.get_code("__main__")
    except (ImportError, EOFError, ValueError) as error:
        raise ConfigError(f"{full!r} has no code of this Python: {error}", name=full) from None
    assert code is not None
    return code, _main_module(full, loader, None)


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


def is_of_beginning(error: ConfigError) -> bool:
    """Whether what was said before the program began turned out wrong, at its first tensor.

    A device that is not there is found out so: torch is not asked before the program imports it.
    """
    manager = getattr(sys.modules.get("torchTensorRef.memory.manager"), "tensorsManager", None)
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return manager is not None and manager._open.__func__.__code__ in codes


def _hide_us_from(error: BaseException, trace: TracebackType | None) -> None:
    """Have the hook that prints `error` show only what is the program's."""
    program_hook = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, whole: Any) -> None:
        if raised is error:
            raised.__traceback__ = whole = trace
        program_hook(kind, raised, whole)

    sys.excepthook = show
