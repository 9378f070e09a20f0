"""Gradients where torch's C++ takes another formula for subclasses: ours are those of plain torch.

Which formula it was can be seen in the last bits only, and in few of the numbers, so these are
many, with zeros among them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ..support.programs import Bring, assert_right
from ..support.sweeps import usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("zeros", [0, 1, 9])
def test_running_products(right, dtype, zeros):
    def program(bring: Bring) -> Any:
        values = torch.randn(6, 7, dtype=dtype)
        values.view(-1)[torch.randperm(42)[:zeros]] = 0
        x = bring(values.requires_grad_())
        weights = bring(torch.randn(6, 7, dtype=dtype))
        results = []
        for product in (
            lambda: x.cumprod(1),
            lambda: torch.cumprod(x, dim=0),
            lambda: (x * 2).cumprod_(1),
        ):
            y = product()
            results += [y, *torch.autograd.grad(y, x, weights), y._version]
        return results

    right(program)


def test_what_a_running_product_says_of_itself(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        same = x * 1
        return [repr(x.cumprod(0)), same.cumprod_(0) is same, same, x.detach().cumprod(0)]

    right(program)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothed_labels_with_weights(right, reduction):
    def program(bring: Bring) -> Any:
        results = []
        for count in (7, 100, 1000):
            logits = bring(torch.randn(count, 20, requires_grad=True))
            labels = torch.randint(0, 20, (count,))
            labels[::3] = -100
            arguments = (logits, bring(labels), bring(torch.rand(20)))
            loss = nn.functional.cross_entropy(*arguments, reduction=reduction, label_smoothing=0.1)
            results += [loss, *torch.autograd.grad(loss.sum(), logits)]
            with torch.no_grad():
                results.append(
                    nn.functional.cross_entropy(
                        *arguments, reduction=reduction, label_smoothing=0.2
                    )
                )
        return results

    right(program)


def test_smoothed_labels_of_a_module(right):
    def program(bring: Bring) -> Any:
        loss = bring(nn.CrossEntropyLoss(torch.rand(5), label_smoothing=0.3))
        logits = bring(torch.randn(30, 5, requires_grad=True))
        value = loss(logits, bring(torch.randint(0, 5, (30,))))
        value.backward()
        return [value, repr(value), logits.grad, loss(logits, bring(torch.rand(30, 5)))]

    right(program)


def test_second_derivatives_of_determinants(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.randn(2, 5, 5, requires_grad=True))
        weights = bring(torch.randn(2, 5, 5))
        results = []
        for det in (torch.det, torch.linalg.det):
            value = det(x)
            (first,) = torch.autograd.grad(value.abs().sum(), x, create_graph=True)
            results += [repr(value), first, *torch.autograd.grad(first, x, weights)]
        return results

    right(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_second_derivatives_of_products(right, dtype):
    def program(bring: Bring) -> Any:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = bring(torch.randn(4, 6, dtype=dtype, requires_grad=True))
        weights = bring(torch.randn(4, 6, dtype=dtype))
        results = []
        for function in (
            lambda x: x.prod(),
            lambda x: x.prod(1).sum(),
            lambda x: x.prod(0, keepdim=True).sum(),
            lambda x: torch.prod(x, dim=-1, dtype=wide).abs().sum(),
        ):
            value = function(x)
            (first,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
            second = torch.autograd.grad((first * first * x).abs().sum(), x, create_graph=True)
            results += [first, *second, *torch.autograd.grad(second[0], x, weights)]
        return results

    right(program)


@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_products_with_zeros(right, zeros):
    def program(bring: Bring) -> Any:
        values = torch.randn(4, 6)
        values[torch.arange(zeros) % 4, torch.arange(zeros)] = 0
        x = bring(values.requires_grad_())
        weights = bring(torch.randn(4, 6))
        results = []
        for function in (
            lambda x: x.prod(),
            lambda x: x.prod(1).sum(),
            lambda x: x.prod(0, keepdim=True).sum(),
            lambda x: x[0, 0].prod() + x[:, :1].prod(1).sum() + x[:0].prod(),
        ):
            results.append(torch.autograd.grad(function(x), x))
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            results += [first, torch.autograd.grad((first * x).sum(), x, weights.sum().abs())]
        return results

    right(program)


def test_second_derivatives_of_what_is_picked(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.randn(4, 6, requires_grad=True))
        weights = bring(torch.randn(4, 6))
        results = []
        for function in (
            lambda x: x.max() * x[0, 0],
            lambda x: (x * x).min() * x.sum(),
            lambda x: (x * x[0, 1]).median(),
            lambda x: (x * x[0, 1]).nanmedian(),
        ):
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            second = torch.autograd.grad((first * first * x).sum(), x, create_graph=True)
            results += [first, *second, *torch.autograd.grad(second[0], x, weights)]
        return results

    right(program)


def test_gradients_of_products_in_batches(right):
    def program(bring: Bring) -> Any:
        results = []
        for zeros in (0, 1):
            values = torch.randn(5)
            values[:zeros] = 0
            x = bring(values.requires_grad_())
            y = torch.stack([x.prod(), x.max(), x.cumprod(0)[2]])
            results += torch.autograd.grad(
                y, x, bring(torch.eye(3)), retain_graph=True, is_grads_batched=True
            )
        return results

    right(program)


def test_gradients_of_losses_in_batches(right):
    def program(bring: Bring) -> Any:
        targets, weights = bring(torch.randint(0, 5, (4,))), bring(torch.rand(5))
        filled = bring(torch.rand(4, 5))
        losses = [
            lambda x: nn.functional.cross_entropy(x, targets, weights, label_smoothing=0.1),
            lambda x: filled.masked_fill(filled > 0.5, x.sum()).sin().sum(),
            lambda x: filled.clone().masked_fill_(filled > 0.5, x.sum()).sin().sum(),
            lambda x: torch.linalg.svdvals(x).sin().sum(),
        ]
        x = bring(torch.rand(4, 5))
        jacobian = torch.autograd.functional.jacobian
        return [jacobian(loss, x, vectorize=True) for loss in losses]

    right(program)


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_kernels_that_are_chosen_by_whether_gradients_are_wanted(manage, strategy):
    """Also where none are noted: torch looks at the tensor, not at the mode."""

    def program(bring: Bring) -> Any:
        layers = [bring(nn.Linear(32, 96)), bring(nn.Linear(32, 96, bias=False))]
        layers += [bring(nn.Linear(32, 96).requires_grad_(False))]
        mask = nn.Parameter(bring(torch.randn(2, 1, 6, 6)))
        results = []
        for _ in range(2):
            with torch.no_grad():
                x = bring(torch.randn(2, 5, 32)) * 1
                views = [x, x.transpose(0, 1), x[:, ::2], x[0], x.transpose(0, 1)[1]]
                results += [layer(view) for layer in layers for view in views]
                q, k, v = (bring(torch.randn(2, 4, 6, 16)) * 1 for _ in range(3))
                for attended in (None, mask, mask.detach(), mask.expand(2, 4, 6, 6)):
                    results.append(nn.functional.scaled_dot_product_attention(q, k, v, attended))
                results += [layers[0].weight @ layer.weight.t() for layer in layers]
                results += [torch.matmul(view, layers[0].weight.t()) for view in views]
        return results

    assert_right(program, manage(strategy))


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_values_without_vectors(manage, strategy):
    """For a subclass torch finds the vectors, too: by another algorithm, with other last bits."""

    def program(bring: Bring) -> Any:
        results = []
        for dtype in (torch.float32, torch.complex64):
            for wants in (False, True):
                a = bring(torch.randn(5, 7, 7, dtype=dtype))
                a = (a * 1).requires_grad_(wants)
                results += [torch.linalg.svdvals(a), torch.linalg.eigvalsh(a + a.mH)]
                results += [torch.linalg.cond(a), torch.linalg.matrix_norm(a, "nuc")]
                results += [torch.linalg.eigvals(a).abs().sort()[0], torch.linalg.matrix_rank(a)]
                with torch.no_grad():
                    results += [torch.linalg.svdvals(a), torch.linalg.norm(a[0], 2)]
        return results

    assert_right(program, manage(strategy))


@pytest.mark.parametrize("who", usual(["left", "both"], ["nobody", "right"]))
def test_products_of_batches(right, who):
    """For a subclass torch folds some of them: one batch on the right, or none."""

    def program(bring: Bring) -> Any:
        shapes = [(3,), (4, 3), (1, 4, 3), (2, 4, 3), (2, 1, 3), (2, 2, 4, 3), (2, 1, 4, 3)]
        results = []
        for first in shapes:
            for second in shapes:
                a = bring(torch.rand(first).requires_grad_(who in ("left", "both")))
                b = bring(torch.rand(second).requires_grad_(who in ("right", "both")))
                b = b.mT if b.dim() > 1 else b
                for run in (lambda a, b: a @ b, torch.matmul, torch.no_grad()(torch.matmul)):
                    try:
                        result = run(a, b)
                    except RuntimeError as refusal:
                        results.append(str(refusal))
                        continue
                    results.append(result.detach())
                    if result.requires_grad:
                        wanted = [x for x in (a, b) if x.requires_grad]
                        results += torch.autograd.grad(result.sin().sum(), wanted)
        return results

    right(program)
