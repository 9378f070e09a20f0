"""What is done with modules beside calling them: as with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchTensorRef.tensor.tensor_ref import TensorRef

from ..support.faces import QUIET, failure
from ..support.programs import Bring

pytestmark = QUIET

# -- modules ------------------------------------------------------------------------------------


def test_conversions_of_modules(right):
    def program(bring: Bring) -> Any:
        results = []
        for convert in (
            lambda m: m.half(),
            lambda m: m.double(),
            lambda m: m.bfloat16(),
            lambda m: m.to(torch.float64),
            lambda m: m.to("cpu"),
            lambda m: m.to(memory_format=torch.channels_last),
            lambda m: m.type(torch.float64),
            lambda m: m.apply(lambda part: part.float()),
            lambda m: m.requires_grad_(False),
            lambda m: m.cpu(),
        ):
            model = bring(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)))
            first = model[0].weight
            same = convert(model) is model
            results += [
                same,
                model[0].weight is first,
                model.state_dict(),
                list(model.parameters()),
            ]
        return results

    right(program)


@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict(right, assign):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        state = {name: bring(tensor + 1) for name, tensor in source.state_dict().items()}
        plain = {name: tensor + 2 for name, tensor in source.state_dict().items()}
        told = str(model.load_state_dict(state, assign=assign))
        with torch.no_grad():
            state["0.weight"].zero_()
        first = [tensor.clone() for tensor in model.state_dict().values()]
        model.load_state_dict(plain, assign=assign)
        wrong = failure(lambda: model.load_state_dict({"x": plain["0.bias"]}, assign=assign))
        return [
            told,
            first,
            model.state_dict(keep_vars=True),
            wrong,
            model(bring(torch.rand(2, 3))),
            [isinstance(p, nn.Parameter) for p in model.parameters()],
        ]

    right(program, plain_because="`assign=True` puts plain tensors in")


def test_swapping_tensors(right):
    def program(bring: Bring) -> Any:
        a, b = bring(torch.rand(2)), bring(torch.rand(3, dtype=torch.float64))
        torch.utils.swap_tensors(a, b)
        model = bring(nn.Linear(2, 2))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        a.data, b.data = b.data, a.data
        return [a, b, model.weight, model.state_dict()]

    right(program, on_host_because="it exchanges tensors and computes nothing")


def test_data_of_another_kind_is_refused(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.ones(2))
        others = [
            torch.ones(2, device="meta"),
            bring(torch.ones(2)).to_sparse(),
            torch.ones(2).to_mkldnn(),
            3,
        ]
        return [x + 1, [failure(lambda: setattr(x, "data", other)) for other in others]]  # noqa: B023

    right(program)


def test_a_plain_tensor_takes_the_place_of_a_ref(manager):
    """In Python torch refused it: the memory of one that is made for it has another class."""
    kept, ref = torch.zeros(3), manager.adopt(torch.ones(3))
    parameter = nn.Parameter(torch.zeros(3))
    kept.data, parameter.data = ref, ref
    ref.add_(1)
    assert kept.tolist() == parameter.tolist() == [2, 2, 2]
    assert type(parameter.data) is torch.Tensor


def test_parametrizations(right):
    def program(bring: Bring) -> Any:
        class Symmetric(nn.Module):
            def forward(self, x: Any) -> Any:
                return x.triu() + x.triu(1).transpose(-1, -2)

        model = bring(nn.Linear(3, 3))
        nn.utils.parametrize.register_parametrization(model, "weight", Symmetric())
        normed = nn.utils.parametrizations.weight_norm(bring(nn.Linear(3, 3)))
        spectral = nn.utils.parametrizations.spectral_norm(bring(nn.Linear(3, 3)))
        orthogonal = nn.utils.parametrizations.orthogonal(bring(nn.Linear(3, 3)))
        x = bring(torch.rand(2, 3))
        results = [m(x) for m in (model, normed, spectral, orthogonal)]
        sum(r.sum() for r in results).backward()
        grads = [[p.grad for p in m.parameters()] for m in (model, normed, spectral, orthogonal)]
        nn.utils.parametrize.remove_parametrizations(model, "weight")
        return [results, grads, model.weight, list(normed.state_dict())]

    right(program)


def test_pruning(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(4, 4))
        prune.l1_unstructured(model, "weight", amount=0.5)
        prune.random_unstructured(model, "bias", amount=0.25)
        y = model(bring(torch.rand(2, 4)))
        y.sum().backward()
        state = dict(model.state_dict())
        prune.remove(model, "weight")
        return [y, state, model.weight, model.bias_orig.grad]

    right(program)


def test_clipping_and_vectors_of_parameters(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(4, 4))
        model(bring(torch.rand(2, 4))).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return [norm, vector, list(model.parameters()), [p.grad for p in model.parameters()]]

    right(program)


def test_packed_sequences(right):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(n, 3)) for n in (4, 2)]
        packed = nn.utils.rnn.pack_sequence(rows)
        lstm = bring(nn.LSTM(3, 5))
        out, (h, c) = lstm(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
        return [padded, lengths, h, c, nn.utils.rnn.pad_sequence(rows)]

    right(program, plain_because="C++ makes what is padded")


def test_parameters_and_buffers(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Module())
        model.w = nn.Parameter(bring(torch.rand(3)))
        model.register_buffer("b", bring(torch.rand(3)), persistent=False)
        model.l = nn.ParameterList([nn.Parameter(bring(torch.rand(2))) for _ in range(2)])
        model = bring(model)
        return [
            isinstance(model.w, nn.Parameter),
            isinstance(model.b, nn.Parameter),
            [name for name, _ in model.named_parameters()],
            list(model.state_dict()),
            (model.w * model.b).sum(),
            nn.Parameter(model.b, requires_grad=False).requires_grad,
            model.w.is_leaf,
        ]

    right(program)


def test_a_ref_is_a_tensor(manager):
    x = manager.adopt(torch.rand(2))
    assert isinstance(x, TensorRef)
    assert isinstance(x, torch.Tensor)
