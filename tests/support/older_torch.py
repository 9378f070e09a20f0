"""What the path in C++, where it is asked for, cannot do on a torch older than it is usual for."""

import pytest
import torch

from torchTensorRef.base.torch_versions import CPP_PATH, ROWS
from torchTensorRef.memory import core

#: For tests with TensorRefs inside tensors of another class.
needs_refs_within_classes = pytest.mark.skipif(
    core.library is not None and not ROWS[CPP_PATH].is_in(torch.__version__),
    reason=ROWS[CPP_PATH].reason,
)
