"""Graphs of kernels are not captured where TensorRefs would be in them."""

import pytest
import torch

import torchTensorRef
from torchTensorRef.base.activation import is_disabled
from torchTensorRef.base.errors import UnsupportedOpError

from ...support.device_double import MetaDevice


@pytest.fixture
def elsewhere(manage):
    manager = manage()
    manager.device = MetaDevice()
    with is_disabled.entered(False):
        yield manager
    manager.device = "sim"


def capture():
    """Call torch's method on what is no graph: it comes as far as to say so."""
    return torch.cuda.graphs.CUDAGraph.capture_begin(object())


def test_it_is_refused_where_operators_run_on_the_card(elsewhere):
    with pytest.raises(UnsupportedOpError, match="disabled"):
        capture()


def test_plain_tensors_are_captured(elsewhere):
    with torchTensorRef.disabled(), pytest.raises((AttributeError, TypeError), match="obj"):
        capture()
    elsewhere.device = "sim"
    with pytest.raises((AttributeError, TypeError), match="obj"):
        capture()
