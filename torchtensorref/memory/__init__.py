"""Where bytes are: blocks and their replicas, the budget, eviction, prefetch, and the manager.

Nobody above this folder changes a block. Nothing here knows what an operator is.

May import: base, operators, strategy, devices.
"""

# First: what torch's import calls (inject/hooks.py) needs the modules of this folder whole.
import torch as torch
