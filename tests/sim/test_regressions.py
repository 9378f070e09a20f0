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


def test_a_fresh_result_can_be_set_to_another_storage(manager):
    """Its first view was the replica's own base, which `set_` then took away."""
    ref, other = manager.adopt(torch.rand(2)) + 1, manager.adopt(torch.rand(5)) + 1
    ref.toCPU()
    ref.set_(other)
    assert ref.proxyInfo.block == other.proxyInfo.block
    assert torch.equal(ref.sum(), other.sum())
