"""What torch calls in place of modules that are one operator.

Torch asks a module for `_compiled_call_impl` before it looks for hooks and `forward`. As a function
of the class it is given the module itself, so copies of modules, and whoever shares attributes with
one, are called as what they are. `torch.compile` traces this one file of ours, which leads it where
it went without us.
"""

from __future__ import annotations

from typing import Any


class Leaves:
    """Who runs such modules, as soon as there is a TensorRef."""

    def __init__(self) -> None:
        self.ref_type: Any = None
        self.run_linear: Any = None


leaves = Leaves()


def call_linear(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an `nn.Linear`: in place of its `_call_impl`, which does all that is not done here."""
    if len(args) == 1 and type(args[0]) is leaves.ref_type and not kwargs:
        result = leaves.run_linear(self, args[0])
        if result is not NotImplemented:
            return result
    return self._call_impl(*args, **kwargs)
