"""Bugs that were found, each with its story."""

import pytest
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_refs_stay_plain_and_work(manager):
    """They say that they are strided, and have no sizes to ask for."""
    rows = [manager.adopt(torch.rand(2, 4)), manager.adopt(torch.rand(3, 4))]
    weight = manager.adopt(torch.rand(2, 4, 4))
    nested = torch.nested.nested_tensor(rows)
    assert nested.is_nested
    assert torch.equal(torch.bmm(nested, weight)[1], rows[1] @ weight[1])


def test_a_subclass_of_others_shares_the_memory(manager):
    class Points(torch.Tensor):
        pass

    ref = manager.adopt(torch.rand(3))
    points = ref.as_subclass(Points)
    points.zero_()
    assert type(points) is Points
    assert ref.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x.chunk(2)[1],
        lambda x: x.split(1)[0],
        lambda x: x.reshape(-1),
        lambda x: x.T,
        lambda x: next(iter(x)),
    ],
)
def test_in_inference_mode_a_view_of_a_normal_tensor_is_normal(manager, look):
    """sentence-transformers slices a buffer there; autograd wants to count the view's versions."""
    plain = torch.rand(4, 3, requires_grad=True)
    ref = manager.adopt(torch.nn.Parameter(plain.detach().clone()))
    with torch.inference_mode():
        seen, expected = look(ref), look(plain)
        product = seen * 2
    assert torch.equal(seen, expected)
    assert product.is_inference()
    assert not seen.is_inference()
