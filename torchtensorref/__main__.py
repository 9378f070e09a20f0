"""The command line: ``torchtensorref`` and ``python -m torchTensorRef``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .base.errors import ConfigError, PromisedError, StrategyError
from .base.event_sinks import say
from .diagnostics import core_library, environment, forecasting, runner, self_test
from .diagnostics.arguments import Parser
from .diagnostics.traces import command as traces


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the name of the program; the process's own if not given.

    Returns
    -------
    int
        The exit status: that of the program for `run`, 0 for success, 1 for a failed check, 2 for
        an argument that is not understood.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        # Not argparse's: what follows the script is the script's, whatever it looks like.
        return runner.main(given[1:])
    chosen = _parser().parse_args(given)
    try:
        if chosen.command == "trace":
            status = traces.main(chosen)
        elif chosen.command == "forecast":
            status = forecasting.main(chosen)
        elif chosen.command == "check":
            status = self_test.main(chosen.device)
        elif chosen.command == "build":
            status = core_library.main(quiet=chosen.quiet)
        else:
            status = environment.main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (ConfigError, PromisedError, StrategyError) as error:
        say(f"torchtensorref: {error}")
        return 2
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            say(f"torchtensorref: what was found could not be written: {error}")
        # Python flushes once more when it ends, and would complain in words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchtensorref",
        description="Run torch programs on accelerators smaller than their tensors.",
    )
    parser.add_argument("--version", action="version", version=f"torchTensorRef {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("run", help="run an unmodified program: run --help tells more")
    commands.add_parser("env", help="print what to paste into a bug report")
    check = commands.add_parser("check", help="use each device and compare: PASS or FAIL")
    check.add_argument("--device", action="append", help="only this one, or these: cuda,sim")
    traces.add_parser(commands)
    forecasting.add_parser(commands)
    build = commands.add_parser("build", help="build the library in C++ that runs operators, now")
    build.add_argument("--quiet", action="store_true", help="say nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
