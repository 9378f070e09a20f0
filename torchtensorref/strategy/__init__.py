"""What a strategy is told and may answer, and how a user chooses one.

The names of the contract are public here: `from torchTensorRef.strategy import Strategy`. The
strategies that come with us are in the folder `strategies/` beside the package, and know only this
contract, errors and units.

May import: base.
"""

from .contract import (
    PERSISTENT_AFTER,
    TINY_SHARE,
    Access,
    Birth,
    BlockSnapshot,
    Death,
    DeviceSnapshot,
    MissingBlock,
    Offer,
    OperandSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
)
from .oldest_first import OldestFirst, until_freed

__all__ = [
    "PERSISTENT_AFTER",
    "TINY_SHARE",
    "Access",
    "Birth",
    "BlockSnapshot",
    "Death",
    "DeviceSnapshot",
    "MissingBlock",
    "Offer",
    "OldestFirst",
    "OpSnapshot",
    "OperandSnapshot",
    "Prefetch",
    "Strategy",
    "until_freed",
]
