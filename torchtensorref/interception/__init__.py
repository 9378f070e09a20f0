"""One operator from torch's call to its result: `entry.py` first, top-down.

May import: base, operators, strategy, devices, memory.
"""
