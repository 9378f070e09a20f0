"""The coherence core: which device holds the bytes of a block, and whether they are current.

Pure bookkeeping. Nothing here copies a byte or decides anything.
"""

from .block import Block, Exposure, Replica
from .states import CLEAN, DIRTY, FILLING, INVALID, READABLE, ReplicaState
from .table import Table

__all__ = [
    "CLEAN",
    "DIRTY",
    "FILLING",
    "INVALID",
    "READABLE",
    "Block",
    "Exposure",
    "Replica",
    "ReplicaState",
    "Table",
]
