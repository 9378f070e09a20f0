"""The arithmetic of operators in another device's way, against torch's own on the host."""

from __future__ import annotations

import pytest
import torch

from torchTensorRef.base.activation import disabled
from torchTensorRef.operators import substitutes

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **CLOSE)


def qkv(length=5, heads=4, key_heads=4, width=8):
    torch.manual_seed(0)
    query = torch.randn(2, heads, length, width)
    key, value = torch.randn(2, 2, key_heads, length, width)
    return query, key, value


with disabled():  # another file may have brought injection on already
    MASK = torch.randn(5, 5)

ATTENTIONS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "masked": ({"attn_mask": MASK}, {}),
    "scaled": ({"scale": 0.3}, {}),
    "grouped": ({}, {"key_heads": 2}),
}


@pytest.mark.parametrize("how", ATTENTIONS)
def test_attention_there_and_back(how):
    options, shapes = ATTENTIONS[how]
    operands = qkv(**shapes)
    is_causal = options.get("is_causal", False)
    others = {name: value for name, value in options.items() if name != "is_causal"}
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    expected = flash(*operands, 0.0, is_causal, **others)
    out, log_sum_exp = substitutes.attention_for_cpu(*operands, 0.0, is_causal, **others)
    torch.testing.assert_close(out, expected[0], **CLOSE)
    assert log_sum_exp.shape == expected[1].shape
    assert log_sum_exp.isnan().all(), "who trusts it shall be noticed"
    grad = torch.randn_like(out)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    close(
        substitutes.attention_for_cpu_backward(
            grad, *operands, out, log_sum_exp, 0.0, is_causal, **others
        ),
        backward(grad, *operands, *expected, 0.0, is_causal, **others),
    )


def test_a_backward_pass_at_home_does_not_trust_what_was_made_elsewhere():
    operands = qkv()
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    expected = flash(*operands)
    grad = torch.randn_like(expected[0])
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    right = backward(grad, *operands, *expected, 0.0, False)
    elsewhere = substitutes.attention_for_cpu(*operands)
    home = substitutes.attention_for_cpu_backward_at_home
    close(home(grad, *operands, *elsewhere, 0.0, False), right)
    close(home(grad, *operands, *expected, 0.0, False), right)


@pytest.mark.parametrize("mode", ["inference", "no_grad", "grad"])
def test_gradients_whatever_the_program_has_switched_off(mode):
    contexts = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    with contexts.get(mode, torch.enable_grad)():
        x = torch.tensor([1.0, 2.0])
        (found,) = substitutes.gradients(torch.square, [x], [torch.ones(2)])
    assert found.tolist() == [2.0, 4.0]
    assert not x.requires_grad


def lstm_call(reverse):
    torch.manual_seed(1)
    steps, batch, width, hidden = 4, 2, 6, 8
    shapes = [(steps, batch, width), (4 * hidden, width), (4 * hidden, hidden)]
    shapes += [(4 * hidden,), (4 * hidden,), (batch, hidden), (batch, hidden)]
    tensors = [torch.randn(shape) for shape in shapes]
    return tensors, (reverse, [], 2, hidden, 1, True, False, False, True)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_lstm_layer_there_and_back(reverse):
    tensors, rest = lstm_call(reverse)
    expected = aten.mkldnn_rnn_layer(*tensors, *rest)
    ours = substitutes.lstm_layer(*tensors, *rest)
    close(ours[:3], expected[:3])
    grads = [torch.randn_like(part) for part in expected[:3]]
    hidden = rest[3]
    tail = (reverse, 2, hidden, 1, True, True, False, [], False)
    right = aten.mkldnn_rnn_layer_backward(*tensors, *expected[:3], *grads, *tail, expected[3])
    there = (*tensors, *ours[:3], *grads, *tail, ours[3])
    close(substitutes.lstm_layer_backward(*there), right)
    close(substitutes.lstm_layer_backward_at_home(*there), right)
    here = (*tensors, *expected[:3], *grads, *tail, expected[3])
    close(substitutes.lstm_layer_backward_at_home(*here), right)


def test_an_lstm_layer_with_only_some_gradients():
    tensors, rest = lstm_call(False)
    ours = substitutes.lstm_layer(*tensors, *rest)
    tail = (False, 2, rest[3], 1, True, True, False, [], False, ours[3])
    grads = (torch.ones_like(ours[0]), None, None)
    found = substitutes.lstm_layer_backward(*tensors, *ours[:3], *grads, *tail)
    assert all(torch.isfinite(grad).all() for grad in found)


def test_other_layers_are_left_to_the_host():
    tensors, rest = lstm_call(False)
    with pytest.raises(NotImplementedError):
        substitutes.lstm_layer(*tensors, False, [], 3, *rest[3:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_accelerators_attention_at_home(is_causal):
    operands = [part.requires_grad_() for part in qkv()]
    expected = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=is_causal)
    grad = torch.randn_like(expected)
    right = torch.autograd.grad(expected, operands, grad)
    plain = [part.detach() for part in operands]
    flash = substitutes.flash_attention_at_home(*plain, 0.0, is_causal)
    torch.testing.assert_close(flash[0], expected.detach(), **CLOSE)
    names = aten._scaled_dot_product_flash_attention.default._schema.returns
    assert len(flash) == len(names)
    tail = (*flash[2:6], 0.0, is_causal, *flash[6:8])
    close(substitutes.flash_attention_backward(grad, *plain, *flash[:2], *tail), right)
    efficient = substitutes.efficient_attention_at_home(*plain, None, True, 0.0, is_causal)
    wants = [True, True, True, False]
    found = substitutes.efficient_attention_backward(
        grad, *plain, None, *efficient, 0.0, wants, is_causal
    )
    close(found[:3], right)
    assert found[3] is None


def test_an_accelerators_attention_at_home_with_a_bias_that_learns():
    query, key, value = qkv()
    bias = torch.randn(2, 4, 5, 5)
    leaves = [part.clone().requires_grad_() for part in (query, key, value, bias)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
    grad = torch.randn_like(expected)
    right = torch.autograd.grad(expected, leaves, grad)
    made = substitutes.efficient_attention_at_home(query, key, value, bias, True)
    found = substitutes.efficient_attention_backward(
        grad, query, key, value, bias, *made, 0.0, [True] * 4
    )
    close(found, right)


def test_dropout_of_an_accelerator_is_not_repeated_on_the_host():
    with pytest.raises(NotImplementedError, match="dropout"):
        substitutes.flash_attention_at_home(*qkv(), 0.1)


def test_the_operator_is_picked_by_where_its_first_tensor_lies():
    op = aten.sin.default
    by_device = substitutes.ByDevice(op, lambda x: "elsewhere", None)
    assert by_device.overloadpacket is op.overloadpacket
    assert by_device._schema is op._schema
    assert by_device(torch.zeros(1)).tolist() == [0.0]
    assert by_device(torch.zeros(1, device="meta")) == "elsewhere"


def test_a_stand_in_that_was_not_told_of_is_told_of_by_the_next(monkeypatch):
    """Ctrl-C between the two: C++ would trust what it was never told of."""
    told = []

    def listen(made):
        told.append(made)
        if len(told) == 1:
            raise KeyboardInterrupt

    stand_ins = substitutes.StandIns()
    stand_ins.listeners.append(listen)
    monkeypatch.setattr(substitutes, "stand_ins", stand_ins)
    operands = [torch.rand(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        substitutes.attention_for_cpu(*operands)
    substitutes.attention_for_cpu(*operands)
    assert told == [True, True]
    assert stand_ins.made
