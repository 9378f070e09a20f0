"""What our patch does around the reducer of `DistributedDataParallel`.

The reducer asks in C++ whether a gradient shares memory with its bucket. A TensorRef in C++ has no
memory to be asked about, and is refused; so gradients are plain, at home, when it gets them.
"""

from __future__ import annotations

from typing import Any

from .hooks import is_ref, load


def reducer_wrapper(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `torch.distributed.Reducer(params, ...)`."""
    parameters = args[0] if args else kwargs["params"]
    if load(".memory.core").library is not None:
        # Plain ones, too, as they come from another process: their gradients are TensorRefs.
        for parameter in parameters:
            if parameter.requires_grad:
                # Torch calls these before those of the reducer.
                parameter.register_post_accumulate_grad_hook(_bring_gradient_home)
    return wrapped(*args, **kwargs)


def _bring_gradient_home(parameter: Any) -> None:
    if is_ref(parameter.grad):
        parameter.grad = parameter.grad.exposed_plain("DistributedDataParallel reduces it")
