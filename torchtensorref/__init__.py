"""Run torch programs on accelerators smaller than their tensors."""

from ._version import __version__ as __version__
