"""The models that the compatibility run tries."""

from . import diffusion, others, senses, text
from .cases import Case

CASES = (*text.CASES, *senses.CASES, *diffusion.CASES, *others.CASES)

__all__ = ["CASES", "Case"]
