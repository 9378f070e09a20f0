"""The models that the compatibility run tries."""

from . import diffusion, others, senses, text

CASES = (*text.CASES, *senses.CASES, *diffusion.CASES, *others.CASES)
