"""``torchtensorref build``: build the library in C++ for the torch and the Python at hand, now."""

from __future__ import annotations

import time

from ..base import core_build


def main(*, quiet: bool = False) -> int:
    """Build it, or find it built; 0 if it is there, 1 if not, for a reason that is said."""
    wanted = core_build.of_this_process()
    if wanted.library.exists():
        text = "It is built already."
    else:
        if not (quiet or wanted.obstacle):
            print("Building the library in C++; this takes about a minute ...", flush=True)
        start = time.monotonic()
        complaint = core_build.build(wanted)
        text = complaint or f"Built in {time.monotonic() - start:.0f} s. The next start uses it."
    if not quiet:
        print(text)
    return 0 if wanted.library.exists() else 1
