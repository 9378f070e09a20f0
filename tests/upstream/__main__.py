"""``python -m tests.upstream NAME...``: run libraries' own tests, compare, write the page."""

from __future__ import annotations

import argparse
import sys

from .page import note, write
from .runs import compare
from .suites import BUDGETS, SUITES


def main() -> int:
    """Run the suites that are named, else all that are not long; 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SUITES))
    parser.add_argument("--long", action="store_true", help="also those that take long")
    chosen = parser.parse_args()
    names = chosen.names
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in the table; there are {', '.join(SUITES)}")
    differing = 0
    usual = [name for name, suite in SUITES.items() if chosen.long or not suite.is_long]
    for name in names or usual:
        compared = compare(SUITES[name])
        write(note(compared))
        counts = ", ".join(f"{count} {kind}" for kind, count in compared.plain.counts.items())
        print(f"{name}: {counts or 'no tests'}; {compared.plain.took_s:.0f} s", flush=True)  # noqa: T201
        for budget in BUDGETS:
            found = compared.differences(budget)
            differing += len(found)
            print(f"  {budget}: {len(found)} differ; {compared.ours[budget].took_s:.0f} s")  # noqa: T201
            for test, text in list(found.items())[:20]:
                print(f"    {test}: {text}")  # noqa: T201
        sys.stdout.flush()
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
