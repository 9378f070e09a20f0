"""Bugs that were found, each with its story."""

import torch

from torchTensorRef.tensor import TensorRef


def test_attributes_of_a_parameter_survive_its_adoption(manager):
    """transformers marks what it has loaded; without the mark it drew the weights again."""
    module = torch.nn.Linear(3, 2, bias=False)
    module.weight._is_hf_initialized = True
    manager.adopt(module)
    assert type(module.weight) is TensorRef
    assert module.weight._is_hf_initialized
