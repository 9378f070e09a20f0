"""Who looks on at every operator: middlewares, callbacks, the timeline. Nothing of it runs else.

What programs use is public as `torchTensorRef.middlewares`.
"""

from ...base.errors import NanError
from ...base.middlewares import Middleware
from .nan_guard import NanGuard
from .pin import Pin
from .place import Place
from .seen import SeenOperand, SeenOperator

__all__ = ["Middleware", "NanError", "NanGuard", "Pin", "Place", "SeenOperand", "SeenOperator"]
