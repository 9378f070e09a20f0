"""Where bytes are: blocks and their replicas, the budget, eviction, prefetch, and the manager.

Nobody above this folder changes a block. Nothing here knows what an operator is.

May import: base, operators, strategy, devices.
"""
