"""What a program will do before it does it: promises, the record they leave, and its replay.

A *promise* is a TensorRef without bytes (`promising.py`). What is done with promises leaves a
`Record` (`record.py`): which blocks each operator reads, writes and makes, and what it costs. A
`Replayer` (`replayer.py`) lets a residency of its own, with a simulated device that holds no bytes,
decide as it would decide for the program; `forecast.py` asks that of devices, budgets, strategies.

May import: base, operators, strategy, devices, memory, interception.
"""
