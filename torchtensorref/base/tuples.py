"""Tuples of any class with other parts: their constructors may take other arguments."""

from __future__ import annotations

from typing import Any

__all__ = ["tuple_like"]


def tuple_like(value: Any, parts: list[Any]) -> Any:
    """Make a tuple of the same class, and with the same attributes, past its constructor."""
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # of C's own, as `torch.max` gives: it takes the parts
        return kind(parts)
    made = tuple.__new__(kind, parts)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made
