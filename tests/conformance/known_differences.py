"""Operators that still differ from plain torch, each with its reason; ten at most.

Each has its entry in docs/known-issues.md, too.
"""

#: Name in torch's database, reason.
KNOWN: dict[str, str] = {}

_PHASE = "complex singular vectors have a phase that is nobody's choice: rounding may turn it"

#: The same where operators are forced into blocks that add in another order (`--blocks anywhere`).
KNOWN_ANYWHERE: dict[str, str] = {
    "svd_lowrank": _PHASE,
    "pca_lowrank": _PHASE,
    "pinverse": "the gradient of a matrix of rank one is 1e35 times what rounding leaves",
}
