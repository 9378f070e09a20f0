"""Operators that still differ from plain torch, each with its reason; ten at most.

Each has its entry in docs/known-issues.md, too.
"""

#: Name in torch's database, reason.
KNOWN: dict[str, str] = {}
