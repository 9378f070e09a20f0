"""For pytest (`-p`): have torchvision imported where its library in C++ cannot be loaded.

Its wheels in pip's index are linked with CUDA's torch. What is asked for in its place are the names
of its operators: nobody who imports it for its transforms calls one.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_spec = find_spec("torchvision")
_folder = Path(_spec.submodule_search_locations[0]) if _spec is not None else Path()  # type: ignore[index]
try:
    torch.ops.load_library(str(_folder / "_C.so"))
except OSError:
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
