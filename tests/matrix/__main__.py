"""``python -m tests.matrix NAME...``: the tests on other versions of torch and Python."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from . import page
from .cells import CELLS
from .runs import in_words, python_of, run, whole


def main() -> int:
    """Run the cells that are named, all of them if none is; 1 if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CELLS))
    parser.add_argument(
        "--python", type=Path, help="an interpreter that has all that is needed, for one NAME"
    )
    parser.add_argument(
        "--whole", type=Path, metavar="RECORD", help="what the plugin wrote of all tests, noted"
    )
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CELLS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in the table; there are {', '.join(CELLS)}")
    if options.whole:
        if not options.python:
            parser.error("--whole goes with --python")
        page.note_whole(whole(options.python, options.whole))
        page.write()
        return 0
    if options.python and len(options.names) != 1:
        parser.error("--python goes with one name")
    is_wrong = False
    for name in options.names or CELLS:
        try:
            python = options.python or python_of(name, CELLS[name])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: cannot be set up: {error}", flush=True)  # noqa: T201
            is_wrong = True
            continue
        done = run(python)
        if not done.torch.startswith(CELLS[name].torch):
            parser.error(f"{python} has torch {done.torch}, and not {CELLS[name].torch}")
        page.note(name, done)
        page.write()
        is_wrong |= bool(done.failures or done.broken_off)
        print(in_words(name, done), flush=True)  # noqa: T201
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
