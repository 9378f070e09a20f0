"""Loaded by Python as it starts, in children of `torchtensorref run`: manage what uses torch.

A child that never imports torch pays for nothing but this file. The program's own `sitecustomize`,
which this one hides, is loaded as if this one were not there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.realpath(__file__))


class _WhenTorchIsLookedFor:
    """A finder that finds nothing: it begins when somebody looks for torch."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(_WhenTorchIsLookedFor)
        try:
            from torchTensorRef.diagnostics import children

            children.begin()
        except Exception as error:
            print(
                f"torchtensorref: the child {os.getpid()} ({sys.executable}) stays plain: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )
            return None
        # The caller is in the middle of a list of finders that has changed: begin again.
        return importlib.util.find_spec(name)


def _load_the_programs_own() -> None:
    """Load the `sitecustomize` that Python would have found without us, in our place."""
    sys.path[:] = [path for path in sys.path if not path or os.path.realpath(path) != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _WhenTorchIsLookedFor)
    _load_the_programs_own()
