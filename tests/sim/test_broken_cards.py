"""A card that an error has broken, so that each call of its runtime raises: home is still there."""

import pytest
import torch

from torchTensorRef.base.activation import is_disabled

from ..support.device_double import LateDevice, LateModule


class BreakingModule(LateModule):
    is_broken = False

    def may_refuse(self):
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.fixture
def manager(manage):
    manager = manage("lru")
    device = LateDevice(BreakingModule())
    manager.device = device
    yield manager
    device.double.is_broken = False


def test_what_is_at_home_can_be_read_and_saved(manager, tmp_path):
    weights, other = manager.adopt(torch.full((1000,), 3.0)), manager.adopt(torch.arange(10.0))
    assert (other + 1).tolist()[0] == 1.0
    manager.residency.books.main.double.is_broken = True
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        weights * 2
    for _ in range(2):
        assert weights[:2].tolist() == [3.0, 3.0]
        assert other[:3].numpy().tolist() == [0.0, 1.0, 2.0]
    with is_disabled.entered(False):
        assert torch.zeros(3).tolist() == [0.0] * 3
        torch.save({"weights": weights}, tmp_path / "weights.pt")
    assert torch.equal(torch.load(tmp_path / "weights.pt")["weights"], torch.full((1000,), 3.0))


def test_once_it_works_again_nothing_is_left_halfway(manager):
    weights = manager.adopt(torch.full((1000,), 3.0))
    double = manager.residency.books.main.double
    double.is_broken = True
    with pytest.raises(torch.AcceleratorError):
        weights * 2
    double.is_broken = False
    assert (weights * 2).tolist() == [6.0] * 1000
    manager.check()
