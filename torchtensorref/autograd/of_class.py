"""What `as_subclass` gives where gradients are to come back from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class OfClass(Function):
    """A plain tensor of another class over a TensorRef's bytes; gradients come back from it.

    It is marked as a view, so that torch refuses to write in place through it: nobody would tell
    the TensorRef's own history.
    """

    @staticmethod
    def forward(ctx: Any, ref: Any, cls: Any) -> Any:
        """Return the tensor of that class."""
        return ref.exposed_plain("as_subclass").as_subclass(cls)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Hand the gradient on, as a tensor of no class."""
        return gradient.as_subclass(Tensor), None
