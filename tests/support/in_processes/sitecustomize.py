"""Loaded by Python as it starts, in processes of tests: a fifth of the time of those with torch.

Of the 3.8 s that such a process takes at least, Python's collector took 0.3 s while torch was
imported, finding nothing, and 0.5 s at the end, walking through what all goes with the process.
Who asks how a process ends has it end as for a user (`processes.AS_FOR_A_USER`).
"""

import atexit
import gc
import os

if os.environ.get("PYTEST_CURRENT_TEST"):  # not in the processes in which pytest runs
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # the first comes last
